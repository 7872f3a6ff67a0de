"""All jobs of the study, with small scripts in their place: order, room, deadline, going on."""

import json
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.parity import jobs as parity_jobs
from benchmarks.parity import models, run_all, summary
from benchmarks.parity.arms import ARMS
from benchmarks.parity.dose_arms import DOSE_ARMS
from benchmarks.parity.held_out import weights_of
from benchmarks.parity.jobs import Job
from benchmarks.parity.run import STOPPED
from benchmarks.parity.run_all import run_jobs
from benchmarks.parity.run_log import FAILED, rows_of
from benchmarks.parity.settings import ENVIRONMENT, SIZES, Study
from benchmarks.parity.start import fp8_engines_of

ROOT = Path(__file__).parents[2]
LONG_S = 60.0
SHARED = """
import os, pathlib, sys, time
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
gpu = os.environ["CUDA_VISIBLE_DEVICES"]
(folder / f"{name}.on{gpu}").touch()
beside = len(list(folder.glob(f"*.on{gpu}")))
"""
WORKS = SHARED + (
    "time.sleep(0.3); (folder / f'{name}.saw{beside}').touch()\n"
    "(folder / f'{name}.on{gpu}').unlink(); (folder / f'{name}.done').touch()"
)
FAILS = SHARED + "print('why it failed'); sys.exit(1)"
FAILS_ONCE = "import pathlib, sys\nif not pathlib.Path(sys.argv[1], 'tried').exists():\n" + (
    "    pathlib.Path(sys.argv[1], 'tried').touch(); sys.exit(1)\n" + WORKS
)
HANGS = SHARED + (
    "import subprocess\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "unread = folder / 'unread'; unread.write_text(str(child.pid))\n"
    "unread.replace(folder / 'child'); time.sleep(60)"
)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting between starts, and no time that a job must have before it."""
    monkeypatch.setattr(run_all, "BETWEEN_STARTS_S", 0.0)
    monkeypatch.setattr(run_all, "LEAST_S", 0.0)
    monkeypatch.setattr(run_all, "POLL_S", 0.02)


def job(folder: Path, name: str, script: str) -> Job:
    command = (sys.executable, "-c", script, str(folder), name)
    return Job(name, command, (folder / f"{name}.done",))


def is_alive(pid: int) -> bool:
    """Whether a process runs; what has ended and waits for its parent does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_jobs_fill_the_gpus_once(tmp_path: Path) -> None:
    jobs = [job(tmp_path, f"run{i}", WORKS) for i in range(6)]
    slots = ["0", "1"] * 2
    run_jobs(jobs, slots, tmp_path / "logs", time.time() + LONG_S)
    assert all(job.is_done for job in jobs)
    beside = [int(path.suffix[4:]) for path in tmp_path.glob("*.saw*")]
    assert len(beside) == 6
    assert max(beside) <= 2  # on one GPU
    # All is done, so nothing starts again.
    for path in tmp_path.glob("*.saw*"):
        path.unlink()
    run_jobs(jobs, slots, tmp_path / "logs", time.time() + LONG_S)
    assert not list(tmp_path.glob("*.saw*"))


def test_a_failed_job_does_not_stop_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [job(tmp_path, "fails", FAILS), job(tmp_path, "works", WORKS)]
    run_jobs(jobs, [""], tmp_path / "logs", time.time() + LONG_S)
    assert [job.is_done for job in jobs] == [False, True]
    assert capsys.readouterr().out.count("fails  failed: 1") == 2  # it was tried once more
    assert (tmp_path / "logs" / "fails.log").read_text().count("why it failed") == 2
    failures = [{"job": "fails", "status": 1}] * 2
    assert rows_of(tmp_path / FAILED) == failures
    (tmp_path / ENVIRONMENT).write_text('{"date": "2026-01-01"}')
    of_it = {"kind": "failed", "execution": "2026-01-01"}
    assert summary.summarize(tmp_path)[1:] == [of_it | row for row in failures]


