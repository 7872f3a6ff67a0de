"""Mismatch metrics and weights, against plain Python loops that share no code with them."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_bridge.correction import correct, mismatch_metrics
from trainer_bridge.rollout import Rollout

REL = 1e-13  # float64 sums in another order; measured 9e-16 at worst
PERCENTILE_REL = 2e-8  # bisection stops at 40 / 2**32; measured 9.3e-9 at worst
WORKER_SECONDS = 120

Rows = list[list[float]]


def make_rollout(logprobs: Rows, versions: list[list[int]] | None = None) -> Rollout:
    return Rollout(
        prompt_tokens=[[1]] * len(logprobs),
        tokens=[[7] * len(row) for row in logprobs],
        logprobs=logprobs,
        versions=versions or [[0] * len(row) for row in logprobs],
        finish_reasons=["stop"] * len(logprobs),
        temperature=1.0,
    )


def pad(rows: Rows, fill: float = 0.0) -> torch.Tensor:
    width = max((len(row) for row in rows), default=0)
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows]).reshape(-1, width)


def float32(rows: Rows) -> Rows:
    """The rows as a float32 tensor holds them."""
    return [torch.tensor(row, dtype=torch.float32).tolist() for row in rows]


def oracle(trainer: Rows, rollout: Rows) -> dict[str, float]:
    """The documented formulas, token by token."""

    def clamp(x: float) -> float:
        return min(max(x, -20.0), 20.0)

    x: list[float] = []
    sequence_chi2: list[float] = []
    gaps: list[float] = []
    for trainer_row, rollout_row in zip(float32(trainer), float32(rollout), strict=True):
        row = [t - r for t, r in zip(trainer_row, rollout_row, strict=True)]
        if row:
            sequence_chi2.append(math.exp(clamp(math.fsum(row))) ** 2)
            gaps.append(math.fsum(-value for value in row) / len(row))
        x += row
    n, s = len(x), len(gaps)
    ratio = [math.exp(clamp(value)) for value in x]
    mean_ratio, mean_square = math.fsum(ratio) / n, math.fsum(r * r for r in ratio) / n
    k3 = [
        taylor(value) if abs(value) < 1e-3 else r - 1.0 - value
        for r, value in zip(ratio, x, strict=True)
    ]
    expected = {
        "tokens": n,
        "sequences": s,
        "mismatch_kl_k1": math.fsum(-value for value in x) / n,
        "mismatch_kl_k3": math.fsum(k3) / n,
        "ratio_mean": mean_ratio,
        "ratio_min": min(ratio),
        "ratio_max": max(ratio),
        "ess": math.fsum(ratio) ** 2 / (n * math.fsum(r * r for r in ratio)),
        "chi2_token": mean_square - 1.0,
        "chi2_seq": math.fsum(sequence_chi2) / s - 1.0,
        "logprob_abs_diff_mean": math.fsum(abs(value) for value in x) / n,
        "logprob_abs_diff_max": max(abs(value) for value in x),
        "token_mult_prob_error": math.fsum(math.exp(clamp(abs(value))) for value in x) / n,
        "log_ppl_gap": math.fsum(gaps) / s,
        "ppl_ratio": math.fsum(math.exp(clamp(gap)) for gap in gaps) / s,
    }
    ordered = sorted(ratio)
    for percent in (1, 50, 99):
        rank = next(k for k in range(1, n + 1) if 100 * k >= percent * n)
        expected[f"ratio_p{percent:02}"] = ordered[rank - 1]
    return expected


def taylor(x: float) -> float:
    """exp(x) - 1 - x without its cancellation, for |x| up to 1e-3."""
    return x**2 / 2 + x**3 / 6 + x**4 / 24 + x**5 / 120


def assert_metrics(actual: dict[str, float], expected: dict[str, float], scale: float) -> None:
    """Equal to rounding; `scale` is the size of the terms whose sum may cancel."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if "ratio_p" in name:
            assert actual[name] == pytest.approx(value, rel=PERCENTILE_REL, abs=0), name
        else:
            assert actual[name] == pytest.approx(value, rel=REL, abs=REL * scale), name


