"""Only accurate tiles are taken, of those the fastest two that share their rows."""

import json
from typing import Any

import pytest
import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_fp8rl.engine.gemm.expert_tiles import ExpertShape, Pair
from sgl_fp8rl.engine.tuning import expert_tune
from sgl_fp8rl.engine.tuning.expert_bench_inputs import GEMMS
from sgl_fp8rl.engine.tuning.expert_tune import (
    ALIGN,
    Attempt,
    candidates,
    list_attempts,
    measure,
    pick,
    tokens_of,
)
from sgl_fp8rl.engine.tuning.tune import MARGIN, Measurement
from tests.sgl_fp8rl.gemm import expert_fakes as fakes
from tests.sgl_fp8rl.gemm.expert_fakes import SHAPE, Bench, config

QWEN = ExpertShape(128, 2048, 768, 8)
STOCK = config(64)
Times = dict[tuple[str, int], float]
"""Microseconds by the product and its ``num_stages``; 0: those of ``STOCK``."""


def stages(given: dict[str, Any]) -> int:
    return int(given.get("num_stages", 0))


def tuned(
    patch: pytest.MonkeyPatch,
    times: Times,
    configs: list[dict[str, Any]],
    wrong: dict[int, Any] | None = None,
    align: dict[int, float] | None = None,
) -> tuple[Pair, list[Measurement]]:
    """What is picked among ``STOCK``, with 50 microseconds a product, and ``configs``."""
    every: Times = {("gate_up", 0): 50.0, ("down", 0): 50.0, **times}

    def us(kernel: str, given: dict[str, Any]) -> float:
        if kernel == ALIGN:
            return (align or {}).get(given["BLOCK_SIZE_M"], 0.0)
        return every.get((kernel, stages(given)), 1000.0)

    bench = Bench(patch, us, wrong)
    patch.setattr(expert_tune, "stock", lambda shape, m: (STOCK, STOCK))
    patch.setattr(expert_tune, "candidates", lambda shape, m: configs)
    measurements = list(measure(bench.inputs(), list_attempts(SHAPE, 5)))
    return pick(measurements, 5, (STOCK, STOCK)), measurements


def picked(*args: Any, **options: Any) -> tuple[int, int]:
    """``num_stages`` of both."""
    pair, _ = tuned(*args, **options)
    return stages(dict(pair.up)), stages(dict(pair.down))


A, B = config(16, num_stages=1), config(16, num_stages=2)
WIDE = config(32, num_stages=3)


def test_the_fastest_of_each_product_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {("gate_up", 1): 20.0, ("gate_up", 2): 30.0, ("down", 1): 30.0, ("down", 2): 10.0}
    pair, measurements = tuned(monkeypatch, times, [A, B])
    assert pair == Pair(5, A, B, 30.0, 100.0)
    assert [x.kernel for x in measurements] == ["gate_up"] * 3 + ["down"] * 3 + [ALIGN] * 2
    assert all(x.error is not None and x.error < 1e-5 for x in measurements)


def test_both_products_share_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest of each have 16 and 32 rows; together 32 are faster."""
    times = {("gate_up", 1): 10.0, ("gate_up", 3): 15.0, ("down", 1): 40.0, ("down", 3): 20.0}
    assert picked(monkeypatch, times, [A, WIDE]) == (3, 3)
    other_way = times | {("gate_up", 3): 60.0}
    assert picked(monkeypatch, other_way, [A, WIDE]) == (1, 1)


def test_the_sort_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {("gate_up", 1): 20.0, ("gate_up", 3): 21.0, ("down", 1): 20.0, ("down", 3): 21.0}
    assert picked(monkeypatch, times, [A, WIDE]) == (1, 1)
    assert picked(monkeypatch, times, [A, WIDE], align={16: 9.0, 32: 4.0}) == (3, 3)
    pair, _ = tuned(monkeypatch, times, [A, WIDE], align={16: 9.0, 32: 4.0, 64: 6.0})
    assert (pair.us, pair.stock_us) == (46.0, 106.0)


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        (fakes.clipping, "its error"),
        (fakes.one_row_left_out, "its error"),
        (fakes.neighbours_scale, "its error"),
        (fakes.weighted_otherwise, "its error"),
        (fakes.raising, "RuntimeError: out of shared memory"),
    ],
)
def test_what_computes_wrongly_is_never_taken(
    kernel: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it is the fastest; the same with a right product is taken."""
    times = {(name, n): 1.0 if n == 2 else 20.0 for name in GEMMS for n in (1, 2)}
    pair, measurements = tuned(monkeypatch, times, [A, B], {2: kernel})
    assert pair == Pair(5, A, A, 40.0, 100.0)
    for wrong in (x for x in measurements if stages(dict(x.config)) == 2):
        assert wrong.us is None and wrong.fault is not None and wrong.fault.startswith(fault)
    assert picked(monkeypatch, times, [A, B]) == (2, 2)