def test_a_job_that_failed_once_is_done(tmp_path: Path) -> None:
    """As an engine whose port was taken as it started."""
    run_jobs([job(tmp_path, "run", FAILS_ONCE)], [""], tmp_path / "logs", time.time() + LONG_S)
    assert (tmp_path / "run.done").exists()
    assert rows_of(tmp_path / FAILED) == [{"job": "run", "status": 1}]


def assert_ends(child: Path) -> None:
    """Who inherits a process that was killed reaps it a moment later."""
    deadline = time.monotonic() + 10
    while is_alive(int(child.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(int(child.read_text()))


def test_nothing_outlives_the_deadline(tmp_path: Path) -> None:
    begun = time.monotonic()
    run_jobs([job(tmp_path, "run", HANGS)], ["0"], tmp_path / "logs", time.time() + 6)
    assert time.monotonic() - begun < 40  # it hangs for 60 s
    assert_ends(tmp_path / "child")


def test_a_job_without_time_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "LEAST_S", 30.0)
    run_jobs([job(tmp_path, "run", WORKS)], ["0"], tmp_path / "logs", time.time() + 20)
    assert not list((tmp_path / "logs").iterdir())


def test_a_job_waits_for_what_it_needs_and_for_jobs_that_may_fail(tmp_path: Path) -> None:
    jobs = [
        replace(job(tmp_path, "last", WORKS), after=("fails", "second")),
        replace(job(tmp_path, "second", WORKS), needs=(tmp_path / "first.done",)),
        job(tmp_path, "first", WORKS),
        job(tmp_path, "fails", FAILS),
        replace(job(tmp_path, "never", WORKS), needs=(tmp_path / "fails.done",)),
    ]
    run_jobs(jobs, ["0", "1"], tmp_path / "logs", time.time() + LONG_S)
    assert [job.is_done for job in jobs] == [True, True, True, False, False]
    order = sorted(jobs[:3], key=lambda job: job.makes[0].stat().st_mtime_ns)
    assert [job.name for job in order] == ["first", "second", "last"]
    assert not (tmp_path / "logs" / "never.log").exists()


def test_a_run_leaves_time_for_evaluations(tmp_path: Path) -> None:
    jobs = [
        replace(job(tmp_path, "late", WORKS), spare_s=30.0),
        replace(job(tmp_path, "evaluation", WORKS), after=("late",)),
    ]
    run_jobs(jobs, ["0"], tmp_path / "logs", time.time() + 20)
    assert [job.is_done for job in jobs] == [False, True]


def test_a_call_that_is_ended_ends_its_jobs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CALL, str(tmp_path), HANGS]
    call = subprocess.Popen(command, cwd=ROOT)
    deadline = time.monotonic() + 60
    while not (tmp_path / "child").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    call.terminate()
    assert call.wait(timeout=10) == 1
    assert_ends(tmp_path / "child")


CALL = """
import sys
from pathlib import Path
from benchmarks.parity import run_all

folder, script = Path(sys.argv[1]), sys.argv[2]
command = (sys.executable, "-c", script, str(folder), "run")
run_all.jobs_of = lambda *given: [run_all.Job("run", command, (folder / "run.done",))]
sys.argv = ["run_all", "--state", str(folder / "state")]
run_all.main()
"""

STANDS_IN = """
import json, pathlib, sys
name, statuses, *makes = sys.argv[1:]
status = json.loads(statuses).get(name, 0)
makes = [pathlib.Path(path) for path in makes]
if name.startswith("held-out"):
    makes = [p for p in makes if p.parent.name[:5] == "start" or (p.parent / "finished").exists()]
if name.startswith("start"):
    makes[0].mkdir()
for path in makes if not status else []:
    path.parent.mkdir(exist_ok=True)
    path.touch()
sys.exit(status)
"""
"""Does what a job of the study does to its folder; one that fails makes nothing but a start."""