def worst(trainer: Rows, rollout: Rows) -> float:
    rows = zip(trainer, rollout, strict=True)
    return max([1.0, *(abs(t - r) for row in rows for t, r in zip(*row, strict=True))])


logprob = st.floats(-60.0, 0.0, width=32)
near = st.floats(-0.5, 0.5, width=32)


@st.composite
def batches(draw: Callable[[st.SearchStrategy[Any]], Any]) -> tuple[Rows, Rows]:
    """Trainer and rollout rows, some empty, at least one token; mismatches small or huge."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any))
    rollout = [draw(st.lists(logprob, min_size=k, max_size=k)) for k in lengths]
    noise = draw(st.sampled_from([near, st.floats(-1000.0, 1000.0, width=32)]))
    trainer = [[value + draw(noise) for value in row] for row in rollout]
    return trainer, rollout


@given(batches())
@settings(max_examples=200, deadline=None)
def test_metrics_agree_with_the_oracle(batch: tuple[Rows, Rows]) -> None:
    trainer, rollout = batch
    actual = mismatch_metrics(pad(trainer), pad(rollout), make_rollout(rollout).mask_BT)
    assert_metrics(actual, oracle(trainer, rollout), worst(trainer, rollout))


def test_metrics_agree_with_the_oracle_on_a_long_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    rollout = [(-torch.rand(n, generator=generator) * 4).tolist() for n in (700, 1, 333, 0)]
    noise = [(0.02 * torch.randn(len(row), generator=generator)).tolist() for row in rollout]
    trainer = (pad(rollout) + pad(noise)).tolist()
    trainer = [row[: len(sampled)] for row, sampled in zip(trainer, rollout, strict=True)]
    actual = mismatch_metrics(pad(trainer), pad(rollout), make_rollout(rollout).mask_BT)
    assert_metrics(actual, oracle(trainer, rollout), 1.0)
    assert 0.9 < actual["ratio_p01"] < actual["ratio_p50"] < actual["ratio_p99"] < 1.1


def test_estimators_give_the_exact_divergences_of_known_distributions() -> None:
    """Each token as often as the rollout samples it: a mean over tokens is the expectation."""
    rollout_p, trainer_p = [1 / 2, 1 / 4, 1 / 8, 1 / 8], [1 / 16, 1 / 4, 3 / 16, 1 / 2]
    row = [0, 0, 0, 0, 1, 1, 2, 3]
    rollout = torch.tensor([[math.log(rollout_p[i]) for i in row]], dtype=torch.float64)
    trainer = torch.tensor([[math.log(trainer_p[i]) for i in row]], dtype=torch.float64)
    metrics = mismatch_metrics(trainer, rollout, torch.ones(1, 8, dtype=torch.bool))
    pairs = list(zip(rollout_p, trainer_p, strict=True))
    kl = sum(p * math.log(p / q) for p, q in pairs)
    reverse_kl = sum(q * math.log(q / p) for p, q in pairs)
    assert metrics["mismatch_kl_k1"] == pytest.approx(kl, rel=REL)
    assert metrics["mismatch_kl_k3"] == pytest.approx(kl, rel=REL)
    assert metrics["ratio_mean"] == pytest.approx(1.0, rel=REL)
    chi2 = sum(q * q / p for p, q in pairs) - 1
    assert metrics["chi2_token"] == pytest.approx(chi2, rel=REL)
    assert metrics["ess"] == pytest.approx(1 / (1 + chi2), rel=REL)
    assert abs(kl - reverse_kl) > 0.01  # the direction is told apart


@given(batches(), st.floats(0.125, 8.0, width=32))
@settings(max_examples=100, deadline=None)
def test_tis_weights_are_the_capped_ratios(batch: tuple[Rows, Rows], clip: float) -> None:
    trainer, rollout = batch
    sampled = make_rollout(rollout)
    result = correct(sampled, pad(trainer, math.nan), clip=clip)
    assert result.weights_BT.dtype == torch.float32 and result.mask_BT.dtype == torch.bool
    assert result.weights_BT.max() <= clip and result.weights_BT.min() >= 0
    assert torch.equal(result.mask_BT, sampled.mask_BT)
    clipped, weights = 0, []
    for b, rows in enumerate(zip(float32(trainer), float32(rollout), strict=True)):
        assert not result.weights_BT[b, len(rows[0]) :].any()
        for t, (trainer_logprob, rollout_logprob) in enumerate(zip(*rows, strict=True)):
            ratio = math.exp(min(max(trainer_logprob - rollout_logprob, -20), 20))
            weights.append(min(ratio, clip))
            clipped += ratio > clip
            assert result.weights_BT[b, t].item() == pytest.approx(weights[-1], rel=1e-6)
    assert result.metrics["clipped_fraction"] == pytest.approx(clipped / len(weights))
    assert result.metrics["weight_mean"] == pytest.approx(sum(weights) / len(weights), rel=REL)
    ess = sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))
    assert result.metrics["weight_ess"] == pytest.approx(ess, rel=REL)


@given(batches())
@settings(max_examples=100, deadline=None)
def test_mis_drops_the_tokens_outside_the_band(batch: tuple[Rows, Rows]) -> None:
    trainer, rollout = batch
    result = correct(make_rollout(rollout), pad(trainer), mode="mis", band=(0.75, 1.25))
    kept, total = 0, sum(map(len, rollout))
    for b, rows in enumerate(zip(float32(trainer), float32(rollout), strict=True)):
        assert not result.mask_BT[b, len(rows[0]) :].any()
        for t, (trainer_logprob, rollout_logprob) in enumerate(zip(*rows, strict=True)):
            ratio = math.exp(min(max(trainer_logprob - rollout_logprob, -20), 20))
            inside = 0.75 <= ratio <= 1.25
            kept += inside
            assert result.mask_BT[b, t].item() is inside
            expected = ratio if inside else 0.0
            assert result.weights_BT[b, t].item() == pytest.approx(expected, rel=1e-6)
    assert result.metrics["masked_fraction"] == pytest.approx(1 - kept / total)
    assert result.metrics["weight_ess"] <= kept / total + REL


def test_mis_with_every_token_outside_has_no_effective_sample() -> None:
    result = correct(make_rollout([[-1.0, -2.0]]), torch.tensor([[-9.0, -9.0]]), mode="mis")
    assert not result.mask_BT.any() and not result.weights_BT.any()
    assert (result.metrics["weight_ess"], result.metrics["masked_fraction"]) == (0.0, 1.0)


@given(batches(), st.sampled_from(["tis", "mis"]))
@settings(max_examples=50, deadline=None)
def test_identical_logprobs_need_no_correction(batch: tuple[Rows, Rows], mode: Any) -> None:
    _, rows = batch
    result = correct(make_rollout(rows), pad(rows), mode=mode)
    assert torch.equal(result.weights_BT, make_rollout(rows).mask_BT.float())
    zero = "mismatch_kl_k1 mismatch_kl_k3 chi2_token chi2_seq log_ppl_gap logprob_abs_diff_max"
    assert {result.metrics[name] for name in zero.split()} == {0.0}
    one = "ess ratio_min ratio_mean ratio_max ppl_ratio token_mult_prob_error weight_ess"
    assert {result.metrics[name] for name in one.split()} == {1.0}


@given(batches(), st.sampled_from([math.nan, -math.inf, math.inf, 1e30]))
@settings(max_examples=50, deadline=None)
def test_positions_outside_the_mask_never_matter(batch: tuple[Rows, Rows], fill: float) -> None:
    trainer, rollout = batch
    trainer_BT, rollout_BT = pad(trainer), pad(rollout)
    mask_BT = make_rollout(rollout).mask_BT
    clean = mismatch_metrics(trainer_BT, rollout_BT, mask_BT)
    dirty = mismatch_metrics(pad(trainer, fill), pad(rollout, -fill), mask_BT)
    assert dirty == clean
    weights = correct(make_rollout(rollout), trainer_BT).weights_BT
    assert torch.equal(correct(make_rollout(rollout), pad(trainer, fill)).weights_BT, weights)


def test_policy_versions_are_reported_apart() -> None:
    rollout, trainer = [[-1.0, -2.0, -3.0], [-0.5, -0.25]], [[-1.5, -2.0, -2.0], [-0.25, -4.0]]
    metrics = correct(make_rollout(rollout, [[-1, -1, 3], [3, 3]]), pad(trainer)).metrics
    parts = {-1: (trainer[0][:2], rollout[0][:2]), 3: (trainer[0][2:], rollout[0][2:])}
    for version, (trainer_part, rollout_part) in parts.items():
        rows = [trainer_part], [rollout_part]
        if version == 3:
            rows = [trainer_part, trainer[1]], [rollout_part, rollout[1]]
        prefix = f"version_{version}/"
        part = {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)}
        assert_metrics(part, oracle(*rows), 1.0)
    padding_in_use = torch.tensor([[-1, -1, 3], [3, 3, -1]])  # (1, 2) is no token, whatever it says
    mask_BT = make_rollout(rollout).mask_BT
    grouped = mismatch_metrics(pad(trainer), pad(rollout), mask_BT, versions_BT=padding_in_use)
    assert grouped.items() <= metrics.items()
    padding_in_use[1, 2] = 9
    again = mismatch_metrics(pad(trainer), pad(rollout), mask_BT, versions_BT=padding_in_use)
    assert again == grouped
    one_version = correct(make_rollout(rollout), pad(trainer)).metrics
    assert not [name for name in one_version if "/" in name]
    assert {name: metrics[name] for name in one_version} == one_version


def test_weights_carry_no_gradient_and_take_half_precision_logprobs() -> None:
    trainer = torch.tensor([[-1.0, -2.5]], requires_grad=True)
    result = correct(make_rollout([[-1.5, -2.0]]), trainer)
    assert not result.weights_BT.requires_grad
    (gradient,) = torch.autograd.grad((result.weights_BT * trainer).sum(), trainer)
    assert torch.equal(gradient, result.weights_BT)
    half = correct(make_rollout([[-1.5, -2.0]]), trainer.detach().bfloat16())
    assert torch.equal(half.weights_BT, result.weights_BT)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (torch.zeros(2, 3), r"shape \(2, 3\) against"),
        (torch.zeros(2), r"shape \(2,\) against"),
        (torch.tensor([[-1.0, -math.inf]]), "1 tokens have .* no finite number"),
        (torch.tensor([[math.nan, math.inf]]), "2 tokens have .* no finite number"),
    ],
)
def test_unusable_trainer_logprobs_are_refused(trainer: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        correct(make_rollout([[-1.0, -2.0]]), trainer)


def test_other_unusable_inputs_are_refused() -> None:
    zeros, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"1 tokens have .* no finite number"):
        mismatch_metrics(zeros, torch.tensor([[-1.0, -math.inf]]), mask)
    with pytest.raises(ValueError, match=r"mask_BT has dtype torch.float32; pass it as bool"):
        mismatch_metrics(zeros, zeros, mask.float())
    with pytest.raises(ValueError, match="mask_BT selects no token"):
        mismatch_metrics(zeros, zeros, ~mask)
    with pytest.raises(ValueError, match="mask_BT selects no token"):
        correct(make_rollout([[], []]), torch.zeros(2, 0))
    sampled = make_rollout([[-1.0]])
    with pytest.raises(ValueError, match="mode is 'sequence'; use 'tis' or 'mis'"):
        correct(sampled, torch.zeros(1, 1), mode="sequence")  # type: ignore[arg-type]
    for bad in ({"clip": 0.0}, {"clip": math.inf}, {"band": (2.0, 0.5)}, {"band": (-1.0, 2.0)}):
        with pytest.raises(ValueError, match="clip must be positive and finite"):
            correct(sampled, torch.zeros(1, 1), **bad)


# One rank: reads its rows of each case, writes what correct() gave or raised.
WORKER = """
import json, sys
from datetime import timedelta
import torch, torch.distributed as dist
from trainer_bridge.correction import correct
from trainer_bridge.rollout import Rollout

