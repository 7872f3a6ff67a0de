"""Where a model's table comes from at start, and who is left with SGLang's own kernels."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)
import torch
from torch import nn

from sgl_fp8rl import compat
from sgl_fp8rl.gemm import candidates, startup, table, warmup
from sgl_fp8rl.gemm.bench_inputs import BenchInputs
from sgl_fp8rl.gemm.candidates import STOCK, Candidate
from sgl_fp8rl.gemm.dispatch import Choices
from sgl_fp8rl.gemm.table import Entry, Table
from sgl_fp8rl.gemm.tune_cache import Machine
from sgl_fp8rl.linear import FP8RLLinearMethod
from sgl_fp8rl.ops.reference import quantize_weight
from tests.sgl_fp8rl.gemm import fakes
from tests.sgl_fp8rl.gemm.fakes import Bench, stock_and

MACHINE = Machine("NVIDIA H200", 132, {"torch": "2.11.0"})
BIG, SMALL = (512, 256), (256, 128)
FAST = [Entry(64, "flashinfer_sm90", {}, 9.0, 12.0)]
SPLIT = [Entry(64, "deep_gemm_split_n", {"parts": 2}, 8.0, 12.0)]


class Start:
    """A tune cache, the package's tables, and what was measured."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder, self.tables = str(folder / "cache"), folder / "tables"
        self.finished = True
        self.measured: list[Any] = []
        self.checked: list[Any] = []
        self.tables.mkdir()
        shipped = table.shipped
        patch.setattr(startup, "flashinfer_is_built", lambda: True)
        patch.setattr(table, "shipped", lambda machine, _: shipped(machine, False, self.tables))
        patch.setattr(startup, "quick_tune", self._tune)
        patch.setattr(startup, "accurate", self._check)
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        stock = SimpleNamespace(_DO_COMPILE_ALL=True)
        patch.setattr(compat, "deep_gemm_warmup", stock, raising=False)

    def _tune(self, shapes: list[Any]) -> tuple[Table, bool]:
        self.measured += shapes
        return dict.fromkeys(shapes, FAST), self.finished

    def _check(self, shape: Any, entries: list[Entry]) -> list[Entry]:
        self.checked.append(shape)
        return entries

    def ship(self, machine: Machine = MACHINE) -> None:
        table.FILES.save(self.tables / f"{machine.slug}.json", machine, {BIG: SPLIT})

    def find(self, *shapes: Any, machine: Machine = MACHINE, may_measure: bool = True) -> Table:
        return startup.find(shapes, machine, self.folder, may_measure=may_measure)


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
    assert "the next start does it again" in caplog.text
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
    assert "cannot be kept" in caplog.text


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
        startup, "BenchInputs", lambda n, k, _device, timer: BenchInputs(n, k, "cpu", timer)
    )
    entries = [
        Entry(m, name, {}, 8.0, 12.0) for m, name in enumerate([*kernels, *kernels, STOCK], start=1)
    ]
    found = startup.accurate(BIG, entries)
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
    assert "triton does not run here" in caplog.text


def test_a_start_builds_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    built = False
    monkeypatch.setattr(startup, "flashinfer_is_built", lambda: built)
    chosen = {BIG: [*FAST, Entry(128, "deep_gemm_split_n", {"parts": 2}, 8.0, 12.0)], SMALL: SPLIT}
    found = startup.only_built(chosen)
    assert found == {BIG: [Entry(64, STOCK, {}, 12.0, 12.0), chosen[BIG][1]], SMALL: SPLIT}
    built = True
    assert startup.only_built(chosen) == chosen


def test_a_card_without_room_keeps_the_stock_choice(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_shapes: Any) -> Any:
        raise torch.OutOfMemoryError("no 2 GiB are free")

    start.ship()
    with monkeypatch.context() as patch:
        patch.setattr(startup, "quick_tune", full)
        assert start.find(BIG, SMALL) == {BIG: SPLIT}
    assert "for want of memory" in caplog.text
    assert start.find(SMALL) == {SMALL: FAST}  # nothing was kept


