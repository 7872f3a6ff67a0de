"""What an engine must hold of a checkpoint, written down by hand for the families of Qwen3 and
DeepSeek.

It shares neither routes nor quantizer with the engine: HF tensors are quantized by
``tests.oracle``, then cut for each tensor-parallel rank and stacked as SGLang's layers have them.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests import oracle
from tests.engine import models

Array = NDArray[Any]
Pair = tuple[Array, ...]
"""Codes and scales."""
BLOCK = oracle.BLOCK

NOPE, VALUES = 128, 128
"""Rows of a head of MLA: of its keys, but for those that RoPE turns, and of its values."""
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")  # rows are shared out between ranks


def digests(
    checkpoint: Path, tp_size: int, ep_size: int = 1, *, power_of_two: bool = False
) -> list[dict[str, str]]:
    """SHA-256 of each engine parameter by its name, for each rank; see ``parameters_of``.

    Args:
        power_of_two: each scale is one.
    """
    tensors = dict(models.named_tensors(checkpoint))
    fp8: dict[str, Pair] = {}
    for name in models.fp8_names(checkpoint):
        weight = tensors.pop(name).float().numpy()
        fp8[name] = oracle.quantize_weight(weight, power_of_two=power_of_two)
    bf16 = {name: tensor.view(torch.int16).numpy() for name, tensor in tensors.items()}
    return [
        {name: _sha256(array) for name, array in parameters.items()}
        for parameters in (parameters_of(fp8, bf16, r, tp_size, ep_size) for r in range(tp_size))
    ]


def _sha256(array: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def parameters_of(
    fp8: dict[str, Pair], bf16: dict[str, Array], rank: int, tp_size: int, ep_size: int = 1
) -> dict[str, Array]:
    """What each parameter of a rank holds, from whole codes and scales and bits of BF16.

    Expert parallelism is none, or over all ranks: each then holds whole experts, and shards of
    everything else.
    """
    assert ep_size in (1, tp_size)

    def shard(name: str, axis: int) -> Pair:
        is_whole = ep_size > 1 and ".experts." in name
        return cut(fp8[f"{name}_proj.weight"], axis, *((0, 1) if is_whole else (rank, tp_size)))

    def rows(name: str) -> Pair:
        return cut(shard(name, 0), 1, 0, 1)

    def columns(name: str) -> Pair:
        return shard(name, 1)

    def gate_up(block: str) -> Pair:
        return _join(np.concatenate, [rows(f"{block}.gate"), rows(f"{block}.up")])

    def mla(attention: str) -> dict[str, Pair]:
        latents = fp8[f"{attention}.kv_a_proj_with_mqa.weight"]  # whole on every rank
        queries = fp8.get(f"{attention}.q_a_proj.weight")
        if queries is None:
            return {"kv_a_proj_with_mqa": latents, "q_proj": rows(f"{attention}.q")}
        joined = _join(np.concatenate, [queries, latents])
        return {"fused_qkv_a_proj_with_mqa": joined, "q_b_proj": rows(f"{attention}.q_b")}

    pairs: dict[str, Pair] = {}
    absorbed: dict[str, Array] = {}
    bf16 = dict(bf16)
    for layer in _layers(fp8):
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        if f"{attention}.kv_b_proj.weight" in bf16:
            pairs |= {f"{attention}.{name}.weight": p for name, p in mla(attention).items()}
            whole = bf16.pop(f"{attention}.kv_b_proj.weight")
            absorbed |= absorb(attention, np.split(whole, tp_size)[rank])
        else:
            qkv = [rows(f"{attention}.{part}") for part in "qkv"]
            pairs[f"{attention}.qkv_proj.weight"] = _join(np.concatenate, qkv)
        pairs[f"{attention}.o_proj.weight"] = columns(f"{attention}.o")
        count = _experts(fp8, mlp)
        mine = np.split(np.arange(count), ep_size)[rank] if ep_size > 1 else range(count)
        experts = [f"{mlp}.experts.{e}" for e in mine]
        if experts:
            gate_ups, downs = map(gate_up, experts), [columns(f"{e}.down") for e in experts]
            pairs[f"{mlp}.experts.w13_weight"] = _join(np.stack, list(gate_ups))
            pairs[f"{mlp}.experts.w2_weight"] = _join(np.stack, downs)
        for block in (mlp, f"{mlp}.shared_experts"):
            if f"{block}.down_proj.weight" in fp8:
                pairs[f"{block}.gate_up_proj.weight"] = gate_up(block)
                pairs[f"{block}.down_proj.weight"] = columns(f"{block}.down")

    biases = [n for n in bf16 if n.endswith("q_proj.bias")]
    joined = {
        name.replace("q_proj", "qkv_proj"): np.concatenate(
            [np.split(bf16.pop(name.replace("q_proj", f"{x}_proj")), tp_size)[rank] for x in "qkv"]
        )
        for name in biases
    }
    in_fp32 = {n: _to_fp32(bf16.pop(n)) for n in list(bf16) if n.endswith("correction_bias")}
    parameters = joined | absorbed | in_fp32
    for name, bits in bf16.items():  # norms and routers are on every rank
        parameters[name] = np.split(bits, tp_size)[rank] if name in VOCABULARY else bits
    for name, (codes, scales) in pairs.items():
        parameters[name], parameters[f"{name}_scale_inv"] = codes, scales
    return parameters


def absorb(attention: str, kv_b: Array) -> dict[str, Array]:
    """MLA's projection of latents, and what its attention keeps of it.

    Args:
        kv_b: of each head of the rank, the rows of its keys and those of its values.
    """
    heads = kv_b.reshape(-1, NOPE + VALUES, kv_b.shape[1])
    return {
        f"{attention}.kv_b_proj.weight": kv_b,
        f"{attention}.w_kc": heads[:, :NOPE],
        f"{attention}.w_vc": heads[:, NOPE:].transpose(0, 2, 1),
    }


def _to_fp32(bits: Array) -> Array:
    """The bits of FP32 numbers, from those of BF16."""
    return bits.view(np.uint16).astype(np.uint32) << 16


def cut(parts: Pair, axis: int, rank: int, ranks: int) -> Pair:
    """What a rank stores of a matrix that is cut along an axis: whole blocks, those of the matrix.

    Elements of other ranks in these blocks are zeros, and so is what makes all ranks' shards equal.
    """
    codes, scales = parts
    size = codes.shape[axis] // ranks
    borders = [(r * size // BLOCK, -(-(r + 1) * size // BLOCK)) for r in range(ranks)]
    blocks = max(last - first for first, last in borders)
    first, last = borders[rank]
    lead = rank * size - first * BLOCK

    def filled(array: Array, value: Any, count: int, begin: int, taken: slice) -> Array:
        shape = list(array.shape)
        shape[axis] = count
        stored = np.full(shape, value, array.dtype)
        source = np.take(array, range(taken.start, taken.stop), axis)
        index = [slice(None)] * array.ndim
        index[axis] = slice(begin, begin + source.shape[axis])
        stored[tuple(index)] = source
        return stored

    taken = slice(rank * size, (rank + 1) * size)
    return (
        filled(codes, 0, blocks * BLOCK, lead, taken),
        filled(scales, _scale_of_zeros(scales), blocks, 0, slice(first, last)),
    )


def _scale_of_zeros(others: Array) -> Array:
    """Of a block of zeros, such as padding is made of; a power of two where all others are."""
    fractions, _ = np.frexp(others)
    zeros = np.zeros((1, 1), np.float32)
    return oracle.quantize_weight(zeros, power_of_two=bool((fractions == 0.5).all()))[1][0, 0]


def _join(how: Callable[[Sequence[Array]], Array], pairs: list[Pair]) -> Pair:
    return tuple(how(parts) for parts in zip(*pairs, strict=True))


def _layers(fp8: dict[str, Pair]) -> list[str]:
    return sorted({name.split(".self_attn.")[0] for name in fp8 if ".self_attn." in name})


def _experts(fp8: dict[str, Pair], mlp: str) -> int:
    found = (re.match(rf"{re.escape(mlp)}\.experts\.(\d+)\.", name) for name in fp8)
    return 1 + max((int(match[1]) for match in found if match), default=-1)
