"""Arms, loads and the long-tailed rollout of the rollout benchmark."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.kv_cases import BLOCK, ENGINE, FLASHINFER, FULL, OURS, OURS_KV8, STOCK_XQA
from benchmarks.serving import Load, is_stock


@dataclass(frozen=True)
class Arm:
    """One way to serve. ``name`` is what ``--arms`` takes."""

    name: str
    engine: dict[str, Any]
    """Keywords of ``sglang.Engine`` besides those of all arms."""
    by_default: bool = True

    @property
    def stock(self) -> bool:
        """Whether SGLang runs as it is, without plugins."""
        return is_stock(self.engine)

    def keywords(self, batches: Sequence[int] | None = None, largest: int = 0) -> dict[str, Any]:
        """All keywords of ``sglang.Engine``.

        Args:
            batches: sizes of the CUDA graphs, or None for SGLang's own choice up to ``largest``.
        """
        graphs: dict[str, Any] = {"cuda_graph_max_bs_decode": max(batches or (largest,))}
        if batches is not None:
            graphs["cuda_graph_bs_decode"] = sorted(set(batches))
        return ENGINE | FULL | graphs | self.engine


ARMS = (
    Arm("stock-bf16", FLASHINFER),
    # SGLang's own default on Hopper; its library is not installed everywhere
    Arm("stock-bf16-fa3", {"attention_backend": "fa3"}, by_default=False),
    Arm("stock-bf16-kv8-xqa", STOCK_XQA),
    Arm("stock-block-fp8", {**BLOCK, **FLASHINFER}),
    Arm(
        "stock-block-fp8-flashinfer",
        {**BLOCK, **FLASHINFER, "fp8_gemm_runner_backend": "flashinfer_deepgemm"},
    ),
    Arm("stock-block-fp8-kv8-xqa", {**BLOCK, **STOCK_XQA}),
    Arm("fp8rl", {**OURS, **FLASHINFER}),
    Arm("fp8rl-kv8", OURS_KV8),
)
REFERENCE = ARMS[0]
"""What ratios are to."""
NAMES = tuple(arm.name for arm in ARMS)
DEFAULT = tuple(arm.name for arm in ARMS if arm.by_default)

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
}
ROLLOUT = "rollout"
"""The case of a rollout with a long tail."""

REQUESTS = 512
PROMPT = 1024
MEDIAN, SIGMA, CAP = 4000, 0.8, 20000
"""Of the output lengths, which are lognormal."""
DEMAND = 1.5
"""KV that all requests of a rollout would hold at once, over what the BF16 engine may hold."""
SEED = 0


def find(name: str) -> Arm:
    """The arm of that name."""
    return next(arm for arm in ARMS if arm.name == name)


def output_lengths(requests: int) -> list[int]:
    """Tokens to generate for each prompt, the same in every process."""
    rng = random.Random(SEED)
    drawn = (round(rng.lognormvariate(math.log(MEDIAN), SIGMA)) for _ in range(requests))
    return [min(CAP, max(1, length)) for length in drawn]


def peak_tokens(lengths: Sequence[int]) -> int:
    """Most KV tokens held at a time if all requests started together and none had to wait."""
    longest_first = sorted(lengths, reverse=True)
    return max(count * (PROMPT + length) for count, length in enumerate(longest_first, start=1))


def pool_share(lengths: Sequence[int], capacity: float) -> float:
    """Part of its KV cache that each engine may use, so that the demand is ``DEMAND``.

    Args:
        capacity: tokens that the BF16 engine could hold; if that is too little, the part is 1 and
            the demand is more.
    """
    return min(1.0, peak_tokens(lengths) / DEMAND / capacity)