class Rank:
    """One rank of an engine on a Hopper GPU, with two layers of one shape and one of another."""

    def __init__(self, patch: pytest.MonkeyPatch, rank: int = 0, world_size: int = 1) -> None:
        self.patch = patch
        self.found: list[Any] = []
        self.broadcast: list[Any] = []
        self.group = SimpleNamespace(
            rank_in_group=rank, world_size=world_size, ranks=[0, 1], cpu_group="gloo"
        )
        self.layers = [self._layer(*shape) for shape in (BIG, SMALL, BIG)]
        self.runner = SimpleNamespace(
            gpu_id=0,
            model=nn.Module(),
            model_config=SimpleNamespace(dtype=torch.bfloat16),
        )
        backend = SimpleNamespace(is_auto=lambda: True, value="auto")
        properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
        patch.setenv("FP8RL_TUNE_CACHE", "the user's folder")
        self.deterministic = SimpleNamespace(
            enable_deterministic_inference=False, rl_on_policy_target=None
        )
        resolved = SimpleNamespace(deterministic=self.deterministic)
        patch.setattr(compat, "get_exec", lambda: resolved, raising=False)
        patch.setattr(warmup, "warm_up", lambda original, runner: original(runner))
        patch.setattr(warmup, "gemm_layers", lambda _model: iter(self.layers))
        patch.setattr(compat, "get_tp_group", lambda: self.group, raising=False)
        patch.setattr(compat, "cuda_graph_fully_disabled", lambda: False, raising=False)
        self.set_backend(backend)
        patch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
        patch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
        patch.setattr(torch.distributed, "broadcast_object_list", self._broadcast)
        patch.setattr(startup, "find", self._find)
        self.compiled: list[Any] = []
        patch.setattr(startup, "compile_choices", self.compiled.append)

    def set_backend(self, backend: Any) -> None:
        self.patch.setattr(compat, "get_fp8_gemm_runner_backend", lambda: backend, raising=False)

    def _layer(self, n: int, k: int) -> nn.Module:
        layer = nn.Linear(k, n, bias=False, device="meta")
        layer.quant_method = object.__new__(FP8RLLinearMethod)  # type: ignore[assignment]
        return layer

    def _find(self, shapes: Any, machine: Machine, folder: str, may_measure: bool) -> Table:
        self.found.append((shapes, machine.card, machine.sms, folder, may_measure))
        return {BIG: SPLIT}

    def _broadcast(self, objects: list[Any], src: int, group: str) -> None:
        assert (src, group) == (0, "gloo")
        self.broadcast.append(list(objects))
        if self.group.rank_in_group:
            objects[:] = [{BIG: SPLIT}]

    def start(self) -> list[tuple[int, ...] | None]:
        """The bounds of each layer's choices."""
        calls: list[Any] = []
        startup.prepare(calls.append, self.runner)
        assert calls == [self.runner]
        methods: list[Any] = [layer.quant_method for layer in self.layers]
        return [m.choices and m.choices.bounds for m in methods]


def test_each_layer_gets_the_choices_of_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    assert rank.start() == [(64,), (), (64,)]
    assert rank.found == [([SMALL, BIG], "NVIDIA H200", 132, "the user's folder", True)]
    assert rank.broadcast == []
    assert rank.compiled == [rank.layers[2], rank.layers[1]]  # one of each shape


