"""Two ranks with different numbers of tokens correct as one process with all of them does."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer_bridge import ranks
from tests.trainer_bridge.correction_oracle import mask_of, pad
from tests.trainer_bridge.test_fsdp import failure, gathered, run
from trainer_bridge.correction import Correction, CorrectionConfig, correct_logprobs

REL = 1e-13  # float64 sums in another order; healthy below 1e-15
TOKEN: Any = {"rollout_is_batch_normalize": True, "veto_threshold": 0.2}
CONFIGS = (
    CorrectionConfig("token", **TOKEN),
    CorrectionConfig("sequence", rollout_is_batch_normalize=True, rollout_rs={"token_k1": 1.5}),
    CorrectionConfig("geometric", rollout_is_batch_normalize=True, rollout_rs={"seq_max_k2": 2.0}),
)
VERSIONS = (0, 0, 0, 0), (0, 4, 4, 4), (2, 2, 9, 9)  # one, apart on the ranks, mixed
Case = tuple[Any, Any, Any]
"""Trainer, rollout and versions, by row."""


def corrected(case: Case, config: CorrectionConfig = CONFIGS[0], **options: Any) -> Correction:
    trainer, rollout, versions = case
    versions_BT = pad(versions, 77, torch.int64)
    given = pad(trainer), pad(rollout), mask_of(rollout)
    return correct_logprobs(*given, config, versions_BT=versions_BT, **options)


def short(versions: tuple[int, ...]) -> Case:
    generator = torch.Generator().manual_seed(1)
    rollout = [-5 - 3 * torch.rand(n, generator=generator) for n in (40, 3, 0, 5)]
    trainer = [row + torch.randn(len(row), generator=generator) for row in rollout]
    ages = [[version] * len(row) for version, row in zip(versions, rollout, strict=True)]
    return [row.tolist() for row in trainer], [row.tolist() for row in rollout], ages


def long(spread: float, version: int) -> Case:
    """600 tokens."""
    noise = spread * torch.randn(600, generator=torch.Generator().manual_seed(2))
    return [(noise - 6.0).tolist()], [[-6.0] * 600], [[version] * 600]


def of_rank(rank: int, folder: Path) -> None:
    everyone: dict[str, Any] = {}  # as by default
    mine = slice(1, 4) if rank else slice(0, 1)  # T is 40 and 5, B 1 and 3, tokens 40 and 8
    for config in CONFIGS:
        for versions in VERSIONS:
            case = short(versions)
            whole = corrected(case, config, group="local")
            trainer, *rest = (part[mine] for part in case)
            found = corrected((trainer, *rest), config, **everyone)
            said = gathered((found.metrics, found.alarms))
            assert said[0] == said[1]
            assert found.metrics.keys() == whole.metrics.keys()
            assert found.metrics == pytest.approx(whole.metrics, rel=REL, abs=REL)
            width = found.mask_BT.shape[1]
            torch.testing.assert_close(found.weights_BT, whole.weights_BT[mine, :width])
            assert torch.equal(found.mask_BT, whole.mask_BT[mine, :width])
            # the control: a rank alone normalises by another mean
            alone = corrected((trainer, *rest), config, group="local").metrics["weight_batch_mean"]
            assert alone != found.metrics["weight_batch_mean"]

    good = [[-5.5, -4.0]], [[-5.0, -4.5]], [[0, 0]]
    nothing = [[]], [[]], [[]]
    for none in (nothing, ([], [], [])):  # without tokens, and without rows
        found = corrected(none if rank else good, **everyone)
        assert gathered(found.metrics) == [found.metrics] * 2
        wanted = corrected(good, group="local").metrics
        assert found.metrics == pytest.approx(wanted, rel=REL, abs=REL)

    sick = corrected(long(1.0, 2) if rank else long(0.01, 3), **everyone).alarms
    assert gathered(sick) == [sick] * 2
    fired = {alarm.metric for alarm in sick}
    assert {"mismatch_kl_k3", "version_2/mismatch_kl_k3"} <= fired
    assert not any(metric.startswith("version_3/") for metric in fired)
    # the control: the first rank alone has none
    assert not corrected(long(0.01, 3), CorrectionConfig(), group="local").alarms

    for first, second, why in (
        (nothing, nothing, "selects no token"),
        (good, ([[-math.inf]], [[-1.0]], [[0]]), "NaN or infinite"),
        (good, ([[0.5]], [[-1.0]], [[0]]), "trainer logprob is 0.5"),
    ):
        bad = second if rank else first
        assert why in failure(lambda bad=bad: corrected(bad, **everyone))[1]
    why = "1 other ranks refused" if rank else r"trainer_logprobs_BT has shape \(1, 2\)"
    with pytest.raises(ValueError, match=why):
        corrected(good if rank else ([[-1.0, -2.0]], [[-1.0]], [[0]]), **everyone)


@pytest.mark.timeout(ranks.JOIN_S + 30)
def test_two_ranks_get_the_numbers_of_one_batch(tmp_path: Path) -> None:
    run(of_rank, tmp_path)
