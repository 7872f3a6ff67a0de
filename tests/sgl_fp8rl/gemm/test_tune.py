"""Only accurate kernels enter the table, and of those the fastest, by more than noise."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.errors import OutOfResources

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.gemm import candidates
from sgl_fp8rl.engine.gemm.candidates import STOCK
from sgl_fp8rl.engine.gemm.table import Entry
from sgl_fp8rl.engine.startup.deep_gemm import compiling_only_what_runs
from sgl_fp8rl.engine.tuning import tune
from sgl_fp8rl.engine.tuning.bench_inputs import CHECKED_ROWS, difference
from sgl_fp8rl.engine.tuning.tune import DECODE_ROWS, ERROR_BOUND, MARGIN, PREFILL_ROWS, Measurement
from tests.sgl_fp8rl.gemm import fakes
from tests.sgl_fp8rl.gemm.fakes import Bench, stock_and

SHAPE = (512, 256)
HEALTHY = 1e-5
"""Of an FP32 product rounded to BF16: 2e-6 here."""


@pytest.fixture(autouse=True)
def _fake_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of fakes are names of kernels."""
    for name in ("fast", "faster", "slow", "other", "wrong"):
        fake = candidates.Candidate(name, lambda *_: None, lambda _: fakes.exact)
        monkeypatch.setitem(candidates.CANDIDATES, name, fake)


def tuned(bench: Bench, buckets: tuple[int, ...] = (64,)) -> tuple[list[Entry], list[Measurement]]:
    attempts = tune.list_attempts(SHAPE, tune.rows_of(buckets), bench.candidates)
    measurements = list(tune.measure(bench.inputs(*SHAPE), attempts))
    return tune.pick(measurements, buckets), measurements


def kernels(bench: Bench, buckets: tuple[int, ...] = (64,)) -> list[str]:
    return [entry.kernel for entry in tuned(bench, buckets)[0]]


def test_the_fastest_is_taken() -> None:
    entries, measurements = tuned(Bench(stock_and(slow=120.0, fast=50.0, faster=40.0)))
    assert entries == [Entry(64, "faster", {}, 40.0, 100.0)]
    assert {x.kernel for x in measurements} == {STOCK, "slow", "fast", "faster"}
    assert all(x.error is not None and x.error < HEALTHY for x in measurements)


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        (fakes.clipping, "its error"),
        (fakes.one_scale_wrong, "its error"),
        (fakes.not_a_number, "its error"),
        (fakes.raising, "RuntimeError: no kernel image"),
    ],
)
@pytest.mark.parametrize("m", [1, 7, 64])
def test_what_computes_wrongly_is_never_taken(kernel: Any, fault: str, m: int) -> None:
    """Though it is the fastest; the same with a right product is taken."""
    us = stock_and(wrong=1.0, fast=50.0)
    entries, measurements = tuned(Bench(us, wrong=kernel), (m,))
    assert entries[0].kernel == "fast"
    (wrong,) = (x for x in measurements if x.kernel == "wrong")
    assert wrong.us is None
    assert wrong.fault is not None
    assert wrong.fault.startswith(fault)
    assert kernels(Bench(us), (m,)) == ["wrong"]


def test_clipping_shows_on_outliers_only() -> None:
    """So normal activations alone would let it pass."""
    inputs = Bench(stock_and()).inputs(*SHAPE)
    normal, outliers = inputs.activations(32)
    for activation, wrong in ((normal, False), (outliers, True)):
        right = fakes.exact(*activation, *inputs.weights[0])
        found = difference(fakes.clipping(*activation, *inputs.weights[0]), right)
        assert (found > ERROR_BOUND) is wrong


def test_one_wrong_tile_of_many_shows() -> None:
    """Though the cosine of the whole hardly moves, and a scale does not turn a vector at all."""
    generator = torch.Generator().manual_seed(0)
    right = torch.randn(64, 64 * 128, generator=generator)
    wrong = right.clone()
    wrong[5, :128] *= 1.1
    cosine = torch.nn.functional.cosine_similarity(right.flatten(), wrong.flatten(), dim=0)
    assert 1 - float(cosine) < ERROR_BOUND / 10
    assert difference(wrong, right) > ERROR_BOUND
    assert difference(right, right) == 0


def test_zeros_are_no_difference() -> None:
    zeros = torch.zeros(2, 256)
    assert difference(zeros, zeros) == 0
    assert difference(zeros, torch.ones(2, 256)) == 1


def test_rows_of_a_large_batch_are_sampled_end_to_end() -> None:
    rows, references = Bench(stock_and()).inputs(*SHAPE)._reference(1000)
    assert len(rows) == CHECKED_ROWS
    assert (int(rows[0]), int(rows[-1])) == (0, 999)
    assert [reference.shape for reference in references] == [(CHECKED_ROWS, 512)] * 2
    assert references[0].dtype == torch.float64


@pytest.mark.parametrize(
    ("us", "kernel"), [(100.0, STOCK), (99.0, STOCK), (98.5, STOCK), (97.0, "fast"), (50.0, "fast")]
)
def test_stock_stays_unless_beaten_by_more_than_noise(us: float, kernel: str) -> None:
    assert kernels(Bench(stock_and(fast=us))) == [kernel]


def test_nothing_replaces_a_stock_choice_that_was_not_measured() -> None:
    assert kernels(Bench(stock_and(fast=50.0), deep_gemm=fakes.raising)) == [STOCK]


