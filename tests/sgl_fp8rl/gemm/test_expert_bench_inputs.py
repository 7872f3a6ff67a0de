"""The error of a product of experts, and what is multiplied to time it.

SGLang's kernel is a loop here; tests/gpu/test_expert_tiles.py runs its own, in Triton's interpreter
too.
"""

from typing import Any

import pytest
import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)
import torch

from sgl_fp8rl.engine.tuning import bench_inputs, expert_bench_inputs
from sgl_fp8rl.engine.tuning.bench_inputs import CHECKED_ROWS
from sgl_fp8rl.engine.tuning.expert_bench_inputs import GEMMS, Weights
from sgl_fp8rl.engine.tuning.tune import ERROR_BOUND
from tests.sgl_fp8rl.gemm import expert_fakes as fakes
from tests.sgl_fp8rl.gemm.expert_fakes import Bench, config

HEALTHY = 1e-5
"""Of an FP32 product rounded to BF16: 2e-6 here."""


def no_time(*_: Any) -> float:
    return 1.0


@pytest.mark.parametrize("m", [1, 5, 40])
@pytest.mark.parametrize("name", GEMMS)
def test_a_right_product_has_no_error(name: str, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Bench(monkeypatch, no_time).inputs().error(name, config(), m) < HEALTHY


WRONG = (
    fakes.clipping,
    fakes.one_row_left_out,
    fakes.neighbours_scale,
    fakes.weighted_otherwise,
)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", GEMMS)
def test_wrong_products_show(name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same operands after a right product, whose result a lazy one must not inherit."""
    made = Bench(monkeypatch, no_time, {9: wrong}).inputs()
    assert made.error(name, config(), 5) < HEALTHY
    assert made.error(name, config(num_stages=9), 5) > ERROR_BOUND


def test_clipping_shows_on_outliers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """So normal activations alone would let it pass."""
    made = Bench(monkeypatch, no_time, {9: fakes.clipping}).inputs()
    batch = made._of(32)
    batch.tokens["gate_up"].pop()
    assert made.error("gate_up", config(num_stages=9), 32) < HEALTHY
    made = Bench(monkeypatch, no_time, {9: fakes.clipping}).inputs()
    assert made.error("gate_up", config(num_stages=9), 32) > ERROR_BOUND


def test_rows_of_a_large_batch_are_sampled_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Bench(monkeypatch, no_time).inputs()
    rows = made._of(200).rows
    assert len(rows) == CHECKED_ROWS and (int(rows[0]), int(rows[-1])) == (0, 3 * 200 - 1)
    for name, width in zip(GEMMS, (256, 256), strict=True):
        references = made._references(name, 200)
        assert [x.shape for x in references] == [(CHECKED_ROWS, width)] * 2
        assert all(x.dtype == torch.float64 for x in references)


def test_small_weights_are_rotated_and_large_ones_not(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(expert_bench_inputs, "copies", bench_inputs.copies)
    assert len(Weights(4, 256, 256, generator).sets) == 1  # on a CPU, which times nothing
    monkeypatch.setattr(expert_bench_inputs, "copies", lambda codes: -(-600_000 // codes.numel()))
    sets = Weights(4, 256, 256, generator).sets
    assert len(sets) == 3
    assert len({codes.data_ptr() for codes, _ in sets}) == 3
    assert all(torch.equal(scales, sets[0][1]) for _, scales in sets)
    assert len(Weights(4, 256, 1024, generator).sets) == 1


@pytest.mark.parametrize(("m", "routings"), [(1, 7), (2, 5), (50, 5)])
def test_few_tokens_take_turns_with_more_routings(
    m: int, routings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which read other experts each time, until as much was read as no cache holds."""
    bench = Bench(monkeypatch, no_time)
    monkeypatch.setattr(expert_bench_inputs, "ROTATED_BYTES", 20 * 256 * 128)
    made = bench.inputs()
    made.time_us("down", config(), m)
    batch = made._of(m)
    assert len(batch.routings) == routings
    weights, ids = batch.routings[0]
    assert not torch.equal(ids, batch.routings[1][1])
    assert ids.dtype == torch.int32 and ids.shape == (m, 3)
    assert all(len(set(row)) == 3 for row in ids.tolist())  # no expert twice
    assert torch.allclose(weights.sum(1), torch.ones(m))


def test_the_sort_is_timed_for_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, lambda kernel, given: given["BLOCK_SIZE_M"] / 2)
    assert bench.inputs().align_us(32, 5) == 16.0
    assert bench.ran == [("align", {"BLOCK_SIZE_M": 32})] * 2
