"""Engine-side calibration: the first prefill after an update measures the scales it stores with.

E4M3 is a float: a margin shifts values to other binades and costs no precision until they fall
below 2^-6, its smallest normal number, 14.8 binades below 448. A margin of 2 leaves 13.8 of them,
one of 4 leaves 12.8; values above the range saturate. So margins are generous, and larger if only
few tokens were seen.
"""

import logging
from typing import Any

import torch
import torch.distributed as dist

from sgl_fp8rl import compat
from sgl_fp8rl.engine.internal_requests import is_internal
from sgl_fp8rl.kv_cache.quantized import QuantizedKV
from sgl_fp8rl.kv_cache.scales import ScaledLayer
from sgl_fp8rl.ops.reference import FP8_MAX

logger = logging.getLogger(__name__)

MARGIN = 2.0
"""Headroom above the largest measured magnitude."""
SMALL_MARGIN = 4.0
SMALL_SAMPLE = 256
"""With fewer tokens the largest magnitude is a poor estimate, and ``SMALL_MARGIN`` applies."""
FEW = 16
"""With fewer tokens it says little: the first ones of a prompt often have small values."""


def calibrate(mine: ScaledLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Measure a layer on these tokens and set its scales, before they are stored.

    No sync with the device. Every rank calls this for the same tokens, since the scales of a layer
    are the same on all ranks.

    Args:
        q, k, v: after QK-norm and RoPE, [tokens, ...] with the heads of this rank.
    """
    scales = mine.scales
    amax_3 = torch.stack([largest(x) for x in (k, v, q)])
    if dist.is_initialized() and compat.get_tp_group().world_size > 1:
        dist.all_reduce(amax_3, dist.ReduceOp.MAX, group=compat.get_tp_group().device_group)
    if len(k) < FEW and mine.layer_index == 0:
        logger.warning(
            "the KV scales of this policy version are measured on %d tokens, and later ones may "
            "clip; after an update, let the first request be a real prompt",
            len(k),
        )
    scales_13H = scales_of(amax_3, len(k)).view(1, -1, 1).expand(1, *scales.shape[1:])
    scales.write(scales_13H, first=mine.layer_index)


def largest(x: torch.Tensor) -> torch.Tensor:
    """Largest finite magnitude, FP32: a NaN in one prompt must not make every later token NaN."""
    return x.abs().nan_to_num_(nan=0.0, posinf=0.0).amax().float()


def scales_of(amax_3: torch.Tensor, tokens: int) -> torch.Tensor:
    """amax * margin / 448, of a layer's K, V and Q; 1 where all are zeros."""
    margin = MARGIN if tokens >= SMALL_SAMPLE else SMALL_MARGIN
    return torch.where(amax_3 > 0, amax_3 * margin / FP8_MAX, 1.0)


def watch_forward(original: Any, runner: Any, forward_batch: Any, *args: Any, **kw: Any) -> Any:
    """AROUND ``ModelRunner.forward``: have a prefill of user requests do the pending measurements.

    Graph capture and SGLang's dummy batches run the model without this function, and SGLang's own
    requests are recognized by their ids.
    """
    scales: QuantizedKV | None = getattr(runner.model, "fp8rl_kv", None)
    if scales is None or not (scales.is_pending or any(scales.to_observe)):
        return original(runner, forward_batch, *args, **kw)
    real = not all(map(is_internal, forward_batch.rids or ()))
    scales.measuring = real and forward_batch.forward_mode.is_extend()
    try:
        return original(runner, forward_batch, *args, **kw)
    finally:
        scales.measuring = False