@pytest.mark.parametrize(
    "statuses",
    [
        {"start-dense": 1, "held-out-start-dense": 1, "bf16-0": 1, "1e-2-tis-0": STOPPED},
        {"scan-dense": 1},
    ],
    ids=["warm-up, start and runs", "scan"],
)
def test_what_fails_costs_its_own_row(tmp_path: Path, statuses: dict[str, int]) -> None:
    study = Study(tmp_path, "full", SIZES["full"], torch.device("cpu"), "doses")
    words = ["--study", "doses", "--state", str(tmp_path), "--size", "full", "--seeds", "1"]
    args = run_all.arguments([*words, "--models", "dense", "--gpus", "0,1"])
    jobs = [
        replace(job, command=(sys.executable, "-c", STANDS_IN, job.name, json.dumps(statuses)))
        for job in parity_jobs.jobs_of(study, args)
    ]
    jobs = [replace(job, command=(*job.command, *map(str, job.makes))) for job in jobs]
    run_jobs(jobs, ["0", "1"] * 3, tmp_path / "logs", time.time() + 400)
    lost = {name for name, arm in DOSE_ARMS.items() if arm.dose and "scan-dense" in statuses}
    lost |= {name[:-2] for name in statuses}
    arms = {name for name, arm in DOSE_ARMS.items() if arm.model == "dense"}
    evaluated = {path.parent.name for path in tmp_path.glob("*/held_out.json")}
    assert evaluated == {"start-dense", *(f"{name}-0" for name in arms - lost)}


def jobs_of(study: Study, args: Namespace) -> dict[str, Job]:
    return {job.name: job for job in parity_jobs.jobs_of(study, args)}


def test_the_jobs_of_the_study(tmp_path: Path) -> None:
    study = Study(tmp_path, "full", SIZES["full"], torch.device("cpu"))
    words = ["--state", str(tmp_path), "--size", "full", "--settings", '{"rate": 1.0}']
    args = run_all.arguments(words)
    jobs = jobs_of(study, args)
    starts = ["start-dense", "held-out-start-dense", "start-moe", "held-out-start-moe"]
    assert list(jobs)[:4] == starts
    assert jobs["held-out-start-moe"].makes == (tmp_path / "start-moe" / "held_out.json",)
    runs = [job for job in jobs.values() if "--arm" in job.command]
    assert len(runs) == 5 * 3 + 2 * 3 + 2  # of three seeds, and of one where outliers are planted
    assert {job.name[-2:] for job in runs[:9]} == {"-0"}  # all arms, then the next seed
    moe = jobs["moe-fp8-2"]
    assert moe.makes == (tmp_path / "moe-fp8-2" / "finished",)
    stops = float(moe.command[moe.command.index("--until") + 1])
    evaluations_s = parity_jobs.EVALUATION_S + 7 * parity_jobs.EVALUATED_S  # of 7 dense arms
    assert stops + parity_jobs.GRACE_S + evaluations_s == pytest.approx(args.until, abs=1)
    assert (moe.needs, moe.after) == ((tmp_path / "start-moe",), ("start-moe",))
    assert set(words) | {"--arm", "moe-fp8", "--seed", "2", "--until"} <= set(moe.command)
    held_out = [jobs["held-out-dense-0"], jobs["held-out-dense-1"]]
    assert [len(job.makes) for job in held_out] == [8, 6]  # with the start's
    assert [path.parent.name for path in held_out[1].makes][:2] == ["start-dense", "bf16-1"]

    on_two = jobs_of(study, run_all.arguments([*words, "--gpus", "0,1"]))
    shares = [on_two[f"held-out-dense-1-{share}"] for share in (1, 2)]
    every = []
    for share in shares:  # each names its arms, and waits for their runs alone
        names = share.command[share.command.index("--arms") + 1 :]
        assert share.after == ("held-out-start-dense", *(f"{name}-1" for name in names))
        assert [path.parent.name for path in share.makes[1:]] == [*share.after[1:]]
        every += names
    # runs that begin one after the other are evaluated together
    assert every == [name for name, arm in ARMS.items() if arm.model == "dense" and not arm.planted]

    timed = list(jobs_of(study, run_all.arguments([*words, "--timing"])).values())[2:]
    assert not any("held-out" in job.name for job in timed)
    assert [j.name for j in timed] == ["bf16-0", "fp8-0", "fp8-kv8-0", "moe-bf16-0", "moe-fp8-0"]
    assert all(job.makes[0].parts[-3] == "timing" and "--timing" in job.command for job in timed)


