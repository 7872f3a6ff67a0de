"""Bytes that an update or a decode step must move, and their time at the bandwidth of a copy."""

import math
from collections.abc import Iterable

from benchmarks.engines.models import Parameter, Shape

BLOCK = 128
BF16, FP8, SCALE = 2, 1, 4  # bytes
KV = {"bf16": (BF16, 0), "e4m3": (FP8, 0), "int8": (1, SCALE)}
"""By format of the KV cache: bytes of an element, and of the scales of a token and head."""


def payload_bytes(parameters: Iterable[Parameter], source: str) -> int:
    """All weights as they are held. ``source``: "bf16", or "fp8" for codes and scales."""
    return sum(_source_bytes(p, source) for p in parameters)


def update_traffic(
    parameters: Iterable[Parameter], source: str, target: str, bucket: str | None
) -> int:
    """Bytes read and written on the GPU by an update that touches each byte once on its way.

    Args:
        source: "bf16" or "fp8", as in ``payload_bytes``.
        target: "bf16", or "fp8" for an engine that keeps its linears in FP8.
        bucket: what is written into a bucket and read from it again, or None where the engine reads
            the source in place.
    """
    parameters = list(parameters)
    through = 2 * payload_bytes(parameters, bucket) if bucket is not None else 0
    return payload_bytes(parameters, source) + through + payload_bytes(parameters, target)


def kv_token_bytes(shape: Shape, kv_format: str) -> int:
    """K and V of one token in all layers."""
    element, scales = KV[kv_format]
    return shape.layers * shape.kv_heads * (2 * element * shape.head_dim + scales)


def step_weight_bytes(parameters: Iterable[Parameter], form: str, experts_read: float) -> float:
    """Weights that a decode step reads: all but the embeddings, of which it takes single rows.

    Args:
        form: "bf16" or "fp8", as in ``payload_bytes``.
        experts_read: part of the experts that the batch is routed to.
    """
    return sum(
        _source_bytes(p, form) * (experts_read if ".experts." in p.name else 1.0)
        for p in parameters
        if p.name != "model.embed_tokens.weight"
    )


def floor_ms(moved: int, copy_tb_s: float) -> float:
    """Least time in ms to read and write so many bytes, at what a copy reads and writes in TB/s."""
    return moved / (copy_tb_s * 1e9)


def _source_bytes(parameter: Parameter, form: str) -> int:
    if form == "bf16" or not parameter.fp8:
        return BF16 * parameter.numel
    return FP8 * parameter.numel + SCALE * _blocks(parameter)


def _blocks(parameter: Parameter) -> int:
    *experts, rows, cols = parameter.shape
    return math.prod(experts) * -(-rows // BLOCK) * -(-cols // BLOCK)
