"""The cases of the KV cache benchmark: what runs in a process of its own, and with which engine."""

import json
from dataclasses import dataclass, field
from typing import Any

from benchmarks.start import BLOCK_FP8

MODEL = "qwen3-8b"
CUT_LAYERS = 6
CUT_VOCAB = 32768
CUT_MODEL = f"{MODEL}, {CUT_LAYERS} layers"

ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "grammar_backend": "none",
    "log_level": "warning",
    "cuda_graph_backend_prefill": "disabled",
    "chunked_prefill_size": 16384,
    "random_seed": 0,
}
FULL = {"mem_fraction_static": 0.88, "cuda_graph_max_bs_decode": 128}
"""Where capacity and speed are measured."""
SMALL = {"mem_fraction_static": 0.5, "cuda_graph_max_bs_decode": 16, "max_total_tokens": 65536}
"""Beside a trainer with weights of its own."""

FLASHINFER = {"attention_backend": "flashinfer"}
STOCK_XQA = {
    **FLASHINFER,
    "kv_cache_dtype": "fp8_e4m3",
    "decode_attention_backend": "trtllm_mha",
    "page_size": 64,
}
BLOCK = {"quantization": "fp8", "json_model_override_args": json.dumps(BLOCK_FP8)}
OURS = {"quantization": "fp8rl", "fp8rl_bucket_bytes": 256 << 20}
# no backend is named: the plugin chooses what serves an FP8 KV cache
OURS_KV8 = {**OURS, "kv_cache_dtype": "fp8_e4m3"}
PER_HEAD = {"fp8rl_kv_per_head": True}


@dataclass(frozen=True)
class Case:
    """One process. ``name`` is what ``--cases`` takes."""

    name: str
    part: str
    """"attention", "engine", "logprobs" or "update"."""
    arm: str
    engine: dict[str, Any] = field(default_factory=dict)
    """Keywords of ``sglang.Engine`` besides ``ENGINE``."""
    trainer_scales: bool = False
    """Whether the trainer measures KV scales and sends them with each update."""
    by_default: bool = True
    """Whether it runs where no cases are named."""

    @property
    def stock(self) -> bool:
        """Whether SGLang runs as it is, without plugins."""
        return self.part == "engine" and self.arm.startswith("stock")

    @property
    def keywords(self) -> dict[str, Any]:
        """All keywords of ``sglang.Engine``."""
        return ENGINE | (FULL if self.part == "engine" else SMALL) | self.engine


def _engine(arm: str, engine: dict[str, Any], by_default: bool = True) -> Case:
    name = f"engine-{arm}".replace(", ", "-").replace(" ", "-")
    return Case(name, "engine", arm, engine, by_default=by_default)


def _scheme(name: str, engine: dict[str, Any], trainer_scales: bool = False) -> Case:
    arm = f"fp8rl-kv8, {name.replace('-', ' ')} scales"
    return Case(f"logprobs-{name}", "logprobs", arm, engine, trainer_scales)


REFERENCE = Case("logprobs-bf16", "logprobs", "fp8rl, BF16 KV", {**OURS, **FLASHINFER})
"""What the others' logprobs are held against; it is run after them, for it scores their samples."""

CASES = (
    Case("attention", "attention", "attention kernels"),
    Case("attention-bf16-mma", "attention", "xqa-bf16-mma"),
    _engine("stock-bf16", FLASHINFER),
    _engine("stock-bf16-kv8-xqa", STOCK_XQA, by_default=False),
    _engine("stock-block-fp8-kv8-xqa", {**BLOCK, **STOCK_XQA}),
    _engine("fp8rl", {**OURS, **FLASHINFER}),
    _engine("fp8rl-kv8", OURS_KV8),
    _engine("fp8rl-kv8, per head", {**OURS_KV8, **PER_HEAD}, by_default=False),
    _scheme("unit", {**OURS_KV8, "fp8rl_kv_scheme": "unit"}),
    _scheme("engine", {**OURS_KV8, "fp8rl_kv_scheme": "engine"}),
    _scheme("trainer", {**OURS_KV8, "fp8rl_kv_scheme": "trainer"}, trainer_scales=True),
    _scheme("per-head", {**OURS_KV8, "fp8rl_kv_scheme": "engine", **PER_HEAD}),
    REFERENCE,
    Case("update", "update", "fp8rl-kv8", OURS_KV8),
)
NAMES = tuple(case.name for case in CASES)
DEFAULT = tuple(case.name for case in CASES if case.by_default)


def find(name: str) -> Case:
    """The case of that name."""
    return next(case for case in CASES if case.name == name)