def test_the_jobs_of_the_doses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = replace(SIZES["full"], seeds_a_start=2)
    study = Study(tmp_path, "full", settings, torch.device("cpu"), "doses")
    words = ["--study", "doses", "--state", str(tmp_path), "--size", "full", "--seeds", "3"]
    jobs = jobs_of(study, run_all.arguments(words))
    scans = [name for name in jobs if name.startswith("scan-")]
    assert scans == [f"scan-{model}{n}" for n in ("", "-1") for model in models.MODELS]
    assert set(DOSE_ARMS) == {
        name[:-2] for name in jobs if name.endswith("-0") and "held" not in name
    }
    # a dose needs the scan of its own start, and nothing else does
    assert jobs["5e-2-none-1"].needs[-1] == tmp_path / "start-dense" / "scan.jsonl"
    assert jobs["5e-2-none-2"].needs[-1] == tmp_path / "start-dense-1" / "scan.jsonl"
    assert jobs["kv8-none-2"].needs == (tmp_path / "start-dense-1",)
    # what is given back early has whole comparisons
    names = list(jobs)
    assert names.index("held-out-dense-0") < names.index("bf16-1")
    assert names.index("5e-2-none-0") < names.index("moe-bf16-0")
    some = jobs_of(study, run_all.arguments([*words, "--first-seed", "2", "--models", "dense"]))
    runs = [job for job in some.values() if "--arm" in job.command]
    assert {job.name[-2:] for job in runs} == {"-2", "-3", "-4"}
    assert not any("moe" in name for name in some)
    assert "runs of 150 steps" in run_all.plan(study, list(jobs.values()), 24)


def test_references_are_evaluated_first(tmp_path: Path) -> None:
    study = Study(tmp_path, "full", SIZES["full"], torch.device("cpu"), "doses")
    found = weights_of(study, "dense", 0, ["5e-2-none", "stale-bf16", "stale-1e-2-tis", "bf16"])
    names = [folder.name for folder in found]
    assert names == ["start-dense", "stale-bf16-0", "bf16-0", "5e-2-none-0", "stale-1e-2-tis-0"]
    assert found[tmp_path / "bf16-0"] == tmp_path / "bf16-0" / "final"
    assert list(weights_of(study, "dense", 0, [])) == [tmp_path / "start-dense"]


def test_the_jobs_of_the_pretrained_model(tmp_path: Path) -> None:
    study = Study(tmp_path, models.PRETRAINED, SIZES[models.PRETRAINED], torch.device("cpu"))
    args = run_all.arguments(["--state", str(tmp_path), "--size", models.PRETRAINED])
    assert list(jobs_of(study, args)) == [
        "start-smollm2",
        "held-out-start-smollm2",
        *(
            name
            for seed in range(3)
            for name in (
                *(f"smollm2-{arm}-{seed}" for arm in ("bf16", "fp8-kv8", "fp8-kv8-uncorrected")),
                f"held-out-smollm2-{seed}",
            )
        ),
    ]


def test_what_is_left_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "run_jobs", lambda *given: None)
    monkeypatch.setattr(sys, "argv", ["run_all", "--state", str(tmp_path), "--seeds", "1"])
    with pytest.raises(SystemExit, match="left: start-dense, held-out-start-dense, start-moe, "):
        run_all.main()


def test_engines_that_differ_in_fp8_are_warmed_up(tmp_path: Path) -> None:
    def named(size: str, study: str, model: str) -> list[str]:
        found = Study(tmp_path, size, SIZES[size], torch.device("cpu"), study)
        return [arm.name for arm in fp8_engines_of(found, model)]

    assert named("full", "parity", "dense") == ["fp8", "fp8-kv8", "fp8"]
    assert named("full", "parity", "moe") == ["moe-fp8"] * 2
    assert named("smollm2", "parity", "smollm2") == ["smollm2-fp8-kv8"] * 2
    assert named("full", "doses", "dense") == ["5e-2-none", "grows-controlled", "5e-2-none"]
