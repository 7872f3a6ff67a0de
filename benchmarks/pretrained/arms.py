"""Engines that serve the same checkpoint in different formats; a further format is one more arm."""

import json
from typing import Any

from benchmarks.environment import ROOT

OURS: dict[str, Any] = {"quantization": "fp8rl"}
INT8_KV: dict[str, Any] = {"fp8rl_kv_cache": "int8"}
HEAD: dict[str, Any] = {"enable_fp32_lm_head": True}
"""Logits in FP32: in BF16 those of this model are 0.125 apart, more than some answers' lead."""
PRECISION = ROOT / "benchmarks/results/pretrained_precision.json"
"""What ``sgl-fp8rl precision`` wrote; docs/pretrained.md has the command."""
KEPT = {"fp8rl_ignored_layers": tuple(json.loads(PRECISION.read_text())["ignored_layers"])}


ARMS = {
    "bf16-head": HEAD,  # SGLang without our quantization
    "fp8-int8kv": OURS | INT8_KV | HEAD,
    "mixed-int8kv": OURS | INT8_KV | HEAD | KEPT,
}
"""Keywords of ``sglang.Engine``; block FP8 is padded."""