@pytest.mark.parametrize(("us", "stages_"), [(50.0, 0), (49.5, 0), (49.1, 0), (48.5, 1), (20.0, 1)])
def test_sglangs_stay_unless_beaten_by_more_than_noise(
    us: float, stages_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {(name, 1): us for name in GEMMS}
    assert picked(monkeypatch, times, [A]) == (stages_, stages_)


@pytest.mark.parametrize("kernel", [fakes.neighbours_scale, fakes.raising])
def test_sglangs_do_not_stay_where_they_fail(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though they are the faster ones; where all fail they do."""
    times = {(name, 1): 80.0 for name in GEMMS}
    pair, _ = tuned(monkeypatch, times, [A], {0: kernel})
    assert pair == Pair(5, A, A, 160.0, None)
    pair, _ = tuned(monkeypatch, times, [A], {0: kernel, 1: kernel})
    assert pair == Pair(5, STOCK, STOCK, None, None)
    assert picked(monkeypatch, times, [A]) == (0, 0)


def test_a_choice_of_sglangs_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, measurements = tuned(monkeypatch, {}, [dict(STOCK), A])
    assert [x.config for x in measurements if x.kernel == "gate_up"] == [STOCK, A]


def test_a_full_gpu_is_not_blamed_on_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no 2 GiB are free")

    with pytest.raises(torch.OutOfMemoryError):
        tuned(monkeypatch, {}, [A], {1: full})


us_or_fault = st.one_of(st.none(), st.floats(1, 1000))


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from([16, 32, 64]), us_or_fault, us_or_fault), max_size=6))
def test_no_pick_is_slower_than_sglangs(rows: list[tuple[int, float | None, float | None]]) -> None:
    """Against all pairs one by one."""
    measurements = [Measurement(5, ALIGN, {"BLOCK_SIZE_M": b}, b / 2, 0.0) for b in (16, 32, 64)]
    configs = [STOCK, *(config(block, num_stages=i) for i, (block, _, _) in enumerate(rows))]
    for given_, (_, *both) in zip(configs, [(64, 50.0, 50.0), *rows], strict=True):
        measurements += [
            Measurement(5, name, given_, us, 0.0) for name, us in zip(GEMMS, both, strict=True)
        ]
    pair = pick(measurements, 5, (STOCK, STOCK))
    totals = [
        up.us + down.us + up.config["BLOCK_SIZE_M"] / 2
        for up in measurements
        for down in measurements
        if (up.kernel, down.kernel) == GEMMS and None not in (up.us, down.us)
        if up.config["BLOCK_SIZE_M"] == down.config["BLOCK_SIZE_M"]
    ]
    fastest = min(totals)
    assert pair.stock_us == 132.0
    if fastest < 132.0 * (1 - MARGIN):
        assert pair.us == fastest
        assert pair.up["BLOCK_SIZE_M"] == pair.down["BLOCK_SIZE_M"]
    else:
        assert (pair.up, pair.down, pair.us) == (STOCK, STOCK, 132.0)


# ---- what is measured


SHAPES = {
    QWEN: (4096, 2048),
    ExpertShape(257, 7168, 256, 9): (7311, 4096),
    ExpertShape(64, 2048, 1408, 6): (2731, 2048),
    ExpertShape(4, 256, 128, 3): (342, 256),
}
"""The last two M."""


@pytest.mark.parametrize(
    ("shape", "largest", "before"), [(shape, *last) for shape, last in SHAPES.items()]
)
def test_tokens_go_to_where_the_grouped_products_begin(
    shape: ExpertShape, largest: int, before: int
) -> None:
    tokens = tokens_of(shape)
    assert tokens[0] == 1 and tokens == sorted(set(tokens))
    assert tokens[-2:] == [before, largest]
    rows = largest * shape.top_k / shape.experts
    assert 256 <= rows < 256 + shape.top_k / shape.experts


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_a_tile_fit_those_of_an_expert(shape: ExpertShape) -> None:
    blocks = {
        m: sorted({given_["BLOCK_SIZE_M"] for given_ in candidates(shape, m)})
        for m in tokens_of(shape)
    }
    assert blocks[1] == [16] and blocks[max(blocks)] == [64, 128]
    assert all(blocks.values())
    if shape == QWEN:
        assert blocks[64] == [16] and blocks[128] == [16, 32]
        assert blocks[512] == [16, 32, 64, 128]


def test_candidates_are_tiles_that_the_kernel_takes() -> None:
    for m in tokens_of(QWEN):
        made = candidates(QWEN, m)
        assert len({tuple(given_.items()) for given_ in made}) == len(made)
        for given_ in made:
            Pair(m, given_, given_)


def test_those_that_an_h200_took_are_among_them() -> None:
    """The package's, by the script that preceded this."""
    from sgl_fp8rl.engine.gemm import expert_tiles

    (path,) = expert_tiles.SHIPPED.glob("*.json")
    for pair in expert_tiles.FILES.read(path)[1][QWEN]:
        assert pair.up in candidates(QWEN, pair.m), pair.m
        assert pair.down in candidates(QWEN, pair.m), pair.m


# ---- compiling


class Shares:
    """Stands in for the processes."""

    def __init__(self, patch: pytest.MonkeyPatch, processes: int) -> None:
        self.given: list[Any] = []
        self.failure: str | None = None
        patch.setattr(expert_tune, "process_limit", lambda *_: processes)
        patch.setattr(expert_tune, "run_shares", self._run)

    def _run(self, module: str, shares: Any) -> str | None:
        assert module == "sgl_fp8rl.engine.tuning.expert_tune"
        self.given = json.loads(json.dumps(shares))
        return self.failure


def test_each_kernel_is_compiled_by_one_process_for_all_its_batches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shares = Shares(monkeypatch, 2)
    attempts = [Attempt(m, name, given_) for m in (1, 4) for name in GEMMS for given_ in (A, B)]
    expert_tune.compile_ahead(SHAPE, [*attempts, Attempt(1, ALIGN, {"BLOCK_SIZE_M": 16})])
    assert [shape for shape, _ in shares.given] == [list(SHAPE)] * 2
    tasks = [task for _, share in shares.given for task in share]
    assert len(tasks) == 4 and {len(share) for _, share in shares.given} == {2}
    assert all([name, given_, [1, 4]] in tasks for name in GEMMS for given_ in (A, B))
    assert caplog.text == ""
    shares.failure = "nvcc is missing"
    expert_tune.compile_ahead(SHAPE, attempts)
    assert "nvcc is missing" in caplog.text


def test_one_core_compiles_as_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = Shares(monkeypatch, 1)
    expert_tune.compile_ahead(SHAPE, [Attempt(1, "down", A)])
    assert shares.given == []


def test_a_process_runs_each_kernel_at_each_m(monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on after one that cannot be compiled."""
    bench = Bench(monkeypatch, lambda *_: 0.0, {1: fakes.raising})
    made = expert_tune.ExpertBenchInputs
    monkeypatch.setattr(
        expert_tune, "ExpertBenchInputs", lambda shape, _device, timer: made(shape, "cpu", timer)
    )
    expert_tune.compile_share(SHAPE, [("gate_up", A, [1, 4]), ("down", B, [4, 8])])
    products = [(name, stages(given_)) for name, given_ in bench.ran if name != ALIGN]
    assert products == [("gate_up", 1)] * 2 + [("down", 2)] * 2
