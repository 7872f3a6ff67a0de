"""Engines that serve the same checkpoint in different formats; a further format is one more arm."""

import json
from dataclasses import dataclass
from typing import Any

from benchmarks.environment import ROOT

OURS: dict[str, Any] = {"quantization": "fp8rl"}
KV8: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}  # the plugin chooses the attention backend
INT8_KV: dict[str, Any] = {"fp8rl_kv_cache": "int8"}
HEAD: dict[str, Any] = {"enable_fp32_lm_head": True}
"""Logits in FP32: in BF16 those of this model are 0.125 apart, more than some answers' lead."""
PRECISION = ROOT / "benchmarks/results/pretrained_precision.json"
"""What ``sgl-fp8rl precision`` wrote; docs/pretrained.md has the command."""
KEPT = {"fp8rl_ignored_layers": tuple(json.loads(PRECISION.read_text())["ignored_layers"])}


@dataclass(frozen=True)
class Arm:
    """One engine."""

    name: str
    what: str
    engine: dict[str, Any]
    """Keywords of ``sglang.Engine``."""


BF16 = "bf16"
ARMS = {
    arm.name: arm
    for arm in (
        Arm(BF16, "BF16, SGLang without our quantization", {}),
        Arm("fp8-kv8", "block FP8, padded; FP8 KV", OURS | KV8),
        Arm("bf16-head", "BF16, FP32 head", HEAD),
        Arm("fp8-int8kv", "block FP8, padded; INT8 KV, FP32 head", OURS | INT8_KV | HEAD),
        Arm(
            "mixed-int8kv", "the same, layers of `precision` in BF16", OURS | INT8_KV | HEAD | KEPT
        ),
    )
}
