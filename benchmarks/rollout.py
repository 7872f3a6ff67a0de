"""Prefill and decode of a whole model on one GPU, ours beside stock SGLang's.

A job is an engine; each case is a load, timed apart for prefill and decode. All engines of a model
have CUDA graphs for all of its loads, whichever are run, because graphs take memory from the KV
cache.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

from benchmarks.benchmark import LAYERS, Benchmark, Job, Measurement, Run
from benchmarks.engines import models, serving
from benchmarks.engines.keywords import (
    BLOCK_FP8,
    ENGINE,
    FULL,
    KV8,
    NCCL_ALONE,
    NO_MULTICAST,
    OURS,
    OURS_INT8,
    OURS_KV8,
    STOCK_TRTLLM,
    STOCK_XQA,
    is_stock,
)
from benchmarks.engines.serving import Load


@dataclass(frozen=True)
class Arm:
    """One way to serve."""

    name: str
    engine: dict[str, Any]
    """Keywords of ``sglang.Engine`` besides those of all arms."""
    by_default: bool = True
    """Whether it runs where no jobs are named."""
    model: str = "qwen3-8b"
    tp: int = 1
    """Ranks of tensor parallelism."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that SGLang reads."""
    since: tuple[int, ...] = ()
    """The oldest SGLang that is known to serve it on Hopper, if not all."""

    def assert_served(self) -> None:
        """Check that the installed SGLang serves it."""
        installed = version("sglang")
        if self.since and tuple(map(int, installed.split(".")[:3])) < self.since:
            needed = ".".join(map(str, self.since))
            raise RuntimeError(
                f"{self.name} is of SGLang {needed}, and {installed} is installed; leave it out"
            )

    def keywords(self, batches: Sequence[int] | None = None, largest: int = 0) -> dict[str, Any]:
        """All keywords of ``sglang.Engine``.

        Args:
            batches: sizes of the CUDA graphs, or None for SGLang's own choice up to ``largest``.
        """
        graphs: dict[str, Any] = {"cuda_graph_max_bs_decode": max(batches or (largest,))}
        if batches is not None:
            graphs["cuda_graph_bs_decode"] = sorted(set(batches))
        ranks = {**NCCL_ALONE, "tp_size": self.tp} if self.tp > 1 else {}
        return ENGINE | FULL | ranks | graphs | self.engine


STOCK_FP8_XQA = {**BLOCK_FP8, **STOCK_XQA}
# where no attention backend is named, stock SGLang takes FA3, its own default on Hopper
ARMS = (
    Arm("stock-bf16", {}),
    Arm("stock-bf16-kv8-xqa", STOCK_XQA),
    Arm("stock-block-fp8", BLOCK_FP8),
    Arm("stock-block-fp8-kv8", {**BLOCK_FP8, **KV8}),
    Arm("stock-block-fp8-kv8-xqa", STOCK_FP8_XQA),
    Arm("fp8rl", OURS),
    Arm("fp8rl-kv8", OURS_KV8),
    Arm("fp8rl-kv8-int8", OURS_INT8),
    # what one piece gives, everything else being equal
    Arm(
        "stock-block-fp8-kv8-xqa-flashinfer",
        {**STOCK_FP8_XQA, "fp8_gemm_runner_backend": "flashinfer_deepgemm"},
        by_default=False,
    ),
    Arm(
        "stock-block-fp8-kv8-trtllm",
        {**BLOCK_FP8, **STOCK_TRTLLM},
        by_default=False,
        since=(0, 5, 23),
    ),
    # torch.compile of the decode step of every batch of the loads
    Arm(
        "stock-block-fp8-kv8-xqa-compile",
        {**STOCK_FP8_XQA, "enable_torch_compile": True, "torch_compile_max_bs": 256},
        by_default=False,
    ),
    Arm("fp8rl-deterministic", {**OURS, "enable_deterministic_inference": True}, by_default=False),
)
# the kernels that stock SGLang has for experts in block FP8; where none is named it takes Triton's
EXPERTS = (
    Arm("stock-block-fp8-kv8-xqa-deepgemm", {**STOCK_FP8_XQA, "moe_runner_backend": "deep_gemm"}),
    Arm("stock-block-fp8-kv8-xqa-cutlass", {**STOCK_FP8_XQA, "moe_runner_backend": "cutlass"}),
    # one kernel for QK-norm and RoPE, which SGLang has for this model alone
    Arm(
        "stock-block-fp8-kv8-xqa-rope",
        {**STOCK_FP8_XQA, "enable_fused_qk_norm_rope": True},
        by_default=False,
    ),
    # one kernel for both GEMMs; of times only: SGLang interleaves the rows of its weights when it
    # loads them, but not those of an update
    Arm(
        "stock-block-fp8-kv8-xqa-megamoe",
        {**STOCK_FP8_XQA, "moe_a2a_backend": "megamoe"},
        by_default=False,
        environ={"SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK": "16384"},  # of a chunk
        since=(0, 5, 23),
    ),
)
REFERENCE = ARMS[0]
"""What ratios are to."""
COMMON = {name: value for name, value in (ENGINE | FULL).items() if "graph_max_bs" not in name}
FLAGS = {
    "engine": COMMON,
    "arms": {arm.name: {**arm.engine, **arm.environ} for arm in (*ARMS, *EXPERTS)},
}
"""SGLang's keywords and variables, in the result file beside what they gave: those of all arms, and
of each. CUDA graphs are those of the loads."""

