"""From logs to the result file, the page's tables and its picture."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readme
from benchmarks.parity import picture, report, summary, tables
from benchmarks.parity.paths import FINISHED, JUDGED, LOG, run_folder
from benchmarks.parity.settings import MARGIN
from benchmarks.parity.variants import ARMS, seeds_of

STEPS, SEEDS = 200, 3
WHERE = "NVIDIA H200, sglang 0.5.17, torch 2.11.0, commit abc1234"
OPTIONS = {"size": "full", "prompts": 16, "group": 8, "engine_args": {}, "commit": "abc1234"}
ALARM = {"metric": "mismatch_kl_k3", "value": 0.5, "threshold": 0.1, "message": "Look at it."}
JUDGEMENT = {"problems": 1024, "response_tokens": 110.0, "unfinished": 0.0, "entropy": 0.2}
NOISE = {"fp8": (0.004, -0.006, 0.002)}
REWARD = {"bf16": 0.80, "fp8": 0.80, "fp8-uncorrected": 0.70, "outliers-kv8-unit": 0.30}
PAGE = "".join(
    f"<!-- measured: {name} -->\nno figures yet\n<!-- end -->\n"
    for name in ("parity", "parity_tests", "parity_mismatch", "parity_alarms", "parity_timing")
)


def a_log(
    arm: str, seed: int, steps: int = STEPS, of: int = STEPS, start: str = "f00d"
) -> list[dict[str, Any]]:
    """What a run writes that has done ``steps`` of its steps."""
    rng = random.Random(f"{arm} {seed}")
    model = ARMS[arm].model
    header = {
        "arm": arm,
        "seed": seed,
        "device": "NVIDIA H200",
        "versions": {"sglang": "0.5.17", "torch": "2.11.0"},
        "parameters": 126110720,
        "date": "2026-01-01T00:00:00+00:00",
        "options": OPTIONS | {"steps": of, "start": f"{start}-{model}"},
    }
    engine = {"start_s": 40.0, "matrices": 32, "fp8_matrices": 0 if "bf16" in arm else 32}
    rows = [{"kind": "run", **header}, {"kind": "engine", "step": 0, **engine}]
    for step in range(steps):
        row = {
            "step": step,
            "reward": round(rng.random() * 128) / 128,
            "mismatch_kl_k3": rng.random() * 1e-4,
            "ess": 1 - rng.random() * 1e-3,
            "logprob_abs_diff_max": 0.5,
            "entropy": rng.random(),
            "response_tokens": 100 + rng.random(),
            "unfinished": 0.0,
            "tokens": 12800.0,
            "update_s": 0.01,
            "rollout_s": 0.5,
            "learn_s": 0.25,
            "alarms": [ALARM] if ARMS[arm].must_alarm and step > 1 else [],
        }
        if ARMS[arm].correction != "disabled":
            row["clipped_fraction"] = rng.random() * 1e-3
        rows.append({"kind": "step", **row})
    return [*rows, {"kind": "evaluation", "step": steps, "reward": 0.75}]


def write_run(state: Path, arm: str, seed: int, **options: Any) -> Path:
    """A finished run's folder."""
    folder = run_folder(state, arm, seed, options.pop("is_timed", False))
    folder.mkdir(parents=True)
    rows = a_log(arm, seed, **options)
    (folder / LOG).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if options.get("steps", STEPS) == STEPS:
        (folder / FINISHED).touch()
        reward = REWARD.get(arm, 0.8) + 0.01 * seed + NOISE.get(arm, (0.0, 0.0, 0.0))[seed]
        (folder / JUDGED).write_text(json.dumps(JUDGEMENT | {"reward": reward, "by_kind": {}}))
    return folder


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """All runs of the experiment."""
    for arm in ARMS:
        for seed in seeds_of(arm, SEEDS):
            write_run(tmp_path, arm, seed)
        if ARMS[arm].is_timed:
            write_run(tmp_path, arm, 0, is_timed=True, steps=20, of=20)
    start = tmp_path / "start-dense-full"
    start.mkdir()
    (start / JUDGED).write_text(json.dumps(JUDGEMENT | {"reward": 0.3, "by_kind": {}}))
    return tmp_path


def test_the_page_of_all_runs(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "RESULTS", tmp_path / "results")
    assert readme.BLOCK.sub(readme.filled, PAGE) == PAGE  # nothing was measured yet
    path = tmp_path / "results" / "parity.jsonl"
    report.main([str(state), "--output", str(path)])
    assert path.stat().st_size < 300_000
    page = readme.BLOCK.sub(readme.filled, PAGE)
    assert readme.BLOCK.sub(readme.filled, page) == page
    assert "no figures yet" not in page
    lines = page.splitlines()

    [bf16] = [line for line in lines if line.startswith("| bf16 | 3 |")]
    assert "| 0.810 (0.800 to 0.820) |" in bf16
    assert "| 0.750 (0.750 to 0.750) | 0 of 600 |" in bf16
    [same] = [line for line in lines if line.startswith("| fp8 minus bf16 | 3 |")]
    assert "| 0.000 | -0.009 to +0.009 | yes | p = 1.00, 1.00 | yes, p = 0.002 |" in same
    [worse] = [line for line in lines if line.startswith("| fp8-uncorrected minus bf16 | 3 |")]
    assert "| -0.100 | -0.100 to -0.100 | no |" in worse
    assert "| no, p = 1.000 |" in worse
    assert f"margin {MARGIN}" in page
    assert "cannot give less than 0.25 with 3 seeds" in page
    assert "The t test found a difference in fp8-uncorrected (-0.100)." in page
    assert "The dense model begins at 0.300" in page
    unit = "| outliers-kv8-unit | `mismatch_kl_k3` | 198 of 200 | 2 | 0.5 | 0.1 | yes |"
    assert unit in lines
    silent = {line.split(" ")[1] for line in lines if line.endswith("| | | | yes |")}
    assert silent == ARMS.keys() - {"outliers-kv8-unit"}
    assert "| bf16 | none | 0 of 600 | | | | yes |" in lines
    [note] = [line for line in lines if "examples/parity/run_all.py --timing" in line]
    assert f"one run alone on a GPU, {WHERE}. " in note
    assert f"8 responses each, {WHERE}, 2026-01-01. " in page
    timed = [line for line in lines if "| 0.76 s (0.76 to 0.76) | 0.50 s | 25,600 |" in line]
    with_times = [name for name, arm in ARMS.items() if arm.is_timed]
    assert [line.split(" |")[0][2:] for line in timed] == with_times
    for number, line in enumerate(lines):
        if set(line) == set("|-"):  # a table: every line has as many cells as its head
            block = lines[number - 1 :]
            table = block[: next(i for i, text in enumerate(block) if not text.startswith("|"))]
            assert len({text.count("|") for text in table}) == 1, table
            assert len(table) > 2

    png = tmp_path / "parity.png"
    picture.draw(path.read_text(), png)
    assert 20_000 < png.stat().st_size < 600_000


