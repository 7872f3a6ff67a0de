"""Engine-side calibration: the first prefill after an update measures the scales it stores with.

E4M3 is a float: under powers of two a stored value is the same whatever the scale, unless it is
clipped or falls below 2^-6 of the scale, where E4M3 gets coarse. So a scale hardly matters where it
has room both ways, and is kept then: what is stored must not depend on who asks first.
"""

from typing import Any

import torch
import torch.distributed as dist

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.control.internal_requests import is_internal
from sgl_fp8rl.ops.kv import power_of_two_above
from sgl_fp8rl.ops.reference import FP8_MAX
from sgl_fp8rl.protocol.kv_schema import LARGEST_KV_SCALE, LEAST_KV_SCALE
from sgl_fp8rl.receiver.kv.quantized import QuantizedKV
from sgl_fp8rl.receiver.kv.scales import ScaledLayer

LEAST_ROOM, MOST_ROOM = 4.0, 1024.0
"""The range of a scale over the largest magnitude that was measured. The first tokens of a prompt
can have V of a hundredth of the others'. On SmolLM2-135M the L2 error of K and of V is the same,
0.026 to 0.028, with room from 2 to 512, at most a tenth more with
1024, and up to 0.038 with 2048 and 0.067 with 4096."""


def calibrate(mine: ScaledLayer, k: torch.Tensor, v: torch.Tensor) -> None:
    """Measure a layer on these tokens and set its scales, before they are stored.

    No sync with the device. Every rank calls this for the same tokens, since the scales of a layer
    are the same on all ranks.

    Args:
        k, v: after QK-norm and RoPE, [tokens, ...] with the heads of this rank.
    """
    scales = mine.scales
    amax_2 = torch.stack([largest(x) for x in (k, v)])
    if dist.is_initialized() and compat.get_tp_group().world_size > 1:
        dist.all_reduce(amax_2, dist.ReduceOp.MAX, group=compat.get_tp_group().device_group)
    before_2 = scales.scales[mine.layer_index, :, 0]
    scales_12H = scales_of(before_2, amax_2).view(1, -1, 1).expand(1, *scales.shape[1:])
    scales.write(scales_12H, first=mine.layer_index)


def largest(x: torch.Tensor) -> torch.Tensor:
    """Largest finite magnitude, FP32: a NaN in one prompt must not make every later token NaN."""
    return x.abs().nan_to_num_(nan=0.0, posinf=0.0).amax().float()


def scales_of(before_2: torch.Tensor, amax_2: torch.Tensor) -> torch.Tensor:
    """Powers of two for a layer's K and V: the scales in force, moved no further than the room
    above ``amax_2`` takes."""
    kept_2 = power_of_two_above(before_2)
    least_2 = power_of_two_above(amax_2 * (LEAST_ROOM / FP8_MAX))
    most_2 = power_of_two_above(amax_2 * (MOST_ROOM / 2 / FP8_MAX))  # rounded up: at most twice it
    moved_2 = kept_2.clamp(least_2, most_2).clamp(LEAST_KV_SCALE, LARGEST_KV_SCALE)
    return torch.where(amax_2 > 0, moved_2, kept_2)


def watch_forward(original: Any, runner: Any, forward_batch: Any, *args: Any, **kw: Any) -> Any:
    """AROUND ``ModelRunner.forward``: have a prefill of user requests do the pending measurements.

    Graph capture and SGLang's dummy batches run the model without this function, and SGLang's own
    requests are recognized by their ids.
    """
    scales: QuantizedKV | None = getattr(runner.model, "fp8rl_kv", None)
    if scales is None or not scales.is_pending:
        return original(runner, forward_batch, *args, **kw)
    real = not all(map(is_internal, forward_batch.rids or ()))
    scales.measuring = real and forward_batch.forward_mode.is_extend()
    try:
        return original(runner, forward_batch, *args, **kw)
    finally:
        scales.measuring = False