TP = 2
"""Of a model that does not fit on one GPU beside BF16 KV."""
NEW = 128
"""Tokens of a timed decode."""
LOADS = {
    "qwen3-8b": (
        Load(32, 512, NEW),
        Load(128, 512, NEW),
        Load(256, 512, NEW),
        Load(64, 8192, NEW),
        Load(16, 30000, NEW),
    ),
    "qwen3-30b-a3b": (Load(64, 4096, NEW),),
    "qwen3-32b": (Load(128, 512, NEW), Load(64, 4096, NEW)),
}


def find(name: str) -> Arm:
    """The arm of that name."""
    return next(arm for arm in ARMS if arm.name == name)


def measure(arm: Arm, run: Run) -> list[Measurement]:
    """KV capacity, and prefill and decode of each load."""
    arm.assert_served()
    shape = models.written(models.SHAPES[arm.model], run.folder, run.options["layers"])
    loads = LOADS[arm.model]
    keywords = arm.keywords(batches=[load.batch for load in loads])
    wanted = wanted_loads(arm.model, run)
    values = serving.speed(keywords, shape, str(run.folder), wanted)
    return serving.measurements(arm.name, arm.model, values)


def wanted_loads(model: str, run: Run) -> list[Load]:
    """The loads of a model that ``--cases`` names."""
    wanted = [load for load in LOADS[model] if run.wants(load.name)]
    if not wanted:
        names = ", ".join(load.name for load in LOADS[model])
        raise ValueError(f"--cases names no load of {model}; it has {names}")
    return wanted


STRONGEST = ("stock-bf16", "stock-block-fp8-kv8", "stock-block-fp8-kv8-xqa", "fp8rl-kv8")
"""Stock BF16, the strongest arms of stock FP8, and ours: what whole rollouts run by default."""


def jobs(model: str, by_default: Collection[str] | None = None) -> tuple[Job, ...]:
    """A job of each arm that serves a model.

    Args:
        by_default: the arms that run where none is named, if not those that say so themselves.
    """
    arms = (*ARMS, *EXPERTS) if models.SHAPES[model].experts else ARMS
    tp = 1 if model in models.MODELS else TP
    return tuple(
        Job(
            f"{model}/{arm.name}",
            replace(arm, model=model, tp=tp),
            stock=is_stock(arm.engine),
            by_default=arm.by_default if by_default is None else arm.name in by_default,
            environ={**(NO_MULTICAST if tp > 1 else {}), **arm.environ},
        )
        for arm in arms
    )


def _benchmark(model: str) -> Benchmark:
    return Benchmark(
        jobs=jobs(model), measure=measure, limit_s=1800.0, options=(LAYERS,), facts=FLAGS
    )


DENSE = _benchmark("qwen3-8b")
MOE = _benchmark("qwen3-30b-a3b")
ON_TWO_GPUS = _benchmark("qwen3-32b")
