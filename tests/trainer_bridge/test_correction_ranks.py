"""Two ranks with different numbers of tokens correct as one process with all of them does."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer_bridge import ranks
from tests.trainer_bridge.correction_oracle import mask_of, pad
from trainer_bridge.correction import CorrectionConfig, correct_logprobs
from trainer_bridge.rollouts.rollout import PAD_VERSION

REL = 1e-13  # float64 sums in another order; healthy below 1e-15
COLLECTIVE_TIMEOUT_S = 30.0
OPTIONS: dict[str, dict[str, Any]] = {
    "token": {"rollout_is_batch_normalize": True, "veto_threshold": 0.2},
    "sequence": {"rollout_is_batch_normalize": True, "rollout_rs": {"token_k1": 1.5}},
    "geometric": {"rollout_is_batch_normalize": True, "rollout_rs": {"seq_max_k2": 2.0}},
}


def of_rank(rank: int, folder: Path, cases: dict[str, Any]) -> None:
    """Write what this rank got of its rows of each case, or what was raised."""
    results: dict[str, Any] = {}
    for name, of_ranks in cases.items():
        case = of_ranks[rank]
        rows = case["rollout"]
        versions = pad(case["versions"], 77, torch.int64)
        given = pad(case["trainer"]), pad(rows), mask_of(rows)
        config = CorrectionConfig(case["level"], **case["options"])
        try:
            found = correct_logprobs(
                *given, config, versions_BT=versions, group=torch.distributed.group.WORLD
            )
        except ValueError as error:
            results[name] = str(error)
            continue
        alarms = [[a.metric, a.value, a.threshold, a.message] for a in found.alarms]
        weights, mask = found.weights_BT.tolist(), found.mask_BT.tolist()
        results[name] = [found.metrics, weights, mask, alarms]
    (folder / f"result{rank}.json").write_text(json.dumps(results))


def run_on_two_ranks(folder: Path, cases: dict[str, Any]) -> list[dict[str, Any]]:
    ranks.run(partial(of_rank, cases=cases), folder, 2, COLLECTIVE_TIMEOUT_S)
    return [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(2)]


def make_case(rollout: Any, trainer: Any, versions: Any, level: str = "token") -> dict[str, Any]:
    case = {"rollout": rollout, "trainer": trainer, "versions": versions, "level": level}
    return case | {"options": OPTIONS[level]}


def _long(spread: float, version: int) -> tuple[Any, Any, Any]:
    """Rollout, trainer and versions of 600 tokens."""
    noise = spread * torch.randn(600, generator=torch.Generator().manual_seed(2))
    return [[-6.0] * 600], [(noise - 6.0).tolist()], [[version] * 600]


@pytest.mark.timeout(ranks.JOIN_S + 30)
def test_two_ranks_get_the_numbers_of_one_batch(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    rollout = [(-5 - 3 * torch.rand(n, generator=generator)).tolist() for n in (40, 3, 0, 5)]
    noise = [torch.randn(len(row), generator=generator) for row in rollout]
    trainer = [(torch.tensor(r) + n).tolist() for r, n in zip(rollout, noise, strict=True)]
    ages = {"one version": (0, 0, 0, 0), "apart": (0, 4, 4, 4), "mixed": (2, 2, 9, 9)}
    versions = {
        name: [[v] * len(row) for v, row in zip(each, rollout, strict=True)]
        for name, each in ages.items()
    }
    cases: dict[str, Any] = {}
    for level in OPTIONS:
        for name, rows in versions.items():
            whole = (rollout, trainer, rows)
            cases[f"{level}, {name}"] = [  # T is 40 and 5, B 1 and 3, tokens 40 and 8
                make_case(*(part[:1] for part in whole), level),
                make_case(*(part[1:] for part in whole), level),
            ]
    good, nothing = make_case(rollout[:1], trainer[:1], [[0] * 40]), make_case([[]], [[]], [[]])
    cases |= {
        "rank without tokens": [good, nothing],
        "rank without rows": [good, make_case([], [], [])],
        "nothing": [nothing, nothing],
        "sick rank": [make_case(*_long(0.01, 3)), make_case(*_long(1.0, 2))],
        "infinite": [good, make_case([[-1.0]], [[-math.inf]], [[0]])],
        "positive": [good, make_case([[-1.0]], [[0.5]], [[0]])],
        "misshapen": [make_case([[-1.0]], [[-1.0, -2.0]], [[0]]), good],
    }
    first, second = run_on_two_ranks(tmp_path, cases)

    for level, options in OPTIONS.items():
        config = CorrectionConfig(level, **options)  # type: ignore[arg-type]
        for name, rows in versions.items():
            mine, other = first[f"{level}, {name}"], second[f"{level}, {name}"]
            assert mine[0] == other[0] and mine[3] == other[3], name
            versions_BT = pad(rows, PAD_VERSION, torch.int64)
            given = pad(trainer), pad(rollout), mask_of(rollout)
            whole = correct_logprobs(*given, config, versions_BT=versions_BT)
            assert mine[0].keys() == whole.metrics.keys()
            assert mine[0] == pytest.approx(whole.metrics, rel=REL, abs=REL)
            weights = [*mine[1], *(row + [0.0] * 35 for row in other[1])]
            torch.testing.assert_close(torch.tensor(weights), whole.weights_BT)
            kept = [*mine[2], *(row + [False] * 35 for row in other[2])]
            assert kept == whole.mask_BT.tolist()
            # Control: a rank alone normalises by another mean.
            alone = correct_logprobs(*(tensor[:1] for tensor in given), config)
            assert alone.metrics["weight_batch_mean"] != mine[0]["weight_batch_mean"]

    one = pad(trainer[:1]), pad(rollout[:1]), mask_of(rollout[:1])
    alone = correct_logprobs(*one, CorrectionConfig("token", **OPTIONS["token"]))
    for name in ("rank without tokens", "rank without rows"):
        assert first[name][0] == second[name][0] == pytest.approx(alone.metrics, rel=REL, abs=REL)
    alarms = first["sick rank"][3]
    assert alarms == second["sick rank"][3]
    fired = {metric for metric, *_ in alarms}
    assert {"mismatch_kl_k3", "version_2/mismatch_kl_k3"} <= fired
    assert not any(metric.startswith("version_3/") for metric in fired)
    # Control: the first rank alone has none.
    trainer, rollout, _ = (pad(part) for part in _long(0.01, 3))
    assert not correct_logprobs(trainer, rollout, torch.ones_like(trainer).bool()).alarms
    for case, said in (
        ("nothing", "selects no token"),
        ("infinite", "NaN or infinite"),
        ("positive", "trainer logprob is 0.5"),
    ):
        assert said in first[case] and first[case] == second[case]
    assert "trainer_logprobs_BT has shape (1, 2)" in first["misshapen"]
    assert "1 other ranks refused" in second["misshapen"]
