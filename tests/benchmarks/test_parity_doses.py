"""What a controller asks for, and what results of doses say."""

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks.parity import dose_points, dose_tables, dose_verdict, long_tables, summary
from benchmarks.parity.comparison import powers
from benchmarks.parity.controlled import BUDGET_KL, PATIENCE, Controlled
from benchmarks.parity.dose_arms import DOSE_ARMS
from benchmarks.parity.run_log import Row, rows_of

STEPS = 40
START = 0.2
FORMATS = {
    "model.layers.0.self_attn.o_proj": "block-fp8",
    "model.layers.0.self_attn.qkv_proj": "block-fp8",
    "model.layers.0.mlp.gate_up_proj": "block-fp8",
    "lm_head": "bf16",
}
# a healthy ESS: no correction is asked for, only precision
FAR = {"mismatch_kl_k3": 2 * BUDGET_KL, "ess": 1.0, "weight_ess": 1.0, "ratio_mean": 1.0}
FAR |= {"weight_mean": 1.0, "ratio_max": 1.0, "tokens": 10000.0}


def test_a_controller_asks_for_kv_then_for_the_planted_layers() -> None:
    arm = DOSE_ARMS["grows-controlled"]
    control = Controlled(arm, {})
    control.started(FORMATS)
    asked = []
    for _ in range(3):
        reasons = [reason for _ in range(PATIENCE) for reason in control.observe(FAR)]
        asked.append((control.must_restart, control.engine, control.ignored_layers, len(reasons)))
        again = Controlled(arm, json.loads(json.dumps(control.state())))
        assert (again.engine, again.ignored_layers) == (control.engine, control.ignored_layers)
        assert again.config == control.config
        control.started(FORMATS)
        assert not control.must_restart
    planted_first = " ".join([*list(FORMATS)[1:3], next(iter(FORMATS))])
    assert asked == [
        (True, {}, "", 1),
        (True, {}, planted_first, 1),
        (False, {}, planted_first, 1),  # nothing is left to ask for
    ]


def test_a_tightened_correction_outlives_a_restart() -> None:
    arm = DOSE_ARMS["grows-controlled"]
    control = Controlled(arm, {})
    control.started(FORMATS)
    tail = FAR | {"mismatch_kl_k3": 0.0, "ess": 0.9, "weight_ess": 0.9, "ratio_max": 50.0}
    tail |= {"weight_mean": 0.5}
    for _ in range(PATIENCE):
        control.observe(tail)
    assert control.config.rollout_is_threshold == (0.5, 2.0)
    again = Controlled(arm, json.loads(json.dumps(control.state())))
    assert again.config == control.config


# ---- what results say ----------------------------------------------------------------------------


