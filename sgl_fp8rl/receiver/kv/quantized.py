"""What one rank keeps of its 8-bit KV cache, in either format, and what an attention layer asks.

``scales.py`` has E4M3 under a scale for each layer, ``token_scales.py`` INT8 under one for each
token and head. Shape suffixes: T tokens, S slots, H KV heads of this rank, D head dim.
"""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from sgl_fp8rl.ops import paged_decode_cuda, paged_prefill
from sgl_fp8rl.ops.kv import STATS, Cache

Caches = tuple[torch.Tensor, torch.Tensor]
"""The pool's buffers of a layer, ``[S, H, D]``: of K and of V."""


class KVScalesError(ValueError):
    """KV scales that do not match this model, or are not valid scales."""


@dataclass(frozen=True)
class Heads:
    """The KV heads of the whole model, and those of this rank."""

    total: int
    first: int
    count: int

    @classmethod
    def of(cls, total: int, rank: int, tp_size: int) -> "Heads":
        """As SGLang splits them: with more ranks than heads, each head is on several ranks."""
        if tp_size <= total:
            return cls(total, rank * (total // tp_size), total // tp_size)
        return cls(total, rank // (tp_size // total), 1)

    @property
    def mine(self) -> slice:
        return slice(self.first, self.first + self.count)


class QuantizedKV(nn.Module):
    """The state of an 8-bit KV cache, and the statistics of what was stored."""

    format: ClassVar[str]
    """As the option ``kv_cache`` names it."""
    value_dtype: ClassVar[torch.dtype]
    """Of 16 bits, which holds codes times scales exactly (E4M3: where scales are powers of two)."""

    def __init__(self, layers: int, heads: Heads, device: torch.device | str) -> None:
        super().__init__()
        self.layers, self.heads = layers, heads
        self.measuring = False
        """Whether the current forward pass may be measured (``kv_calibrate.watch_forward``)."""
        self.decode_workspace: paged_decode_cuda.Workspace | None = None
        """Of our decode kernel, where it serves."""
        self.prefill_workspace: paged_prefill.Workspace | None = None
        """Of prefill in 16 bits, where it serves."""
        self.elements = [0] * layers
        """Elements of K per token and layer on this rank; V has as many."""
        self.statistics: torch.Tensor
        self.register_buffer(
            "statistics", torch.zeros(layers, STATS, dtype=torch.int64, device=device)
        )

    @property
    def is_pending(self) -> bool:
        """Whether the next prefill measures scales."""
        return False

    def layer(self, index: int) -> "LayerKV":
        """The part of one attention layer."""
        raise NotImplementedError

    def after_update(self, incoming_L2H: torch.Tensor | None) -> None:
        """Follow new weights, and the scales that came with them, checked; the cache is empty."""
        raise NotImplementedError

    def read(self) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Scales of layers, if there are any, and statistics, on the host, without waiting for the
        device's other work."""
        raise NotImplementedError


class LayerKV:
    """One layer's part: what a hook on its attention needs, made once.

    Stored on SGLang's layer; since it is not a module, it adds no parameter names.
    """

    def __init__(self, scales: QuantizedKV, layer_index: int) -> None:
        self.scales, self.layer_index = scales, layer_index
        self.statistics = scales.statistics[layer_index]

    @property
    def is_due(self) -> bool:
        """Whether to measure this layer's scales on the current tokens."""
        return False

    def store(
        self,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        slots_T: torch.Tensor,
        caches: Caches,
        read_back: bool = False,
    ) -> Caches | None:
        """Write the codes of these tokens into the pool's buffers, as ``ops.kv.store_kv``, whose
        result it is."""
        if k_THD.is_cuda:
            from sgl_fp8rl.ops.kv_triton import store_kv
        else:
            from sgl_fp8rl.ops.kv import store_kv
        return store_kv(k_THD, v_THD, slots_T, self.codes(caches), read_back=read_back)

    def codes(self, caches: Caches) -> Cache:
        """What the pool's buffers hold."""
        raise NotImplementedError

    def query(self, q_NQD: torch.Tensor) -> torch.Tensor:
        """The q that attends to ``codes``."""
        return q_NQD


def layer_kv(layer: Any) -> LayerKV | None:
    """Our part of an attention layer, or None if its KV cache is not ours."""
    return getattr(layer, "fp8rl_layer", None)


def on_host(x: torch.Tensor, behind: torch.cuda.Event | None = None) -> torch.Tensor:
    """A copy of x, without waiting for its device's other work but that before ``behind``."""
    if not x.is_cuda:
        return x.clone()
    stream = _beside(x.device)
    with torch.cuda.stream(stream):
        if behind is not None:
            stream.wait_event(behind)
        copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
    done.synchronize()
    return copy


@functools.cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    """One stream, reused: torch cycles through a few, and the next may be SGLang's own."""
    return torch.cuda.Stream(device)
