"""Measure which accurate GEMM kernel is fastest for a shape.

Codes and scales are ready, as a fused producer leaves them: if a layer quantizes its own input,
that launch is the same for every candidate and does not change their order.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from sgl_fp8rl.engine.gemm.candidates import CANDIDATES, STOCK, Candidate, Config
from sgl_fp8rl.engine.gemm.table import Entry, Shape, stock_entry
from sgl_fp8rl.engine.tuning.bench_inputs import BenchInputs
from sgl_fp8rl.engine.tuning.warmup import ROW_STEP

ERROR_BOUND = 2.5e-5
"""Largest ``bench_inputs.difference``. Healthy, with outliers too: 2e-6 of an FP32 GEMM rounded to
BF16, at most 2.7e-6 of every kernel on an H200 (tests/gpu/test_gemms.py)."""
MARGIN = 0.02
"""How much faster than the stock choice a kernel must be; medians repeat within 1%."""
DECODE_ROWS = (1, 2, 4, 8, 16, 24, 31, 48, 64, 96, 128, 160, 192, 256)
PREFILL_ROWS = (*range(320, 1025, ROW_STEP), *range(1152, 2049, 2 * ROW_STEP), 4096, 8192, 16384)
"""Upper bounds of M, one table entry each. Up to 2048 DeepGEMM takes up to five times as long at
single M as beside them: a wide range would have such an M and others at once."""
NEVER = float("inf")

Choice = tuple[str, tuple[tuple[str, int], ...]]
"""A kernel and its config, hashable."""


@dataclass(frozen=True)
class Measurement:
    """One kernel at one M: its time in microseconds, or why it has none."""

    m: int
    kernel: str
    config: Config
    us: float | None
    error: float | None
    fault: str | None = None

    @property
    def choice(self) -> Choice:
        """What was measured."""
        return choice_of(self.kernel, self.config)


def choice_of(kernel: str, config: Config) -> Choice:
    """A kernel with a config, as a key."""
    return kernel, tuple(sorted(config.items()))


def rows_of(buckets: Sequence[int]) -> list[int]:
    """All M to measure for ``buckets``."""
    return [m for rows in sampled_rows(buckets) for m in rows]


def sampled_rows(buckets: Sequence[int]) -> list[tuple[int, ...]]:
    """The M to measure for each bucket: its upper end, and its lower end if it is wide.

    A wide bucket spans several DeepGEMM tiles, and the choice must not lose on any of them.
    """
    lowers = (0, *buckets)
    return [
        (high,) if high - low <= ROW_STEP else (low + ROW_STEP, high)
        for low, high in zip(lowers, buckets, strict=False)
    ]


@dataclass(frozen=True)
class Attempt:
    """A kernel to measure at one M."""

    m: int
    candidate: Candidate
    config: Config


def list_attempts(
    shape: Shape,
    rows: Sequence[int],
    candidates: Mapping[str, Candidate] = CANDIDATES,
) -> list[Attempt]:
    """All kernels that can run ``shape`` at each M, with all of their configs."""
    n, k = shape
    return [
        Attempt(m, candidate, config)
        for m in rows
        for candidate in candidates.values()
        if candidate.why_not(n, k, m) is None
        for config in candidate.configs(n, k, m)
    ]


def measure(
    inputs: BenchInputs,
    attempts: Sequence[Attempt],
    until: float = NEVER,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Measurement]:
    """Measure one by one; none begins after ``until`` on ``clock``."""
    for attempt in attempts:
        if clock() >= until:
            return
        yield _measure(inputs, attempt.m, attempt.candidate, attempt.config)


def _measure(inputs: BenchInputs, m: int, candidate: Candidate, config: Config) -> Measurement:
    def error() -> float:
        return inputs.error(candidate.bind(config), m)

    def time_us() -> float:
        return inputs.time_us(candidate.bind(config), m)

    return judge(m, candidate.name, config, error, time_us)


def judge(
    m: int,
    kernel: str,
    config: Config,
    error_of: Callable[[], float],
    time_us: Callable[[], float],
) -> Measurement:
    """Measure a kernel's error and, if it is within ``ERROR_BOUND``, its time."""

    def result(us: float | None, error: float | None, fault: str | None = None) -> Measurement:
        return Measurement(m, kernel, dict(config), us, error, fault)

    error, fault = tried(error_of)
    if error is None:
        return result(None, None, fault)
    if not error <= ERROR_BOUND:
        return result(None, error, f"its error is above {ERROR_BOUND:.0e}")
    us, fault = tried(time_us)
    return result(us, error, fault)


NOT_THE_KERNELS = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors of the GPU, which are not a reason to skip a kernel: nothing was measured."""


def tried(run: Callable[[], float]) -> tuple[float | None, str | None]:
    """What running a kernel gives and None, or None and why it does not run here.

    Raises:
        torch.OutOfMemoryError, torch.AcceleratorError: as ``NOT_THE_KERNELS`` says.
    """
    try:
        return run(), None
    except NOT_THE_KERNELS:
        raise
    except Exception as fault:  # noqa: BLE001  (whatever a compiler raises, others may still run)
        return None, f"{type(fault).__name__}: {fault}"[:500]


def pick(measurements: Sequence[Measurement], buckets: Sequence[int]) -> list[Entry]:
    """The entries of one shape: the fastest kernel of each bucket, else the stock choice.

    Kernels within ``MARGIN`` of the fastest tie: the stock choice wins, else the kernel that most
    buckets can share.
    """
    times = {(x.choice, x.m): x.us for x in measurements if x.us is not None}
    stock: Choice = (STOCK, ())
    entries: dict[int, Entry] = {}
    as_good: dict[int, set[Choice]] = {}
    for high, rows in zip(buckets, sampled_rows(buckets), strict=True):
        totals = {
            choice: sum(times[choice, m] for m in rows)
            for choice in {choice for choice, _ in times}
            if all(beats(times.get((choice, m)), times.get((stock, m))) for m in rows)
        }
        limit = min(totals.values(), default=0.0) * (1 + MARGIN)
        if totals:
            as_good[high] = {choice for choice, total in totals.items() if total <= limit}
        else:
            entries[high] = stock_entry(high, times.get((stock, high), 0.0))
    while as_good:
        shared = Counter(choice for choices in as_good.values() for choice in choices)
        # sorted: the order of a set must not decide a tie
        chosen = max(sorted(shared), key=lambda choice: shared[choice])
        for high in [high for high, choices in as_good.items() if chosen in choices]:
            del as_good[high]
            us, stock_us = times[chosen, high], times[stock, high]
            entries[high] = Entry(high, chosen[0], dict(chosen[1]), us, stock_us)
    return [entries[high] for high in buckets]


def beats(us: float | None, stock_us: float | None) -> bool:
    """Whether a kernel is faster than the stock choice by more than noise; None has no time."""
    return us is not None and stock_us is not None and us < stock_us * (1 - MARGIN)