def a_run(arm: str, seed: int, reward: float, execution: str = "2026-01-01", **more: Any) -> Row:
    series = {"reward": [0.5] * STEPS, "mismatch_kl_k3": [0.05] * STEPS}
    run = {"kind": "run", "arm": arm, "seed": seed, "start": seed // 2, "execution": execution}
    run |= {"held_out": {"reward": reward}, "evaluations": [[0, START], [STEPS, reward]]}
    run |= {
        "last_reward": fmean(series["reward"]),
        "series": series,
        "alarms": {},
        "alarm_steps": 0,
        "steps": STEPS,
        "decisions": [],
    }
    return run | more


def a_study(arms: dict[str, list[float]], execution: str = "2026-01-01") -> list[Row]:
    options = {"steps": STEPS, "prompts": 16, "group": 8, "levels": [2, 3], "study": "doses"}
    facts = {"device": "A GPU", "versions": {"sglang": "0.5.17"}, "commit": "abc1234"}
    facts |= {"options": options, "date": execution, "parameters": {"dense": 1}}
    held_out = {"held_out": {"reward": START}, "model": "dense", "execution": execution}
    scan = {"kind": "scan", "model": "dense", "execution": execution, "every": 1}
    gains = [(start, exponent) for start in (0, 1) for exponent in (0, 12, 14, 15, 17)]
    return [
        {"kind": "environment", "execution": execution, **facts},
        *({"kind": "start", "start": start, **held_out} for start in (0, 1)),
        *(
            scan | {"start": start, "exponent": n, "mismatch_kl_k3": 10.0 ** (n / 2 - 9)}
            for start, n in gains
        ),
        *(
            a_run(arm, s, r, execution)
            for arm, all_of in arms.items()
            for s, r in enumerate(all_of)
        ),
    ]


ARMS = {
    "bf16": [0.60, 0.61, 0.59, 0.60],
    "5e-2-none": [0.40, 0.42, 0.38, 0.41],
    "5e-2-tis": [0.59, 0.61, 0.58, 0.60],
    "5e-2-mis": [0.60, 0.40, 0.62, 0.45],
}


def test_an_arm_is_judged_by_what_its_reference_learned() -> None:
    found = dose_verdict.verdicts(a_study(ARMS))
    assert {arm: verdict.found for arm, verdict in found.items()} == {
        "5e-2-none": "worse",
        "5e-2-tis": "same",
        "5e-2-mis": "undecided",
    }
    assert found["5e-2-none"].margin == pytest.approx(0.2 * (0.6 - START))
    assert found["5e-2-none"].loss == pytest.approx((0.6 - 0.4025) / 0.4)
    # a reference that has learned nothing, or a single pair, decides nothing
    flat = a_study(ARMS | {"bf16": [START] * 4})
    single = a_study({arm: rewards[:1] for arm, rewards in ARMS.items()})
    for rows in (flat, single):
        assert {v.found for v in dose_verdict.verdicts(rows).values()} == {"undecided"}
    assert dose_verdict.verdicts(flat)["5e-2-none"].loss is None
    assert "| 5e-2-none | 4 | 4 |" in dose_tables.response(flat)


def test_a_pair_counts_where_its_start_was_evaluated() -> None:
    """A machine's end may have cut that evaluation off; the tables are made all the same."""
    rows = a_study(ARMS)
    rows.remove(next(row for row in rows if row["kind"] == "start" and row["start"] == 1))
    found = dose_verdict.verdicts(rows)["5e-2-none"]
    assert found.comparison.differences == pytest.approx((-0.2, -0.19))
    none = [row for row in rows if row["kind"] != "start"]
    assert not dose_verdict.verdicts(none)
    for table in (dose_tables.response, dose_tables.alarms):
        assert "| 5e-2-none |" in table(none)


def test_pairs_are_of_one_execution() -> None:
    here = a_study({"bf16": [0.6, 0.6], "5e-2-tis": [0.5]}, "2026-01-01")
    there = a_study({"bf16": [0.8, 0.8], "5e-2-tis": [0.7, 0.7]}, "2026-01-02")
    differences = dose_verdict.verdicts(here + there)["5e-2-tis"].comparison.differences
    assert differences == pytest.approx((-0.1,) * 3)


def test_seeds_settle_a_prediction_and_not_how_often_they_ran() -> None:
    twice = {arm: rewards[:2] for arm, rewards in ARMS.items()}
    rows = a_study(twice, "2026-01-01") + a_study(twice, "2026-01-02")
    for row in rows:
        if row["kind"] == "run":
            row["start"] = row["seed"]  # two starts, as a prediction needs
    verdict = dose_verdict.verdicts(rows)["5e-2-none"]
    assert len(verdict.comparison.differences) == 4 and not verdict.is_settled
    assert dose_verdict.verdicts(a_study(ARMS))["5e-2-none"].is_settled
    again = a_study(ADDED, "2026-01-01") + a_study(ADDED, "2026-01-02")
    again = [row for row in again if row.get("seed") not in (0, 3)]
    assert {point.agrees(again) for point in dose_points.points(again)} == {""}


def test_runs_without_an_evaluation_are_named() -> None:
    rows = a_study({arm: rewards[:1] for arm, rewards in ARMS.items()})
    stopped = a_run("5e-2-none", 1, 0.0) | {"kind": "unevaluated", "steps": 33}
    of_it = {"execution": "2026-01-01"}
    failures = ("bf16-1", "bf16-1", "5e-2-none-0")
    rows += [stopped, *({"kind": "failed", "job": j, "status": -9, **of_it} for j in failures)]
    note = dose_tables.response(rows)
    assert "Not evaluated: 5e-2-none-1 (33 of 40 steps)." in note
    assert "Failed jobs: bf16-1 (status -9), 5e-2-none-0 (status -9, then done)." in note
    assert "Failed jobs: none." in dose_tables.response(a_study(ARMS))


def test_an_alarm_has_to_come_before_the_fall() -> None:
    rows = a_study(ARMS)
    falling = {"reward": [0.5] * 20 + [0.2] * 20, "mismatch_kl_k3": [0.05] * STEPS}
    for run in rows:
        if run.get("arm") == "5e-2-none":
            at = 20 if run["seed"] else 21
            run |= {"series": falling, "alarms": {"ess": {"first_step": at}}, "alarm_steps": 1}
    reference = dose_verdict.runs_of(rows, "bf16")
    run = dose_verdict.runs_of(rows, "5e-2-none")[("2026-01-01", 1)]
    # the mean of steps 13 to 22 is the first that is lower, and step 20 is what makes it so
    assert dose_verdict.falls_at(run, reference[("2026-01-01", 1)], 0.08) == 20
    assert dose_verdict.falls_at(run, reference[("2026-01-01", 1)], 0.4) is None

    def line() -> list[str]:
        lines = dose_tables.alarms(rows).splitlines()
        (found,) = [row for row in lines if row.startswith("| 5e-2-none ")]
        return [cell.strip() for cell in found.split("|")]

    assert line()[3:7] == ["21, 20, 20, 20", "20, 20, 20, 20", "yes", "no"]
    for row in rows:
        if row.get("arm") == "5e-2-none":
            row["alarms"] = {"ess": {"first_step": 3}}
    assert line()[-2] == "yes"
    # what has nothing to be compared with is not said to have never fallen
    rows.remove(reference[("2026-01-01", 3)])
    assert line()[4] == "20, 20, 20, -"
    rows = [row for row in rows if row["kind"] != "start"]
    assert line()[4:] == ["-, -, -, -", "yes", "", ""]


def test_the_tables_say_what_was_predicted_and_found() -> None:
    rows = a_study(ARMS)
    rows.append(
        a_run("grows-controlled", 0, 0.5) | {"decisions": [[24, "use --some-layers 'a b c'"]]}
    )
    lines = {line.split(" | ")[0]: line for line in dose_tables.response(rows).splitlines()}
    assert lines["| 5e-2-none"].endswith("| worse | worse | yes |")
    assert lines["| 5e-2-mis"].endswith("| same | undecided |  |")
    two = a_study({arm: of[:2] for arm, of in ARMS.items()})
    assert "| worse | worse |  |" in dose_tables.response(two)  # two pairs settle nothing
    assert "2^14 in each group, 1.0e-02" in dose_tables.scans(rows)
    assert dose_tables.decisions(rows).endswith(
        "| 2026-01-01 | 0 | 24 | use --some-layers [3 layers] |"
    )


@pytest.mark.parametrize(
    ("k3", "verdict"), [(0.16, "open"), (0.14, "yes"), (0.017, "yes"), (0.016, "open")]
)
def test_what_was_predicted_of_a_dose_stays_open_where_it_is_another_one(
    k3: float, verdict: str
) -> None:
    rows = a_study(ARMS | {"kv8-none": ARMS["bf16"]})
    rows = [row for row in rows if row.get("exponent") not in (15, 17) or row["start"] == 0]
    scan = next(row for row in rows if row.get("exponent") == 14 and row["start"] == 1)
    rows += [scan | {"exponent": 15, "mismatch_kl_k3": k3}]  # of the second start alone
    for row in rows:
        if row.get("arm") == "5e-2-none":
            row["alarm_steps"] = 1

    def last_cells(table: str, at: int) -> dict[str, str]:
        lines = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
        return {line[0][2:]: line[at].rstrip(" |") for line in lines}

    found = last_cells(dose_tables.response(rows), -1)
    assert (found["5e-2-none"], found["kv8-none"]) == (verdict, "yes")
    found = last_cells(dose_tables.alarms(rows), -2)
    assert (found["5e-2-none"], found["kv8-none"]) == (verdict, "yes")


def test_power_is_of_the_pairs_that_arms_have() -> None:
    rows = a_study(ARMS | {"3e-3-none": [0.50, 0.56]})
    note = dose_tables.response(rows)
    margin = 0.2 * (0.6 - START)
    for pairs, arms in ((4, 3), (2, 1)):
        found = re.search(rf"With {pairs} pairs \((\d) arms\) .*? by ([0-9.]+), .*? (\d+)%", note)
        assert found is not None
        count, spread, worse = found.groups()
        assert int(count) == arms
        expected, _ = powers(float(spread), pairs, margin, 0.1)
        assert int(worse) == pytest.approx(100 * expected, abs=3)  # of a spread that is rounded


ADDED = {
    "bf16": [0.60] * 4,
    "5e-2-none": [0.60, 0.60, 0.40, 0.42],  # it has lost 0.19 in seeds 2 and 3
    "5e-2-fp8-trainer": [0.10, 0.10, 0.50, 0.52],  # 0.09
    "5e-2-fp8-forward": [0.64, 0.64, 0.44, 0.46],
    "5e-2-tis": [0.40] * 4,
    "5e-2-mis": [0.40] * 4,
    "1e-2-none": [0.50] * 4,
    "1e-2-tis": [0.40, 0.40, 0.51, 0.52],
}
OWN = {"5e-2-none": 0.6, "5e-2-tis": 0.5, "5e-2-mis": 0.5}
"""Reward in the arm's own engine, over its held-out reward."""


def agree(arms: dict[str, list[float]], own: dict[str, list[float]] | None = None) -> str:
    """The first letter of the verdict on each point that was added, a dash for none."""
    rows = a_study(ADDED | arms)
    for run in rows:
        if (name := run.get("arm")) in OWN:
            shares = (own or {}).get(name, [OWN[name]] * 4)
            run["last_reward"] = shares[run["seed"]] * run["held_out"]["reward"]
    _, *points = dose_points.points(rows)
    return "".join((point.agrees(rows) or "-")[0] for point in points)


def test_points_are_decided_by_the_seeds_that_they_were_written_for() -> None:
    assert agree({}) == "yyyyyy"
    # 1: at most half, of the same seeds; seeds 0 and 1 are not asked
    assert agree({"5e-2-fp8-trainer": [0.60, 0.60, 0.50, 0.50]})[0] == "n"
    assert agree({"5e-2-none": [0.30, 0.30, 0.60, 0.61]})[0] == "o"  # the other arm loses nothing
    # 2: the mean of all four, on both sides
    for more, verdict in ((0.06, "n"), (-0.06, "n"), (-0.04, "y")):
        forward = [reward + more for reward in ADDED["5e-2-none"]]
        assert agree({"5e-2-fp8-forward": forward})[1] == verdict
    forward = ADDED["5e-2-fp8-forward"]
    assert agree({"5e-2-fp8-forward": [0.10, *forward[1:]]})[1] == "n"
    # 3: each arm in each seed
    assert agree({}, {"5e-2-none": [0.1, 0.1, 0.56, 0.54]}) == "yynyyy"
    assert agree({}, {"5e-2-tis": [0.9, 0.9, 0.54, 0.56]}) == "yyynyy"
    assert agree({}, {"5e-2-mis": [0.9, 0.9, 0.54, 0.54]}) == "yyyyyy"
    # 4: each seed
    assert agree({"1e-2-tis": [0.60, 0.60, 0.60, 0.49]})[5] == "n"


def test_a_point_waits_for_its_seeds_and_for_its_dose() -> None:
    assert agree({arm: rewards[:2] for arm, rewards in ADDED.items()}) == "-" * 6
    assert agree({arm: rewards[:3] for arm, rewards in ADDED.items()}) == "-" * 6
    assert agree({"5e-2-none": ADDED["5e-2-none"][:3]}) == "---yyy"
    table = dose_tables.added(a_study({arm: rewards[:2] for arm, rewards in ADDED.items()}))
    later = [line for line in table.splitlines() if re.match(r"\| [134]:", line)]
    assert len(later) == 5 and all(line.endswith("| 0 |  |  |") for line in later)
    rows = a_study(ADDED)
    for row in rows:
        if row.get("exponent") == 15 and row["start"] == 1:
            row["mismatch_kl_k3"] = 1e-3  # 5e-2 is then a dose of 1e-2 or 0.3
    found = [point.agrees(rows) for point in dose_points.points(rows)]
    assert found[:6] == ["open"] * 6 and found[6] == "yes"


@pytest.mark.parametrize(("part", "verdict"), [(0.33, "yes"), (0.34, "no")])
def test_k3_of_fp8_forward_is_compared_in_each_seed(part: float, verdict: str) -> None:
    rows = a_study({"5e-2-none": [0.4] * 4, "5e-2-fp8-forward": [0.4] * 4})
    for run in rows:
        if run.get("arm") == "5e-2-fp8-forward":
            share = part if run["seed"] == 2 else 0.1
            run["series"]["mismatch_kl_k3"] = [share * 0.05] * (STEPS - 1) + [9.0]
    point = next(dose_points.points(rows))
    assert (point.agrees(rows), point.found) == (verdict, f"10%, 10%, {part:.0%}, 10%")


def test_a_mitigation_is_compared_with_the_same_dose_uncorrected() -> None:
    rows = a_study(ARMS | {"kv8-tis": [0.5], "stale-1e-2-none": [0.4], "stale-1e-2-tis": [0.3]})
    for run in rows:
        if run.get("arm") == "5e-2-tis":
            run["last_reward"] = 0.1
    found = dose_verdict.mitigated(rows)
    assert list(found) == ["5e-2-tis", "5e-2-mis", "stale-1e-2-tis"]  # nothing is beside kv8-tis
    bf16, own = found["5e-2-tis"]
    assert bf16.differences == pytest.approx((0.19, 0.19, 0.20, 0.19))
    assert own.mean == pytest.approx(0.1 - 0.5)
    table = dose_tables.mitigations(rows)
    assert "| stale-1e-2-tis | 1 | -0.100 | +0.000 |" in table


def cells_of(table: str) -> dict[str, list[str]]:
    """By arm, from its name on."""
    lines = [line.split(" | ")[1:] for line in table.splitlines()]
    return {line[0]: line for line in lines if line}


def test_long_responses_are_judged_by_the_rule_of_their_page() -> None:
    def found(bf16: float, kv8: float) -> tuple[list[str], str]:
        rows = a_study({"bf16": [bf16], "kv8-none": [kv8]})
        for row in rows:
            if row["kind"] == "run":
                row["held_out"]["by_kind"] = {"sort 3": 0.9, "sort 4": 0.4, "total 4": 0.2}
                k3 = {f"position_{n}/mismatch_kl_k3": [float(n)] for n in (16, 256)}
                row["series"] |= k3 | {"response_tokens": [300.0]}
            row.get("options", {})["held_out_problems"] = 64
        table = long_tables.responses(rows)
        return cells_of(table)["kv8-none"][2:6], table

    assert found(0.6, 0.5)[0] == ["0.500", "0.300", "25%", "lost"]
    assert found(0.6, 0.55)[0][2:] == ["12%", "not lost"]
    cells, table = found(0.4, 0.1)  # the reference has learned too little
    assert cells[2:] == ["150%", ""] and "above: inconclusive" in table
    assert "above: conclusive" in found(0.6, 0.1)[1]
    assert found(START, 0.1)[0][2:] == ["", ""]  # there is nothing to lose


def test_a_collapse_to_short_responses_has_its_row() -> None:
    """Also where the reference's evaluation, and with it the start's, was cut off."""
    rows = [row for row in a_study({"kv8-none": [0.1]}) if row["kind"] != "start"]
    for row in rows:
        if row["kind"] == "run":
            row["held_out"]["by_kind"] = {"sort 4": 0.1}
            row["series"]["response_tokens"] = [9.0]
        row.get("options", {})["held_out_problems"] = 64
    table = long_tables.responses(rows)
    assert cells_of(table)["kv8-none"][2:6] == ["0.100", "0.100", "", ""]
    assert "The start was not evaluated" in table and "above: no reference" in table


def test_a_run_that_was_stopped_is_compared_at_the_steps_that_it_did() -> None:
    rows = a_study({"bf16": [0.6], "kv8-none": [0.6]})
    for row in rows:
        if row["kind"] == "run":
            row["held_out"]["by_kind"] = {"sort 4": 0.1}
            done = STEPS if row["arm"] == "bf16" else 30
            rewards = [0.01 * step - 0.1 * (row["arm"] != "bf16") for step in range(done)]
            row["series"] = {name: [1e-3] * done for name in ("mismatch_kl_k3", "response_tokens")}
            row["series"]["reward"] = rewards
            if done < STEPS:
                row |= {"kind": "unevaluated", "steps": done}
                del row["held_out"]
        row.get("options", {})["held_out_problems"] = 64
    table = long_tables.responses(rows)
    cells = cells_of(table)
    assert cells["kv8-none"][1:6] == ["30", "", "", "", ""]
    assert cells["kv8-none"][7] == "-0.100"
    assert cells["bf16"][1:3] == ["40", "0.600"] and cells["bf16"][7] == ""
    # and where it is the reference that was stopped
    swapped = {"bf16": "kv8-none", "kv8-none": "bf16"}
    table = long_tables.responses(
        [row | {"arm": swapped[row["arm"]]} if "arm" in row else row for row in rows]
    )
    cells = cells_of(table)
    assert cells["kv8-none"][1:6] == ["40", "0.600", "0.100", "", ""]
    assert cells["kv8-none"][7] == "+0.100"


def test_executions_are_added_to_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "results.jsonl"
    made: list[Row] = []
    monkeypatch.setattr(summary, "summarize", lambda state: made)
    for execution, reward in (("a", 0.1), ("b", 0.2), ("a", 0.3)):
        made = a_study({"bf16": [reward]}, execution)
        summary.main([str(tmp_path), "--output", str(output)])
    runs = [row for row in rows_of(output) if row["kind"] == "run"]
    assert {row["execution"]: row["held_out"]["reward"] for row in runs} == {"a": 0.3, "b": 0.2}
    assert len(runs) == 2
