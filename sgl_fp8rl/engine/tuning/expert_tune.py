"""Measure which Triton tiles are fastest for the two GEMMs of experts.

Both GEMMs read the same sorted rows, so they share ``BLOCK_SIZE_M``: the sum of their times and
that of the sort is compared with that of SGLang's tiles.
"""

import json
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from sgl_fp8rl.engine.gemm.candidates import Config
from sgl_fp8rl.engine.gemm.expert_tiles import ExpertShape, Pair, stock
from sgl_fp8rl.engine.gemm.grouped_experts import ROWS_OF_EXPERT
from sgl_fp8rl.engine.tuning.compile_pool import process_limit, run_shares
from sgl_fp8rl.engine.tuning.expert_bench_inputs import GEMMS, ExpertBenchInputs, bench_input_bytes
from sgl_fp8rl.engine.tuning.tune import (
    NOT_THE_KERNELS,
    Choice,
    Measurement,
    beats,
    choice_of,
    judge,
    tried,
)
from sgl_fp8rl.ops.reference import BLOCK

logger = logging.getLogger(__name__)

TOKENS = (1, 4, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384)
"""M to measure, as far as experts run with tiles."""
TILES: dict[int, tuple[tuple[int, int, int], ...]] = {
    16: ((64, 4, 4), (64, 4, 5), (128, 4, 3), (128, 4, 4), (256, 8, 3)),
    32: ((64, 4, 4), (128, 4, 3), (128, 4, 4), (256, 8, 3)),
    64: ((64, 4, 4), (128, 4, 3), (128, 4, 4), (256, 8, 3)),
    128: ((128, 4, 3), (128, 8, 3), (256, 8, 3)),
}
"""By ``BLOCK_SIZE_M``: ``BLOCK_SIZE_N``, warps and stages worth measuring."""
NEAR = 4
"""``BLOCK_SIZE_M`` within this factor of the rows per expert are measured."""
GROUPS = (1, 16)
ALIGN = "align"
"""Name of the sort kernel in measurements."""


@dataclass(frozen=True)
class Attempt:
    """Tiles of one GEMM, or the sort for a ``BLOCK_SIZE_M``, to measure with M tokens."""

    m: int
    kernel: str
    config: Config


def tokens_of(shape: ExpertShape) -> list[int]:
    """The M to measure: up to where ``grouped_experts`` takes over."""
    least = -(-ROWS_OF_EXPERT * shape.experts // shape.top_k)
    return [*(m for m in TOKENS if m < least), least]


def candidates(shape: ExpertShape, m: int) -> list[Config]:
    """The tiles worth measuring; all load weights through a TMA descriptor."""
    smallest = min(TILES)
    rows = max(round(m * shape.top_k / shape.experts), smallest // NEAR)
    return [
        {
            "BLOCK_SIZE_M": block,
            "BLOCK_SIZE_N": n,
            "BLOCK_SIZE_K": BLOCK,
            "GROUP_SIZE_M": group,
            "num_warps": warps,
            "num_stages": stages,
            "USE_TMA": True,
        }
        for block, others in TILES.items()
        if rows / NEAR <= block <= rows * NEAR
        for n, warps, stages in others
        for group in (GROUPS if 2 * rows >= block else GROUPS[:1])
    ]


def list_attempts(shape: ExpertShape, m: int) -> list[Attempt]:
    """All attempts with M tokens, SGLang's choice first."""
    attempts = []
    for kernel, first in zip(GEMMS, stock(shape, m), strict=True):
        configs = [first, *(config for config in candidates(shape, m) if config != first)]
        attempts += [Attempt(m, kernel, config) for config in configs]
    blocks = {attempt.config["BLOCK_SIZE_M"]: None for attempt in attempts}
    return [*attempts, *(Attempt(m, ALIGN, {"BLOCK_SIZE_M": block}) for block in blocks)]


def measure(inputs: ExpertBenchInputs, attempts: Iterable[Attempt]) -> Iterator[Measurement]:
    """Measure one after the other."""
    for attempt in attempts:
        yield _measure(inputs, attempt.m, attempt.kernel, attempt.config)


def _measure(inputs: ExpertBenchInputs, m: int, kernel: str, config: Config) -> Measurement:
    def error() -> float:
        return 0.0 if kernel == ALIGN else inputs.error(kernel, config, m)

    def time_us() -> float:
        if kernel == ALIGN:
            return inputs.align_us(config["BLOCK_SIZE_M"], m)
        return inputs.time_us(kernel, config, m)

    return judge(m, kernel, config, error, time_us)


def pick(measurements: Iterable[Measurement], m: int, first: tuple[Config, Config]) -> Pair:
    """The fastest tiles that share ``BLOCK_SIZE_M``, or SGLang's, ``first``, if none is faster.

    If SGLang's tiles fail or are inaccurate, any accurate tiles win.

    Args:
        measurements: all with M tokens.
    """
    times = {x.choice: x.us for x in measurements if x.us is not None}
    ups, downs = ([choice for choice in times if choice[0] == kernel] for kernel in GEMMS)
    totals = {
        (up, down): times[up] + times[down] + times[align]
        for up in ups
        for down in downs
        if (align := _align(up)) == _align(down) and align in times
    }
    up, down = (choice_of(*each) for each in zip(GEMMS, first, strict=True))
    stock_us = totals.get((up, down))
    fastest = min(totals, key=totals.__getitem__, default=(up, down))
    if stock_us is None or beats(totals[fastest], stock_us):
        up, down = fastest
    return Pair(m, dict(up[1]), dict(down[1]), totals.get((up, down)), stock_us)


def _align(choice: Choice) -> Choice:
    """The sort that a GEMM with these tiles needs."""
    return choice_of(ALIGN, {"BLOCK_SIZE_M": dict(choice[1])["BLOCK_SIZE_M"]})


def compile_ahead(shape: ExpertShape, attempts: Iterable[Attempt]) -> None:
    """Fill Triton's cache from several processes; one alone takes longer than all measuring.

    A failure costs only time: the missing kernels are compiled when they are measured.
    """
    rows: dict[Choice, list[int]] = defaultdict(list)
    for attempt in attempts:
        if attempt.kernel != ALIGN:
            rows[choice_of(attempt.kernel, attempt.config)].append(attempt.m)
    tasks = [(kernel, dict(config), ms) for (kernel, config), ms in rows.items()]
    processes = process_limit(len(tasks), bench_input_bytes(shape), 0)
    if processes < 2:
        return
    shares = [[shape, tasks[index::processes]] for index in range(processes)]
    failure = run_shares(__name__, shares)
    if failure is not None:
        logger.warning("Tiles are compiled one by one, not in parallel: %s", failure)


def compile_share(shape: ExpertShape, tasks: Iterable[tuple[str, Config, list[int]]]) -> None:
    """Run each kernel at each M in one process; Triton recompiles if M is divisible by 16."""

    def once(run: Callable[[int], object], _sets: int) -> float:
        run(0)
        return 0.0

    inputs = ExpertBenchInputs(shape, "cuda", once)
    for kernel, config, ms in tasks:
        for m in ms:
            with suppress(*NOT_THE_KERNELS):  # measuring meets it again, alone on the GPU
                tried(partial(inputs.time_us, kernel, config, m))


if __name__ == "__main__":
    given_shape, given_tasks = json.loads(sys.argv[1])
    compile_share(ExpertShape(*given_shape), given_tasks)
