"""Mismatch metrics against NumPy loops that share no code with them, and the worst tokens."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer_bridge import correction_oracle as oracle
from tests.trainer_bridge.calls import before
from tests.trainer_bridge.correction_oracle import Rows, batches, log_ratios, mask_of, pad
from trainer_bridge import mismatch_metrics
from trainer_bridge.correction import CorrectionConfig, correct_logprobs
from trainer_bridge.correction.config import REJECTIONS
from trainer_bridge.metrics import groups
from trainer_bridge.metrics.groups import MOST_VERSIONS, POSITIONS
from trainer_bridge.metrics.mismatch import Reducer

RELATIVE_ERROR = math.expm1(1 / (2 * groups.DENSITY))  # half a bin
REL = 1e-13  # float64 sums in another order; healthy below 1e-15
PERCENTS = {"ratio_p01": 1, "ratio_p50": 50, "ratio_p99": 99}


def assert_metrics(
    actual: dict[str, float], expected: dict[str, float], x: list[float], scale: float
) -> None:
    """Equal to rounding; ``scale`` is the size of the terms whose sum may cancel."""
    assert actual.keys() == expected.keys() | PERCENTS.keys()
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, rel=REL, abs=REL * scale), name
    for name, percent in PERCENTS.items():
        true, found = oracle.percentile(x, percent), math.log(actual[name])
        bound = RELATIVE_ERROR * (abs(true) + groups.LINEAR)
        assert abs(found - true) <= 1.002 * bound, name  # the bin is found in float32


def flat(trainer: Rows, rollout: Rows) -> list[float]:
    return [float(value) for row in log_ratios(trainer, rollout) for value in row]


def whole(found: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if "/" not in name}


def under(prefix: str, found: dict[str, float]) -> dict[str, float]:
    return {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}


@given(batches())
@settings(max_examples=200, deadline=None)
def test_metrics_agree_with_the_oracle(batch: tuple[Rows, Rows]) -> None:
    trainer, rollout = batch
    actual = mismatch_metrics(pad(trainer), pad(rollout), mask_of(rollout))
    x = flat(trainer, rollout)
    assert_metrics(whole(actual), oracle.metrics(trainer, rollout), x, max(60.0, *map(abs, x)))


def long_batch(lengths: tuple[int, ...], spread: float) -> tuple[Rows, Rows]:
    generator = torch.Generator().manual_seed(0)
    rollout = [(-5 * spread - torch.rand(n, generator=generator) * 4).tolist() for n in lengths]
    noise = [(spread * torch.randn(n, generator=generator)).tolist() for n in lengths]
    pairs = zip(rollout, noise, strict=True)
    return [[r + n for r, n in zip(*pair, strict=True)] for pair in pairs], rollout


@pytest.mark.parametrize("spread", [1e-5, 0.02, 1.0])
def test_long_sequences_and_their_positions(spread: float) -> None:
    trainer, rollout = long_batch((32768, 1, 20000, 0, 300), spread)
    actual = mismatch_metrics(pad(trainer), pad(rollout), mask_of(rollout))
    x = flat(trainer, rollout)
    assert_metrics(whole(actual), oracle.metrics(trainer, rollout), x, 1.0)
    rows = log_ratios(trainer, rollout)
    for start, end in zip(POSITIONS, (*POSITIONS[1:], 32768), strict=True):
        inside = [float(value) for row in rows for value in row[start:end]]
        sampled = [float(value) for row in oracle.float32(rollout) for value in row[start:end]]
        part = under(f"position_{start}/", actual)
        assert_metrics(part, oracle.token_metrics(inside, sampled), inside, 1.0)


def test_estimators_give_the_exact_divergences_of_known_distributions() -> None:
    """Each token as often as the rollout samples it: a mean over tokens is the expectation."""
    rollout_p, trainer_p = [1 / 2, 1 / 4, 1 / 8, 1 / 8], [1 / 16, 1 / 4, 3 / 16, 1 / 2]
    row = [0, 0, 0, 0, 1, 1, 2, 3]
    rollout = torch.tensor([[math.log(rollout_p[i]) for i in row]], dtype=torch.float64)
    trainer = torch.tensor([[math.log(trainer_p[i]) for i in row]], dtype=torch.float64)
    found = mismatch_metrics(trainer, rollout, torch.ones(1, 8, dtype=torch.bool))
    pairs = list(zip(rollout_p, trainer_p, strict=True))
    kl = sum(p * math.log(p / q) for p, q in pairs)
    reverse_kl = sum(q * math.log(q / p) for p, q in pairs)
    assert found["mismatch_kl_k1"] == pytest.approx(kl, rel=REL)
    assert found["mismatch_kl_k3"] == pytest.approx(kl, rel=REL)
    assert found["ratio_mean"] == pytest.approx(1.0, rel=REL)
    chi2 = sum(q * q / p for p, q in pairs) - 1
    assert found["chi2_token"] == pytest.approx(chi2, rel=REL)
    assert found["ess"] == pytest.approx(1 / (1 + chi2), rel=REL)
    assert abs(kl - reverse_kl) > 0.01  # the direction is told apart


@given(batches(), st.sampled_from([math.nan, -math.inf, math.inf, 1e30]))
@settings(max_examples=50, deadline=None)
def test_positions_outside_the_mask_never_matter(batch: tuple[Rows, Rows], fill: float) -> None:
    trainer, rollout = batch
    mask_BT = mask_of(rollout)
    clean = mismatch_metrics(pad(trainer), pad(rollout), mask_BT)
    assert mismatch_metrics(pad(trainer, fill), pad(rollout, -fill), mask_BT) == clean


def test_policy_versions_are_reported_apart() -> None:
    rollout, trainer = [[-1.0, -2.0, -3.0], [-0.5, -0.25]], [[-1.5, -2.0, -2.0], [-0.25, -4.0]]
    given_ = pad(trainer), pad(rollout), mask_of(rollout)
    x, sampled = log_ratios(trainer, rollout), oracle.float32(rollout)
    results = []
    # (1, 2) is padding, whatever it says
    for rows in ([[-1, -1, 3], [3, 3, -1]], [[-1, -1, 3], [3, 3, 9]], [[-1] * 3, [3, 3, 9]]):
        found = mismatch_metrics(*given_, versions_BT=torch.tensor(rows))
        results.append(found)
        for version in (-1, 3):
            places = [(r, c) for r in range(2) for c in range(len(x[r])) if rows[r][c] == version]
            part, rolled = ([float(each[r][c]) for r, c in places] for each in (x, sampled))
            expected = oracle.token_metrics(part, rolled)
            assert_metrics(under(f"version_{version}/", found), expected, part, 1.0)
    first, other_padding, _ = results
    assert first == other_padding
    one = mismatch_metrics(*given_, versions_BT=torch.full((2, 3), 5))
    assert one == mismatch_metrics(*given_) and one.items() <= first.items()


def test_only_the_newest_versions_are_reported() -> None:
    count = MOST_VERSIONS + 4
    zeros, mask = torch.zeros(1, count), torch.ones(1, count, dtype=torch.bool)
    found = mismatch_metrics(zeros, zeros - 1, mask, versions_BT=torch.arange(count)[None])
    shown = {name.split("/")[0] for name in found if name.startswith("version_")}
    assert shown == {f"version_{v}" for v in range(4, count)}
    assert found["tokens"] == count


def test_unusable_inputs_are_refused() -> None:
    zeros, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    for broken in (-math.inf, math.inf, math.nan):
        for pair in ((zeros, torch.tensor([[-1.0, broken]])), (torch.full((1, 2), broken), zeros)):
            with pytest.raises(ValueError, match=r"1 sequences .*finite"):
                mismatch_metrics(*pair, mask)
    with pytest.raises(ValueError, match=r"1 sequences .*finite"):  # inf - inf
        mismatch_metrics(zeros + math.inf, zeros + math.inf, mask)
    with pytest.raises(ValueError, match=r"mask_BT.*float32.*bool"):
        mismatch_metrics(zeros, zeros, mask.float())
    with pytest.raises(ValueError, match="'mask_BT': 'meta'"):
        mismatch_metrics(zeros, zeros, mask.to("meta"))
    for empty in ((1, 2), (2, 0), (0, 4), (0, 0)):
        nothing = torch.zeros(empty)
        with pytest.raises(ValueError, match="mask_BT"):
            mismatch_metrics(nothing, nothing, nothing.bool())


# -- names, and when they are read from the GPU

DOCS = Path(__file__).parents[2] / "docs" / "correction.md"
FIRST = "| here | verl | slime | NeMo-RL | prime-rl | TRL |"


def _names() -> dict[str, dict[str, str]]:
    """Ours, then framework -> theirs, as the table of the docs has them; <option> is a rejection
    such as seq_mean_k3."""
    table = DOCS.read_text().rpartition(FIRST)[2].partition("\n\n")[0].splitlines()[2:]
    rows = ([cell.strip().strip("`") for cell in line.split("|")[1:-1]] for line in table)
    frameworks = FIRST.strip("| ").split(" | ")[1:]
    return {
        ours: {name: cell for name, cell in zip(frameworks, theirs, strict=True) if cell}
        for ours, *theirs in rows
    }


NAMES = _names()
EVERYTHING = CorrectionConfig(
    rollout_is_batch_normalize=True, rollout_rs=dict.fromkeys(REJECTIONS, 1.5), veto_threshold=0.5
)


def some_metrics(versions: bool = True) -> dict[str, float]:
    trainer_BT, mask_BT = torch.linspace(-1, 0, 40).view(2, 20), torch.ones(2, 20).bool()
    versions_BT = torch.tensor([[4], [7]]).expand(2, 20) if versions else None
    given = trainer_BT, trainer_BT.flip(1), mask_BT, EVERYTHING
    return correct_logprobs(*given, versions_BT=versions_BT).metrics


def test_every_name_in_the_table_of_the_docs_is_computed() -> None:
    shown = {name.replace("<option>", "seq_mean_k3") for name in NAMES}
    assert len(shown) > 20 and shown <= some_metrics().keys()


class WaitsForTheDevice(TorchDispatchMode):
    """Notes operations whose result the host must read before it goes on."""

    waits = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if any(wait in name for wait in self.waits):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_the_host_reads_nothing_before_all_is_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wait for the GPU a batch: what the last copy to the host is."""
    with WaitsForTheDevice() as mode:
        before_reduce: list[list[str]] = []
        before(monkeypatch, Reducer, "reduce", lambda *_: before_reduce.append([*mode.seen]))
        some_metrics(versions=False)
        assert before_reduce == [[]]
        some_metrics(versions=True)
        assert before_reduce[1]  # control: which versions there are is asked before