def test_kernels_run_once_before_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each every 64 rows; the stock choice is left to SGLang's own warm-up."""
    ran: list[Any] = []

    def bind(name: str) -> Any:
        def kernel(codes: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            ran.append((name, codes.shape[0]))
            return fakes.exact(codes, *rest)

        return lambda _config: kernel

    for name in (STOCK, "triton", "deep_gemm_split_n"):
        fake = Candidate(name, lambda *_: None, bind(name))
        monkeypatch.setitem(candidates.CANDIDATES, name, fake)
    bounds = {8: "triton", 64: STOCK, 192: "deep_gemm_split_n", 300: "triton"}
    choices = Choices.of([Entry(m, name, {}, 1.0, 2.0) for m, name in bounds.items()])
    weight, scales = quantize_weight(torch.ones(*BIG))
    startup.compile_choices(
        SimpleNamespace(
            weight=weight, weight_scale_inv=scales, quant_method=SimpleNamespace(choices=choices)
        )
    )
    parts, triton = (
        [("deep_gemm_split_n", m) for m in (128, 192)],
        [("triton", m) for m in (256, 300)],
    )
    assert ran == [("triton", 8), *parts, *triton]


def test_a_quick_tune_comes_to_every_candidate_it_can_afford(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All shapes with one candidate, then with the next, the largest batch first."""
    bench = Bench(stock_and(deep_gemm_split_n=50.0, flashinfer_sm90=40.0, triton=30.0))
    seen: list[Any] = []
    measure = startup.measure

    def spied(inputs: BenchInputs, attempts: Any, until: float) -> Any:
        seen.append((attempts[0].candidate.name, inputs.n, attempts[0].m))
        assert [x.m for x in attempts] == sorted((x.m for x in attempts), reverse=True)
        return measure(inputs, attempts[:2], until)

    monkeypatch.setattr(startup, "CANDIDATES", bench.candidates)
    monkeypatch.setattr(startup, "measure", spied)
    monkeypatch.setattr(startup, "BenchInputs", lambda n, k, *_: bench.inputs(n, k))
    monkeypatch.setattr(startup, "flashinfer_is_built", lambda: False)
    tuned, finished = startup.quick_tune([BIG, SMALL])
    assert finished
    names = [STOCK, "deep_gemm_split_n", "triton"]
    assert seen == [(name, n, 256) for name in names for n in (512, 256)]
    assert [e.kernel for e in tuned[BIG]][-3:] == [STOCK, "triton", "triton"]
    seen.clear()
    monkeypatch.setattr(startup, "flashinfer_is_built", lambda: True)
    monkeypatch.setattr(startup, "QUICK_S", -1.0)
    tuned, finished = startup.quick_tune([BIG])
    assert not finished
    assert [name for name, _, _ in seen] == [
        STOCK,
        "deep_gemm_split_n",
        "flashinfer_sm90",
        "triton",
    ]
    assert {entry.kernel for entry in tuned[BIG]} == {STOCK}


@pytest.mark.parametrize("number", [0, 1])
def test_ranks_take_the_table_of_the_first(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    rank = Rank(monkeypatch, number, world_size=2)
    assert rank.start() == [(64,), (), (64,)]
    assert len(rank.found) == 1 - number
    assert rank.broadcast == [[{BIG: SPLIT}] if number == 0 else [None]]


def test_engines_without_cuda_graphs_do_not_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    monkeypatch.setattr(compat, "cuda_graph_fully_disabled", lambda: True, raising=False)
    rank.start()
    assert rank.found[0][-1] is False


def chosen_by_user(rank: Rank) -> None:
    rank.set_backend(SimpleNamespace(is_auto=lambda: False, value="flashinfer_deepgemm"))


def on_blackwell(rank: Rank) -> None:
    rank.patch.setattr(torch.cuda, "get_device_capability", lambda _device: (10, 0))


def in_fp16(rank: Rank) -> None:
    rank.runner.model_config.dtype = torch.float16


def deterministic(rank: Rank) -> None:
    rank.deterministic.enable_deterministic_inference = True


def on_policy(rank: Rank) -> None:
    rank.deterministic.rl_on_policy_target = "fsdp"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (chosen_by_user, "--fp8-gemm-backend flashinfer_deepgemm was asked for"),
        (on_blackwell, "for Hopper"),
        (in_fp16, "the model computes in torch.float16"),
        (deterministic, "deterministic inference"),
        (on_policy, "deterministic inference"),
    ],
)
def test_sglangs_own_kernels_stay(
    change: Any, sentence: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(monkeypatch)
    change(rank)
    with caplog.at_level("INFO"):
        assert rank.start() == [None] * 3
    assert rank.found == []
    assert sentence in caplog.text


def test_a_model_without_fp8_is_not_spoken_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(monkeypatch)
    rank.layers.clear()
    chosen_by_user(rank)
    with caplog.at_level("INFO"):
        assert rank.start() == []
    assert caplog.records == []
