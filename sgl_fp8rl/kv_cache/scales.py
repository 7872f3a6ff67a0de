"""The K, V and Q scales of one rank: FP32 device buffers, written in place, read at graph replay.

A code is ``saturate(k / k_scale)``, so attention is ``softmax(scaling * k_scale * q . c_k) @ c_v *
v_scale``; ``kernel_scales.py`` derives the factors of each kernel. All are registered buffers: the
memory saver keeps buffers and drops Parameters. The rows of ``backends.BACKENDS`` say which kernels
there are.
"""

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sgl_fp8rl.kv_cache.backends import BACKENDS
from sgl_fp8rl.kv_cache.kernel_scales import Derive, KernelScales, V
from sgl_fp8rl.ops.kv import STATS
from sgl_fp8rl.ops.paged_decode_cuda import Workspace
from sgl_fp8rl.protocol.kv_schema import KV_SCALE_ROWS, LARGEST_KV_SCALE, LEAST_KV_SCALE

ERRORS = 7
"""Sums of a layer, float64 (``quant_error.py``): tokens; then for K and for V the squared errors,
the squares, and the number of NaN and Inf elements."""
START_V = 0.25
"""V's scale before the first measurement, where scales are measured; others are 1. A measurement
keeps it where V's largest magnitude is 0.055 to 28, as most models have it, also if the first
prompt's is a fiftieth of that (``engine/kv_calibrate.py``)."""


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


