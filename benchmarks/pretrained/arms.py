"""Engines that serve the same checkpoint in different formats; a further format is one more arm."""

from dataclasses import dataclass
from typing import Any

OURS: dict[str, Any] = {"quantization": "fp8rl"}
KV8: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}  # the plugin chooses the attention backend


@dataclass(frozen=True)
class Arm:
    """One engine."""

    name: str
    what: str
    engine: dict[str, Any]
    """Keywords of ``sglang.Engine``."""
    off: float = 0.0
    """Scales of blocks are wrong by this factor, up or down: an arm that must be worse."""


BF16 = "bf16"
ARMS = {
    arm.name: arm
    for arm in (
        Arm(BF16, "BF16, SGLang without our quantization", {}),
        Arm("fp8", "block FP8, padded", OURS),
        Arm("fp8-kv8", "block FP8, padded; FP8 KV", OURS | KV8),
        Arm("channel-fp8", "channel FP8", OURS | {"fp8rl_format": "channel-fp8"}),
        Arm("int8", "INT8", OURS | {"fp8rl_format": "int8"}),
        Arm("fp8-scales-off", "block FP8 whose scales are 10% off: must be worse", OURS, 0.1),
    )
}
"""The first is what the others are compared with."""
