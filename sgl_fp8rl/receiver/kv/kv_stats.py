"""What an engine reports of its FP8 KV cache: scales, and statistics of stored values."""

from collections.abc import Sequence
from typing import Any

import torch

from sgl_fp8rl.receiver.kv.quantized import QuantizedKV

NOT_QUANTIZED = "the engine's KV cache is not quantized; start it with --kv-cache-dtype fp8_e4m3"


def layout(kv: QuantizedKV | None) -> dict[str, Any] | None:
    """What a trainer needs to compute scales, or to attend as the engine; None if the KV cache is
    not quantized."""
    if kv is None:
        return None
    return {"format": kv.format, "layers": kv.layers, "kv_heads": kv.heads.total}


Counted = tuple[list[Any] | None, torch.Tensor]
"""Of one rank: scales of layers, and its counters on the host."""


def of_rank(kv: QuantizedKV) -> Counted:
    """What this rank has counted since its scales were set. Decode continues meanwhile."""
    in_force, counted = kv.read()
    return None if in_force is None else in_force.tolist(), counted


def clipped_share(kv: QuantizedKV) -> float:
    """The largest share of elements of a layer's K or V on this rank that were clipped under the
    scales of the version that is served; 0 while these wait to be measured."""
    if kv.is_pending:
        return 0.0
    _, counted_LC = kv.read()
    elements_L = (counted_LC[:, 0] * torch.tensor(kv.elements)).clamp(min=1)
    return float((counted_LC[:, 1:3].amax(1) / elements_L).max())


def report(kv: QuantizedKV, ranks: Sequence[Counted]) -> dict[str, Any]:
    """The current scales, and the statistics since they were set, over all ranks.

    Saved as JSON it is a file for the option ``kv_scales``.
    """
    return {
        "format": kv.format,
        "pending": kv.is_pending,
        "scales": ranks[0][0],
        "statistics": statistics(torch.stack([counted for _, counted in ranks])),
    }


def statistics(counted_RLC: torch.Tensor) -> list[dict[str, float]]:
    """Per layer, from the counters of all ranks (``ops.kv.STATS``).

    Every rank sees every token with its own heads; a head on several ranks counts on each.
    """
    tokens_L = counted_RLC[:, :, 0].amax(0)
    clipped_L2 = counted_RLC[:, :, 1:3].sum(0)
    amax_L2 = counted_RLC[:, :, 3:5].amax(0).to(torch.int32).view(torch.float32)
    return [
        {"tokens": t, "clipped_k": ck, "clipped_v": cv, "amax_k": ak, "amax_v": av}
        for t, (ck, cv), (ak, av) in zip(
            tokens_L.tolist(), clipped_L2.tolist(), amax_L2.tolist(), strict=True
        )
    ]
