"""Where a model's table comes from at start."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)
import torch

from sgl_fp8rl.engine.gemm import candidates, table
from sgl_fp8rl.engine.gemm.candidates import STOCK, Candidate
from sgl_fp8rl.engine.gemm.table import Entry, Table
from sgl_fp8rl.engine.gemm.tune_cache import Machine
from sgl_fp8rl.engine.tuning import quick_tune
from sgl_fp8rl.engine.tuning.bench_inputs import BenchInputs
from tests.sgl_fp8rl.gemm import fakes
from tests.sgl_fp8rl.gemm.fakes import Bench, stock_and

MACHINE = Machine("NVIDIA H200", 132, {"torch": "2.11.0"})
BIG, SMALL = (512, 256), (256, 128)
FAST = [Entry(64, "flashinfer_sm90", {}, 9.0, 12.0)]
SPLIT = [Entry(64, "deep_gemm_split_n", {"splits": 2}, 8.0, 12.0)]


class Start:
    """A tune cache, the package's tables, and what was measured."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder, self.tables = str(folder / "cache"), folder / "tables"
        self.finished = True
        self.measured: list[Any] = []
        self.checked: list[Any] = []
        self.tables.mkdir()
        shipped = table.shipped
        patch.setattr(quick_tune, "flashinfer_is_built", lambda: True)
        patch.setattr(table, "shipped", lambda machine, _: shipped(machine, False, self.tables))
        patch.setattr(quick_tune, "quick_tune", self._tune)
        patch.setattr(quick_tune, "accurate", self._check)
        patch.setattr(torch.cuda, "empty_cache", lambda: None)

    def _tune(self, shapes: list[Any]) -> tuple[Table, bool]:
        self.measured += shapes
        return dict.fromkeys(shapes, FAST), self.finished

    def _check(self, shape: Any, entries: list[Entry]) -> list[Entry]:
        self.checked.append(shape)
        return entries

    def ship(self, machine: Machine = MACHINE) -> None:
        table.FILES.save(self.tables / f"{machine.slug}.json", machine, {BIG: SPLIT})

    def find(self, *shapes: Any, machine: Machine = MACHINE, may_measure: bool = True) -> Table:
        return quick_tune.find(shapes, machine, self.folder, may_measure=may_measure)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    return Start(monkeypatch, tmp_path)


def test_what_no_table_has_is_measured_once(start: Start) -> None:
    assert start.find(BIG, SMALL) == {BIG: FAST, SMALL: FAST}
    assert start.measured == [BIG, SMALL]
    assert start.find(BIG, SMALL) == {BIG: FAST, SMALL: FAST}
    assert start.measured == [BIG, SMALL]


