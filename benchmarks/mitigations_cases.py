"""The cases of the benchmark of logprob mitigations: one engine each, and its load."""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.kv_cases import ENGINE, FLASHINFER, OURS
from benchmarks.models import MODELS, Shape
from benchmarks.serving import Load

TINY = "tiny"
SHAPES = MODELS | {
    TINY: Shape(hidden=256, intermediate=512, layers=4, heads=4, kv_heads=2, vocab=4096)
}
"""The tiny one is for a machine without a GPU."""

# Beside the trainer, whose weights are there as well.
ON_GPU: dict[str, Any] = {
    "mem_fraction_static": 0.6,
    "cuda_graph_max_bs_decode": 32,
    "max_total_tokens": 65536,
    "max_running_requests": 64,
    **FLASHINFER,
}
ON_CPU: dict[str, Any] = {
    "mem_fraction_static": 0.5,
    "chunked_prefill_size": 2048,
    "max_total_tokens": 4096,
    "max_running_requests": 16,
}

NONE, ALL, ENDS, LIST = "none", "all", "ends", "list"
"""Which layers a case leaves in BF16: the last, those that ``precision`` lists for half the KL."""
FP32_HEAD = {"enable_fp32_lm_head": True}
KV8 = {"kv_cache_dtype": "fp8_e4m3", "attention_backend": None}  # the plugin chooses
DETERMINISTIC = {"enable_deterministic_inference": True}


@dataclass(frozen=True)
class Case:
    """One process. ``name`` is what ``--cases`` takes, and the arm of its rows."""

    name: str
    bf16: str = NONE
    engine: dict[str, Any] = field(default_factory=dict)
    """Keywords of ``sglang.Engine`` besides those of all."""

    def keywords(self, device: str) -> dict[str, Any]:
        """All keywords of ``sglang.Engine`` but the layers that stay BF16."""
        machine = ON_GPU if device == "cuda" else ON_CPU
        every = ENGINE | OURS | machine | self.engine
        return {name: value for name, value in every.items() if value is not None}


CASES = (
    Case("bf16", ALL),
    Case("bf16-fp32-head", ALL, FP32_HEAD),
    Case("fp8", NONE),
    Case("fp8-fp32-head", NONE, FP32_HEAD),
    Case("fp8-ends-bf16", ENDS),
    Case("fp8-ignore-list", LIST),
    Case("fp8-kv8", NONE, KV8),
    Case("fp8-deterministic", NONE, DETERMINISTIC),
)
"""All run our plugin; "bf16" is told to leave every layer alone, and runs SGLang's BF16 kernels."""
NAMES = tuple(case.name for case in CASES)
FLOOR = "bf16"
"""What no mitigation on FP8 can be better than."""


@dataclass(frozen=True)
class Work:
    """What each engine does."""

    sequences: int
    trained_sequences: int
    """Of a checkpoint, whose responses may end early."""
    prompt: int
    new: int
    rollouts: int
    """Of which each gives a value of every metric."""
    decode: Load
    """Whose decode step is timed."""
    precision_tokens: int
    """That ``precision`` makes its list from."""


WORK = {
    "cuda": Work(32, 256, 128, 256, 4, Load(32, 512, 128), 2048),
    "cpu": Work(16, 64, 16, 24, 4, Load(4, 32, 16), 1024),
}


def random_name(model: str, layers: int | None) -> str:
    """What rows call a model with random weights."""
    cut = "" if layers is None else f", {layers} layers"
    return f"{model}{cut}, random weights"


def find(name: str) -> Case:
    """The case of that name."""
    return next(case for case in CASES if case.name == name)


def ignored_layers(bf16: str, layers: int, listed: list[str]) -> tuple[str, ...]:
    """The patterns for a case's engine.

    Args:
        layers: decoder layers of the model.
        listed: what ``precision`` found.
    """
    ends = (r"re:layers\.0\.", rf"re:layers\.{layers - 1}\.")
    return {NONE: (), ALL: ("re:.",), ENDS: ends, LIST: tuple(listed)}[bf16]