class KVScales(nn.Module):
    """The scales of one rank's KV cache and the statistics of what was stored under them.

    Args:
        heads: the KV heads of the model.
        scheme: ``kv_scheme`` of the server arguments.
    """

    def __init__(
        self,
        layers: int,
        heads: Heads,
        scheme: str,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.layers, self.heads = layers, heads
        self.scheme = scheme
        self.pending: set[int] = set()
        """Layers whose next prefill measures their scales."""
        self.measuring = False
        """Whether the current forward pass may be measured (``kv_calibrate.watch_forward``)."""
        self.to_observe = [0] * self.layers
        """Prefilled tokens of each layer whose error will be measured (``quant_error.py``)."""
        self._measured: torch.cuda.Event | None = None
        """Where the GPU writes the scales that it measured last."""
        self.errors: torch.Tensor | None = None
        """``[layers, ERRORS]`` after the first request; no graph reads it."""
        self.workspace: Workspace | None = None
        """Of our decode kernel, where it serves."""
        self.elements = [0] * self.layers
        """Elements of K per token and layer on this rank; V has as many."""
        # SGLang loads models with BF16 as the default dtype
        shape = (self.layers, len(KV_SCALE_ROWS), heads.total)
        start = torch.ones(shape, dtype=torch.float32, device=device)
        if scheme == "engine":
            start[:, V] = START_V
        self.scales: torch.Tensor
        self.statistics: torch.Tensor
        self.register_buffer("scales", start)  # of the whole model, on each rank
        for name, factors in self._derive(start).items():
            self.register_buffer(name, factors)
        self.register_buffer(
            "statistics", torch.zeros(self.layers, STATS, dtype=torch.int64, device=device)
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the scales of the whole model: layers, rows, KV heads."""
        return self.layers, len(KV_SCALE_ROWS), self.heads.total

    def check(self, scales_L3H: torch.Tensor) -> None:
        """Check that these can be this model's scales. Synchronizes with the device.

        Raises:
            KVScalesError: the shape is wrong, or a scale is outside of what kernels take.
        """
        if tuple(scales_L3H.shape) != self.shape:
            raise KVScalesError(
                f"the KV scales have shape {tuple(scales_L3H.shape)}; this model needs "
                f"{self.shape}: layers, K V Q, KV heads"
            )
        sound = (scales_L3H >= LEAST_KV_SCALE) & (scales_L3H <= LARGEST_KV_SCALE)
        if not bool(sound.all()):
            layer, row, head = (~sound).nonzero()[0].tolist()
            value = float(scales_L3H[layer, row, head])
            raise KVScalesError(
                f"the {KV_SCALE_ROWS[row].upper()} scale of layer {layer}, KV head {head} is "
                f"{value}; send amax * margin / 448, from {LEAST_KV_SCALE:.1e} to "
                f"{LARGEST_KV_SCALE:.1e}"
            )

    def write(self, scales_L3H: torch.Tensor, first: int = 0) -> None:
        """Set scales in place; without a device sync if they are on the device.

        Kernel scales are computed where the scales are: an update brings them on the host, where a
        dozen small operations cost less than their launches.

        Args:
            scales_L3H: FP32, checked by the caller; for its L layers from layer ``first`` on.
        """
        layers = slice(first, first + len(scales_L3H))
        # E4M3 keeps its precision over 15 octaves: a head's own scale would gain nothing
        kept = scales_L3H.amax(-1, keepdim=True).expand_as(scales_L3H)
        derived = self._derive(kept)
        self.scales[layers].copy_(kept)
        for name, factors in derived.items():
            self.get_buffer(name)[:, layers].copy_(factors)
        self.statistics[layers].zero_()
        if self.errors is not None:
            self.errors[layers].zero_()
        if scales_L3H.is_cuda:  # the values are there when the GPU gets here
            self._measured = torch.cuda.Event()
            self._measured.record()
        self.pending -= set(range(layers.start, layers.stop))

    def _derive(self, kept_L3H: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the store and each attention kernel take of these scales, by the buffer's name."""
        mine = KernelScales.of(kept_L3H[..., self.heads.mine])
        derived = {"store": mine.store_2Lh, "q_factor": mine.q_factor_1Lh}
        return derived | {name: derive(mine) for name, derive in _derivations()}

    def after_update(self, incoming_L3H: torch.Tensor | None) -> None:
        """Follow new weights: use the scales that came with them, else apply the scheme."""
        if incoming_L3H is not None:
            self.write(incoming_L3H)
        elif self.scheme == "unit":
            self.write(torch.ones_like(self.scales))
        elif self.scheme == "engine":
            self.recalibrate()

    def recalibrate(self) -> None:
        """Have the next prefill measure every layer; the cache must be empty."""
        self.pending = set(range(self.layers))

    def load(self, path: str | Path) -> None:
        """Set the scales of a file.

        Raises:
            KVScalesError: it cannot be read, or its scales do not match this model.
        """
        scales = torch.tensor(read_file(path), dtype=torch.float32)
        self.check(scales)
        self.write(scales)

    def snapshot(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and statistics on the host, without waiting for the device's other work but the
        measurement of these scales."""
        return on_host(self.scales, self._measured), on_host(self.statistics, self._measured)


class LayerKV:
    """One layer's part of ``KVScales``: what a hook on its attention needs, made once.

    Stored on SGLang's layer; since it is not a module, it adds no parameter names.
    """

    def __init__(self, scales: KVScales, layer_index: int) -> None:
        self.scales, self.layer_index = scales, layer_index
        (self.k_scale_h, self.v_scale_h) = scales.store[:, layer_index]  # type: ignore[index]
        (self.q_factor_h,) = scales.q_factor[:, layer_index]  # type: ignore[index]
        self.factors = {
            name: scales.get_buffer(name)[:, layer_index].unbind() for name, _ in _derivations()
        }
        """By attention backend: what its row of ``BACKENDS`` derives."""
        self.statistics = scales.statistics[layer_index]

    @property
    def is_due(self) -> bool:
        """Whether to measure this layer's scales on the current tokens."""
        return self.scales.measuring and self.layer_index in self.scales.pending

    @property
    def is_observed(self) -> bool:
        """Whether to measure the error of the current tokens."""
        return self.scales.measuring and self.scales.to_observe[self.layer_index] > 0


def layer_kv(layer: Any) -> LayerKV | None:
    """Our part of an attention layer, or None if its KV cache is not ours."""
    return getattr(layer, "fp8rl_layer", None)


def _derivations() -> list[tuple[str, Derive]]:
    return [(name, row.derive) for name, row in BACKENDS.items() if row.derive is not None]


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


def read_file(path: str | Path) -> list[Any]:
    """The scales in a JSON file with the reply to the control message ``kv``.

    Raises:
        KVScalesError: there is no such file, or it has no scales.
    """
    try:
        content = json.loads(Path(path).expanduser().read_text())
        scales = content["scales"]
        shape = torch.tensor(scales, dtype=torch.float32).shape
        if len(shape) != 3 or not math.prod(shape):
            raise ValueError("it has no scales [layers, K V Q, heads]")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise KVScalesError(
            f"no KV scales can be read from {path} ({type(error).__name__}: {error}); save the "
            f"reply to the control message kv as JSON"
        ) from error
    return scales  # type: ignore[no-any-return]