def test_ties_go_to_the_kernel_that_is_good_elsewhere() -> None:
    """At 16 rows "other" is 1% faster; "fast" is clearly faster at 64, so it takes both."""
    us = stock_and(other=lambda m: 49.5 if m == 16 else 80.0, fast=50.0)
    assert kernels(Bench(us), (16, 64)) == ["fast", "fast"]
    us = stock_and(other=lambda m: 45.0 if m == 16 else 80.0, fast=50.0)
    assert kernels(Bench(us), (16, 64)) == ["other", "fast"]


def test_a_wide_bucket_is_measured_at_both_ends() -> None:
    """What is slower than the stock choice at the lower end is not taken, however fast above."""
    buckets = (64, 512)
    assert tune.sampled_rows(buckets) == [(64,), (128, 512)]
    us = stock_and(fast=lambda m: 101.0 if m == 128 else 10.0)
    assert kernels(Bench(us), buckets) == ["fast", STOCK]
    us = stock_and(fast=lambda m: 90.0 if m == 128 else 10.0)
    assert kernels(Bench(us), buckets) == ["fast", "fast"]


def test_every_bucket_but_the_widest_has_one_tile_of_deep_gemm_at_each_sample() -> None:
    buckets = (*DECODE_ROWS, *PREFILL_ROWS)
    assert list(buckets) == sorted(set(buckets))
    for low, high, sampled in zip((0, *buckets), buckets, tune.sampled_rows(buckets), strict=False):
        assert sampled[-1] == high
        assert low < sampled[0] <= low + tune.ROW_STEP


def test_time_that_runs_out_leaves_the_stock_choice() -> None:
    now = iter(range(100))
    bench = Bench(stock_and(fast=50.0))
    attempts = tune.list_attempts(SHAPE, [64, 16], bench.candidates)
    measurements = list(
        tune.measure(bench.inputs(*SHAPE), attempts, until=3, clock=lambda: next(now))
    )
    assert [(x.m, x.kernel) for x in measurements] == [(64, STOCK), (64, "fast"), (16, STOCK)]
    assert [e.kernel for e in tune.pick(measurements, (16, 64))] == [STOCK, "fast"]


def test_each_config_is_an_attempt_of_its_own() -> None:
    us = {STOCK: 100.0, "fast": 50.0}
    bench = Bench(us)
    several = candidates.Candidate(
        "fast",
        lambda n, k, m: None if m < 64 else "too many rows",
        bench.candidates["fast"].bind,
        lambda n, k, m: [{"stages": stages} for stages in range(4)],
    )
    kinds = {**bench.candidates, "fast": several}
    assert [x.config for x in tune.list_attempts(SHAPE, [16, 64], kinds)] == [
        {},
        *({"stages": stages} for stages in range(4)),
        {},
    ]
    attempts = tune.list_attempts(SHAPE, [16], kinds)
    measurements = list(tune.measure(bench.inputs(*SHAPE), attempts))
    (entry,) = tune.pick(measurements, (16,))
    assert (entry.kernel, entry.config) == ("fast", {"stages": 0})


times = st.one_of(st.none(), st.floats(1, 1000))


@settings(max_examples=200)
@given(st.lists(st.tuples(times, times, times), min_size=4, max_size=4))
def test_no_pick_is_slower_than_the_stock_choice(table: list[tuple[float | None, ...]]) -> None:
    buckets = (16, 64, 256)
    names = (STOCK, "fast", "other")
    rows = tune.rows_of(buckets)
    assert rows == [16, 64, 128, 256]
    measured = {
        (m, name): us
        for m, row in zip(rows, table, strict=True)
        for name, us in zip(names, row, strict=True)
    }
    measurements = [Measurement(m, name, {}, us, 0.0) for (m, name), us in measured.items()]
    entries = tune.pick(measurements, buckets)
    assert [entry.m for entry in entries] == list(buckets)
    for entry, sampled in zip(entries, tune.sampled_rows(buckets), strict=True):
        if entry.kernel == STOCK:
            continue
        ours, stock = ([measured[m, name] for m in sampled] for name in (entry.kernel, STOCK))
        for our, their in zip(ours, stock, strict=True):
            assert our is not None
            assert their is not None
            assert our < their * (1 - MARGIN)


def test_sglang_compiles_all_again_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = compat.deep_gemm_warmup
    monkeypatch.setattr(stock, "_DO_COMPILE_ALL", True)
    with pytest.raises(OSError, match="nvcc"), compiling_only_what_runs():
        assert not stock._DO_COMPILE_ALL
        raise OSError("nvcc")
    assert stock._DO_COMPILE_ALL


def test_a_full_gpu_is_not_blamed_on_a_kernel() -> None:
    def full(*_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no 2 GiB are free")

    with pytest.raises(torch.OutOfMemoryError):
        kernels(Bench(stock_and(fast=50.0), fast=full))


class OddError(Exception):
    """Of a class that nobody foresaw."""


@pytest.mark.parametrize("error", [OutOfResources(2, 1, "registers"), OddError("odd")])
def test_a_kernel_is_passed_over_whatever_its_compiler_raises(error: Exception) -> None:
    def fails() -> float:
        raise error

    found = tune.judge(16, "odd", {}, lambda: 0.0, fails)
    assert (found.us, found.fault) == (None, f"{type(error).__name__}: {error}")


def test_an_interrupt_is_no_fault_of_a_kernel() -> None:
    def interrupted() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune.judge(16, "odd", {}, lambda: 0.0, interrupted)