rank, folder = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(folder + "/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
results = {}
for name, ranks in json.load(open(folder + "/cases.json")).items():
    case = ranks[rank]
    rows = case["rollout"]
    sampled = Rollout([[1]] * len(rows), [[7] * len(row) for row in rows], rows, case["versions"],
                      ["stop"] * len(rows), 1.0)
    trainer = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row) for row in case["trainer"]], batch_first=True)
    try:
        result = correct(sampled, trainer, mode=case["mode"], group=dist.group.WORLD)
        results[name] = [result.metrics, result.weights_BT.tolist()]
    except ValueError as error:
        results[name] = str(error)
json.dump(results, open(f"{folder}/result{rank}.json", "w"))
dist.destroy_process_group()
"""


def run_on_two_ranks(folder: Path, cases: dict[str, Any]) -> list[dict[str, Any]]:
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=WORKER_SECONDS)
            assert worker.returncode == 0, errors
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(2)]


def make_case(rows: Rows, trainer: Rows, version: int, mode: str = "tis") -> dict[str, Any]:
    versions = [[version] * len(row) for row in rows]
    return {"rollout": rows, "trainer": trainer, "versions": versions, "mode": mode}


@pytest.mark.timeout(WORKER_SECONDS + 30)
def test_two_ranks_get_the_numbers_of_one_batch(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    rollout = [(-3 * torch.rand(n, generator=generator)).tolist() for n in (40, 3, 5)]
    trainer = [
        (torch.tensor(row) + torch.randn(len(row), generator=generator)).tolist() for row in rollout
    ]
    halves = [(rollout[:1], trainer[:1]), (rollout[1:], trainer[1:])]  # T is 40 and 5, B 1 and 2
    good = make_case(*halves[0], 0)
    cases = {
        "same_version": [good, make_case(*halves[1], 0)],
        "mis": [make_case(*halves[0], 0, "mis"), make_case(*halves[1], 0, "mis")],
        "other_versions": [good, make_case(*halves[1], 4)],
        "rank_without_tokens": [good, make_case([[], []], [[], []], 0)],
        "nothing": [make_case([[]], [[]], 0)] * 2,
        "infinite": [good, make_case([[-1.0]], [[-math.inf]], 0)],
        "misshapen": [make_case([[-1.0]], [[-1.0, -2.0]], 0), good],
    }
    first, second = run_on_two_ranks(tmp_path, cases)

    for name in ("same_version", "mis", "other_versions", "rank_without_tokens"):
        assert first[name][0] == second[name][0], name
    for name, versions in {"same_version": (0, 0, 0), "other_versions": (0, 4, 4)}.items():
        rows = [[v] * len(row) for v, row in zip(versions, rollout, strict=True)]
        whole = correct(make_rollout(rollout, rows), pad(trainer))
        assert_metrics(first[name][0], whole.metrics, 1.0)
        assert first[name][1][0] == whole.weights_BT[0].tolist()
        assert [row[:5] for row in whole.weights_BT[1:].tolist()] == second[name][1]
    whole = correct(make_rollout(rollout), pad(trainer), mode="mis")
    assert_metrics(first["mis"][0], whole.metrics, 1.0)
    alone = correct(make_rollout(rollout[:1]), pad(trainer[:1]))
    assert_metrics(first["rank_without_tokens"][0], alone.metrics, 1.0)

    assert "selects no token" in first["nothing"] and first["nothing"] == second["nothing"]
    assert "no finite number" in second["infinite"]
    assert "1 other ranks refused" in first["infinite"]
    assert "has shape (1, 2) against" in first["misshapen"]
    assert "1 other ranks refused" in second["misshapen"]