def test_entropy_is_of_all_seeds_at_both_ends(tmp_path: Path) -> None:
    ends = {0: (0.9, 0.3), 1: (0.7, 0.2), 2: (0.5, 0.4)}
    for seed, (first, last) in ends.items():
        log = write_run(tmp_path, "bf16", seed) / LOG
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        steps = [row for row in rows if row["kind"] == "step"]
        steps[0]["entropy"], steps[-1]["entropy"] = first, last
        log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = tables.mismatch("\n".join(map(json.dumps, summary.summarize([tmp_path]))))
    [bf16] = [line for line in table.splitlines() if line.startswith("| bf16 |")]
    assert "| 0.70 to 0.30 |" in bf16


def test_alarms_that_were_not_expected_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fp8", "outliers-kv8-unit"):  # the healthy arm fires, and the broken one does not
        arm = replace(ARMS[name], must_alarm=not ARMS[name].must_alarm)
        with monkeypatch.context() as patched:
            patched.setitem(ARMS, name, arm)
            write_run(tmp_path, name, 0)
    table = tables.alarms("\n".join(map(json.dumps, summary.summarize([tmp_path])))).splitlines()
    assert "| fp8 | `mismatch_kl_k3` | 198 of 200 | 2 | 0.5 | 0.1 | no |" in table
    assert "| outliers-kv8-unit | none | 0 of 200 | | | | no |" in table


def test_what_is_not_there_yet_is_said(tmp_path: Path) -> None:
    write_run(tmp_path, "bf16", 0)
    write_run(tmp_path, "fp8", 0)
    write_run(tmp_path, "fp8-kv8", 1, steps=7)
    (tmp_path / "bf16-0" / JUDGED).unlink()
    text = "\n".join(map(json.dumps, summary.summarize([tmp_path])))
    page = "\n".join(make(text) for _, make in map(readme.BLOCKS.get, BLOCKS_OF_THE_PAGE))  # type: ignore[misc]
    assert "Not finished: fp8-kv8-1 (7 steps)." in page
    assert "| bf16 | 1 | not yet |" in page
    assert "The permutation test" not in page  # there is no pair yet
    assert "minus bf16" not in tables.tests(text).split("Held-out")[0].split("|---|")[-1]
    picture.draw(text, tmp_path / "picture.png")


BLOCKS_OF_THE_PAGE = [name for name in readme.BLOCKS if name.startswith("parity")]


def test_runs_that_are_no_pairs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no folder holds a run"):
        summary.summarize([tmp_path])
    write_run(tmp_path / "a", "bf16", 0)
    write_run(tmp_path / "b", "fp8", 0, start="cafe")
    with pytest.raises(ValueError, match="began with other weights"):
        summary.summarize([tmp_path / "a", tmp_path / "b"])
    write_run(tmp_path / "c", "bf16", 0)
    with pytest.raises(ValueError, match="more than one folder has bf16-0"):
        summary.summarize([tmp_path / "a", tmp_path / "c"])


CHANGES = {
    "commit": ('"commit": "abc1234"', '"commit": "def5678"'),
    "engine_args": ('"engine_args": {}', '"engine_args": {"page_size": 16}'),
    "prompts": ('"prompts": 16', '"prompts": 8'),
    "device": ("NVIDIA H200", "NVIDIA H100"),
    "versions": ("0.5.17", "0.5.23"),
}


@pytest.mark.parametrize("is_timed", [False, True])
@pytest.mark.parametrize("changed", CHANGES)
def test_runs_of_other_experiments_are_refused(
    tmp_path: Path, changed: str, is_timed: bool
) -> None:
    write_run(tmp_path, "bf16", 0)
    more = {"is_timed": True, "steps": 20, "of": 20} if is_timed else {}
    log = write_run(tmp_path, "fp8", 0, **more) / LOG
    assert len(summary.summarize([tmp_path])) == 3  # the control
    text = log.read_text()
    assert text.count(CHANGES[changed][0]) == 1
    log.write_text(text.replace(*CHANGES[changed]))
    with pytest.raises(ValueError, match=f"fp8-0 differs from other runs in {changed}; merge"):
        summary.summarize([tmp_path])


def test_the_page_s_blocks_are_known() -> None:
    page = readme.PARITY.read_text()
    names = [name for _, name, _ in readme.BLOCK.findall(page)]
    assert names == BLOCKS_OF_THE_PAGE