def test_what_time_cut_short_is_used_and_not_kept(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Most of that time went into compiling, which the next start need not do."""
    start.finished = False
    with caplog.at_level("INFO"):
        assert start.find(BIG) == {BIG: FAST}
    assert "the next start measures again" in caplog.text
    start.finished = True
    assert start.find(BIG) == {BIG: FAST}
    assert start.find(BIG) == {BIG: FAST}
    assert start.measured == [BIG, BIG]


def test_a_shipped_table_needs_no_measuring(start: Start) -> None:
    start.ship()
    assert start.find(BIG) == {BIG: SPLIT}
    assert start.measured == start.checked == []
    assert not Path(start.folder).exists()
    assert start.find(BIG, SMALL) == {BIG: SPLIT, SMALL: FAST}
    assert start.measured == [SMALL]


def test_the_users_own_table_wins(start: Start) -> None:
    start.ship()
    table.FILES.save(table.FILES.path(MACHINE, start.folder), MACHINE, {BIG: FAST})
    assert start.find(BIG) == {BIG: FAST}


def test_a_new_shape_does_not_lose_the_others(start: Start) -> None:
    start.find(BIG)
    start.find(SMALL)
    assert table.FILES.own(MACHINE, start.folder) == {BIG: FAST, SMALL: FAST}


def test_with_other_versions_kernels_are_checked_once(start: Start) -> None:
    start.ship()
    newer = replace(MACHINE, versions={"torch": "2.12.0"})
    for _ in range(2):
        assert start.find(BIG, machine=newer) == {BIG: SPLIT}
    assert start.checked == [BIG]
    assert start.measured == []


def test_without_cuda_graphs_nothing_is_measured(start: Start) -> None:
    start.ship()
    assert start.find(BIG, SMALL, may_measure=False) == {BIG: SPLIT}
    assert start.measured == []


def test_a_cache_that_cannot_be_written_costs_the_next_start_its_time(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    Path(start.folder).touch()
    for _ in range(2):
        assert start.find(BIG) == {BIG: FAST}
    assert start.measured == [BIG, BIG]
    assert "cannot be saved" in caplog.text


def test_a_kernel_that_fails_here_gives_way_to_the_stock_choice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = {
        "flashinfer_sm90": fakes.exact,
        "deep_gemm_split_n": fakes.clipping,
        "triton": fakes.raising,
    }
    bound: list[str] = []
    for name, kernel in kernels.items():

        def bind(_: Any, name: str = name, kernel: Any = kernel) -> Any:
            bound.append(name)
            return kernel

        fake = Candidate(name, lambda *_: None, bind)
        monkeypatch.setitem(candidates.CANDIDATES, name, fake)
    monkeypatch.setattr(
        quick_tune, "BenchInputs", lambda n, k, _device, timer: BenchInputs(n, k, "cpu", timer)
    )
    entries = [
        Entry(m, name, {}, 8.0, 12.0) for m, name in enumerate([*kernels, *kernels, STOCK], start=1)
    ]
    found = quick_tune.accurate(BIG, entries)
    stock = [STOCK, STOCK]
    assert [x.kernel for x in found] == [
        "flashinfer_sm90",
        *stock,
        "flashinfer_sm90",
        *stock,
        STOCK,
    ]
    assert [x.m for x in found] == [x.m for x in entries]
    assert found[1].us == found[1].stock_us == 12.0
    assert bound == [*kernels, *kernels]  # each at its own M: it may be another kernel there
    assert "triton" in caplog.text


def test_a_start_builds_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    built = False
    monkeypatch.setattr(quick_tune, "flashinfer_is_built", lambda: built)
    chosen = {BIG: [*FAST, Entry(128, "deep_gemm_split_n", {"splits": 2}, 8.0, 12.0)], SMALL: SPLIT}
    found = quick_tune.only_built(chosen)
    assert found == {BIG: [Entry(64, STOCK, {}, 12.0, 12.0), chosen[BIG][1]], SMALL: SPLIT}
    built = True
    assert quick_tune.only_built(chosen) == chosen


def test_a_gpu_without_room_keeps_the_stock_choice(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_shapes: Any) -> Any:
        raise torch.OutOfMemoryError("no 2 GiB are free")

    start.ship()
    with monkeypatch.context() as patch:
        patch.setattr(quick_tune, "quick_tune", full)
        assert start.find(BIG, SMALL) == {BIG: SPLIT}
    assert "memory" in caplog.text
    assert start.find(SMALL) == {SMALL: FAST}  # nothing was kept


def test_a_quick_tune_comes_to_every_candidate_it_can_afford(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All shapes with one candidate, then with the next, the largest batch first."""
    bench = Bench(stock_and(deep_gemm_split_n=50.0, flashinfer_sm90=40.0, triton=30.0))
    seen: list[Any] = []
    measure = quick_tune.measure

    def spied(inputs: BenchInputs, attempts: Any, until: float) -> Any:
        seen.append((attempts[0].candidate.name, inputs.n, attempts[0].m))
        assert [x.m for x in attempts] == sorted((x.m for x in attempts), reverse=True)
        return measure(inputs, attempts[:2], until)

    monkeypatch.setattr(quick_tune, "CANDIDATES", bench.candidates)
    monkeypatch.setattr(quick_tune, "measure", spied)
    monkeypatch.setattr(quick_tune, "BenchInputs", lambda n, k, *_: bench.inputs(n, k))
    monkeypatch.setattr(quick_tune, "flashinfer_is_built", lambda: False)
    tuned, finished = quick_tune.quick_tune([BIG, SMALL])
    assert finished
    names = [STOCK, "deep_gemm_split_n", "triton"]
    assert seen == [(name, n, 256) for name in names for n in (512, 256)]
    assert [e.kernel for e in tuned[BIG]][-3:] == [STOCK, "triton", "triton"]
    seen.clear()
    monkeypatch.setattr(quick_tune, "flashinfer_is_built", lambda: True)
    monkeypatch.setattr(quick_tune, "QUICK_S", -1.0)
    tuned, finished = quick_tune.quick_tune([BIG])
    assert not finished
    assert [name for name, _, _ in seen] == [
        STOCK,
        "deep_gemm_split_n",
        "flashinfer_sm90",
        "triton",
    ]
    assert {entry.kernel for entry in tuned[BIG]} == {STOCK}
