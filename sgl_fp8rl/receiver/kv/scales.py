"""The K and V scales of one rank: FP32 device buffers, written in place, read at graph replay.

A code is ``saturate(k / k_scale)``, so attention is ``softmax(scaling * k_scale * q . c_k) @ c_v *
v_scale``. All are registered buffers: the memory saver keeps buffers and drops Parameters.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch

from sgl_fp8rl.ops.kv import Cache
from sgl_fp8rl.protocol.kv_schema import E4M3, KV_SCALE_ROWS, LARGEST_KV_SCALE, LEAST_KV_SCALE
from sgl_fp8rl.receiver.kv.quantized import (
    Caches,
    Heads,
    KVScalesError,
    LayerKV,
    QuantizedKV,
    on_host,
)

V = KV_SCALE_ROWS.index("v")
START_V = 0.25
"""V's scale before the first measurement, where scales are measured; others are 1. A measurement
keeps it where V's largest magnitude is 0.11 to 28, as most models have it, also if the first
prompt's is a fiftieth of that (``engine/control/kv_calibrate.py``)."""


class KVScales(QuantizedKV):
    """The scales of one rank's KV cache and the statistics of what was stored under them.

    Args:
        scheme: ``kv_scheme`` of the server arguments.
    """

    format = E4M3
    value_dtype = torch.bfloat16

    def __init__(
        self,
        layers: int,
        heads: Heads,
        scheme: str,
        device: torch.device | str,
    ) -> None:
        super().__init__(layers, heads, device)
        self.scheme = scheme
        self.pending: set[int] = set()
        """Layers whose next prefill measures their scales."""
        self._measured: torch.cuda.Event | None = None
        """Where the GPU writes the scales that it measured last."""
        # SGLang loads models with BF16 as the default dtype
        shape = (self.layers, len(KV_SCALE_ROWS), heads.total)
        start = torch.ones(shape, dtype=torch.float32, device=device)
        if scheme == "engine":
            start[:, V] = START_V
        self.scales: torch.Tensor
        self.register_buffer("scales", start)  # of the whole model, on each rank
        self.store: torch.Tensor
        self.register_buffer("store", self._mine(start))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the scales of the whole model: layers, rows, KV heads."""
        return self.layers, len(KV_SCALE_ROWS), self.heads.total

    def check(self, scales_L2H: torch.Tensor) -> None:
        """Check that these can be this model's scales. Synchronizes with the device.

        Raises:
            KVScalesError: the shape is wrong, or a scale is outside of what kernels take.
        """
        if tuple(scales_L2H.shape) != self.shape:
            raise KVScalesError(
                f"the KV scales have shape {tuple(scales_L2H.shape)}; this model needs "
                f"{self.shape}: layers, K and V (no longer Q), KV heads"
            )
        sound = (scales_L2H >= LEAST_KV_SCALE) & (scales_L2H <= LARGEST_KV_SCALE)
        if not bool(sound.all()):
            layer, row, head = (~sound).nonzero()[0].tolist()
            value = float(scales_L2H[layer, row, head])
            raise KVScalesError(
                f"the {KV_SCALE_ROWS[row].upper()} scale of layer {layer}, KV head {head} is "
                f"{value}; send amax * margin / 448, from {LEAST_KV_SCALE:.1e} to "
                f"{LARGEST_KV_SCALE:.1e}"
            )

    def write(self, scales_L2H: torch.Tensor, first: int = 0) -> None:
        """Set scales in place; without a device sync if they are on the device.

        Args:
            scales_L2H: FP32, checked by the caller; for its L layers from layer ``first`` on.
        """
        layers = slice(first, first + len(scales_L2H))
        # E4M3 keeps its precision over 15 octaves: a head's own scale would gain nothing
        kept = scales_L2H.amax(-1, keepdim=True).expand_as(scales_L2H)
        self.scales[layers].copy_(kept)
        self.store[:, layers].copy_(self._mine(kept))
        self.statistics[layers].zero_()
        if scales_L2H.is_cuda:  # the values are there when the GPU gets here
            self._measured = torch.cuda.Event()
            self._measured.record()
        self.pending -= set(range(layers.start, layers.stop))

    def _mine(self, kept_L2H: torch.Tensor) -> torch.Tensor:
        """Those of this rank's heads, ``[2, L, H]``: what kernels read."""
        return torch.stack(kept_L2H[..., self.heads.mine].unbind(1))

    def after_update(self, incoming_L2H: torch.Tensor | None) -> None:
        """Use the scales that came with the weights, else apply the scheme."""
        if incoming_L2H is not None:
            self.write(incoming_L2H)
        elif self.scheme == "unit":
            self.write(torch.ones_like(self.scales))
        elif self.scheme == "engine":
            self.recalibrate()

    def recalibrate(self) -> None:
        """Have the next prefill measure every layer; the cache must be empty."""
        self.pending = set(range(self.layers))

    @property
    def is_pending(self) -> bool:
        return bool(self.pending)

    def layer(self, index: int) -> "ScaledLayer":
        return ScaledLayer(self, index)

    def load(self, path: str | Path) -> None:
        """Set the scales of a file; KVScalesError as of ``read_file`` and ``check``."""
        scales = torch.tensor(read_file(path), dtype=torch.float32)
        self.check(scales)
        self.write(scales)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and statistics on the host, without waiting for the device's other work but the
        measurement of these scales."""
        return on_host(self.scales, self._measured), on_host(self.statistics, self._measured)


class ScaledLayer(LayerKV):
    """One layer's part of ``KVScales``."""

    scales: KVScales

    def __init__(self, scales: KVScales, layer_index: int) -> None:
        super().__init__(scales, layer_index)
        (self.k_scale_h, self.v_scale_h) = scales.store[:, layer_index]

    @property
    def is_due(self) -> bool:
        return self.scales.measuring and self.layer_index in self.scales.pending

    def codes(self, caches: Caches) -> Cache:
        return Cache(*caches, self.k_scale_h, self.v_scale_h, stats_C=self.statistics)


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
            raise ValueError("it has no scales [layers, K and V, heads]")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise KVScalesError(
            f"no KV scales can be read from {path} ({type(error).__name__}: {error}); save the "
            f"reply to the control message kv as JSON"
        ) from error
    return scales  # type: ignore[no-any-return]
