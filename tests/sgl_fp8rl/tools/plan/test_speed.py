"""The figures of ``plan`` beside the result files: those of the fit, and of what it left out."""

import json

import pytest

from benchmarks import plan as fit
from benchmarks.engines import models
from sgl_fp8rl.tools.plan import shape, speed

FREE = speed.idle_bytes(speed.H200)
WORST_STEP, WORST_PREFILL = 0.11, 0.085
"""Of loads that were left out: 10.5% and 7.9%."""
CAPACITY = 1e-3
"""Of capacities of engines that were not fitted to, at most: 0.08%."""


@pytest.fixture(scope="module")
def fitted() -> dict[str, object]:
    return fit.figures()


def test_the_figures_are_those_of_the_fit(fitted: dict[str, object]) -> None:
    """Also their errors. The sixth digit may be another one with another LAPACK."""
    shipped = json.loads(speed.FIGURES.read_text())

    def same(one: object, other: object) -> None:
        if isinstance(one, dict):
            assert isinstance(other, dict) and one.keys() == other.keys()
            for name in one:
                same(one[name], other[name])
        elif isinstance(one, list):
            assert isinstance(other, list)
            for each, others in zip(one, other, strict=True):
                same(each, others)
        else:
            assert one == (pytest.approx(other, rel=1e-4) if isinstance(other, float) else other)

    same(shipped, json.loads(json.dumps(fitted)))


def test_what_was_left_out_is_near_and_no_cost_is_negative() -> None:
    found = fit.medians(fit.FITTED)
    bytes_ms = speed.figures()["bytes_ms"]
    off = fit.left_out(found, bytes_ms)
    assert max(map(abs, off[fit.DECODE])) < WORST_STEP
    assert max(map(abs, off[fit.PREFILL])) < WORST_PREFILL
    for name in fit.arms(found):
        times = fit.fit(name, found, bytes_ms)
        assert all(value >= 0 for value in times.coefficients.values()), name


def test_a_fit_to_other_figures_is_seen() -> None:
    """The control: XQA's steps, taken for ours."""
    found = fit.medians(fit.FITTED)
    mixed = {
        (arm, case): found["stock-block-fp8-kv8-xqa" if case == "64x8192" else arm, case]
        for arm, case in found
    }
    off = fit.errors_of(fit.fit("fp8rl-kv8", mixed, 4.2e9), found, fit.LOADS[fit.MODEL])
    shipped = fit.errors_of(fit.fit("fp8rl-kv8", found, 4.2e9), found, fit.LOADS[fit.MODEL])
    assert max(map(abs, off[fit.DECODE])) > 1.3 * max(map(abs, shipped[fit.DECODE]))


@pytest.mark.parametrize(
    ("file", "model", "arms"),
    [
        # not stock BF16, which was not measured then
        ("rollout_16_bits", "qwen3-8b", [arm.name for arm in speed.ARMS[1:]]),
        # not ours, which had no workspace then
        ("rollout_moe", "qwen3-30b-a3b", ["stock-bf16"]),
    ],
)
def test_capacities_of_other_engines(file: str, model: str, arms: list[str]) -> None:
    of = shape.of(models.config(models.SHAPES[model]))
    found = fit.medians(file, model)
    for name in arms:
        held = speed.kv_tokens(FREE, of, fit.ARMS[name], 1, 0.88)
        assert held == pytest.approx(found[name, "capacity"]["kv_tokens"], rel=CAPACITY), name


def test_a_trainer_beside_the_engine_leaves_room_for_activations() -> None:
    """As much room as without it, so less of what is free; a longer chunk takes more."""

    def room(reserved: float, chunk: int = 8192, requests: int = 512) -> float:
        fraction = speed.mem_fraction_static(FREE - reserved, 1, chunk, requests)
        return (1 - fraction) * (FREE - reserved) / speed.MIB

    # SGLang's default on a whole H200 is 0.903 (0.5.17), with graphs of 256
    assert speed.mem_fraction_static(FREE, 1, 8192, 256) == pytest.approx(0.903, abs=0.005)
    step = 1e-3 * FREE / speed.MIB  # that it is rounded by
    assert room(60e9) == pytest.approx(room(0.0), abs=step)
    assert room(60e9) == pytest.approx(512 + 1.5 * 8192 + 128 + 2 * 512, abs=step)
    assert room(0.0, chunk=16384) - room(0.0) == pytest.approx(1.5 * 8192, abs=step)
    assert room(0.0, chunk=2048) == pytest.approx(10 * 1024, abs=step)
    assert room(0.0, requests=10**6) == room(0.0, requests=speed.MOST_IN_GRAPH)
    assert speed.mem_fraction_static(0.0, 1, 8192, 512) == 0.0
