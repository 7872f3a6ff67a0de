"""All jobs of the study, with small scripts in their place: order, room, deadline, going on."""

import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.parity import models, run_all
from benchmarks.parity.arms import ARMS
from benchmarks.parity.run_all import Job, run_jobs
from benchmarks.parity.settings import SIZES, Study
from benchmarks.parity.start import fp8_engines_of

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
HANGS = SHARED + (
    "import subprocess\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "(folder / 'child').write_text(str(child.pid)); time.sleep(60)"
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
    assert "fails  failed: 1" in capsys.readouterr().out
    assert "why it failed" in (tmp_path / "logs" / "fails.log").read_text()


def test_nothing_outlives_the_deadline(tmp_path: Path) -> None:
    begun = time.monotonic()
    run_jobs([job(tmp_path, "run", HANGS)], ["0"], tmp_path / "logs", time.time() + 6)
    assert time.monotonic() - begun < 40  # it hangs for 60 s
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


def test_a_job_without_time_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "LEAST_S", 30.0)
    run_jobs([job(tmp_path, "run", WORKS)], ["0"], tmp_path / "logs", time.time() + 20)
    assert not list((tmp_path / "logs").iterdir())


def test_the_jobs_of_the_study(tmp_path: Path) -> None:
    study = Study(tmp_path, "full", SIZES["full"], torch.device("cpu"))
    words = ["--state", str(tmp_path), "--size", "full", "--settings", '{"rate": 1.0}']
    args = run_all.arguments(words)
    starts, runs, evaluations = run_all.stages(study, args)
    assert [job.name for job in starts] == ["start-dense", "start-moe"]
    assert len(runs) == 5 * 3 + 2 * 3 + 2  # of three seeds, and of one where outliers are planted
    assert {job.name[-2:] for job in runs[:9]} == {"-0"}  # all arms, then the next seed
    by_name = {job.name: job for job in (*runs, *evaluations)}
    moe = by_name["moe-fp8-2"]
    assert moe.makes == (tmp_path / "moe-fp8-2" / "finished",)
    assert set(words) | {"--arm", "moe-fp8", "--seed", "2", "--until"} <= set(moe.command)
    held_out = {name: by_name[name].makes for name in ("held-out-dense-0", "held-out-dense-1")}
    assert [len(makes) for makes in held_out.values()] == [7, 5]
    assert held_out["held-out-dense-1"][0] == tmp_path / "bf16-1" / "held_out.json"

    timing = run_all.arguments([*words, "--timing"])
    _, timed = run_all.stages(study, timing)
    assert [j.name for j in timed] == ["bf16-0", "fp8-0", "fp8-kv8-0", "moe-bf16-0", "moe-fp8-0"]
    assert all(job.makes[0].parts[-3] == "timing" and "--timing" in job.command for job in timed)


def test_the_jobs_of_the_pretrained_model(tmp_path: Path) -> None:
    study = Study(tmp_path, models.PRETRAINED, SIZES[models.PRETRAINED], torch.device("cpu"))
    args = run_all.arguments(["--state", str(tmp_path), "--size", models.PRETRAINED])
    starts, runs, evaluations = run_all.stages(study, args)
    assert [job.name for job in starts] == ["start-smollm2"]
    assert [job.name for job in runs] == [
        f"smollm2-{arm}-{seed}"
        for seed in range(3)
        for arm in ("bf16", "fp8-kv8", "fp8-kv8-uncorrected")
    ]
    assert [len(job.makes) for job in evaluations] == [3, 3, 3]


def test_a_stage_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def only_starts_end(jobs: list[Job], *rest: object) -> None:
        ran.extend(job.name for job in jobs)
        for path in (path for job in jobs if "start" in job.name for path in job.makes):
            path.parent.mkdir()
            path.touch()

    monkeypatch.setattr(run_all, "run_jobs", only_starts_end)
    monkeypatch.setattr(sys, "argv", ["run_all", "--state", str(tmp_path), "--seeds", "1"])
    with pytest.raises(SystemExit, match="left: bf16-0, fp8-0, "):
        run_all.main()
    arms = [arm.name for arm in ARMS.values() if arm.model in models.MODELS]
    assert ran == ["start-dense", "start-moe", *(f"{arm}-0" for arm in arms)]


def test_engines_that_differ_in_fp8_are_warmed_up() -> None:
    named = {
        model: [arm.name for arm in fp8_engines_of(model)] for model in (*models.MODELS, "smollm2")
    }
    assert named == {
        "dense": ["fp8", "fp8-kv8", "fp8"],
        "moe": ["moe-fp8", "moe-fp8"],
        "smollm2": ["smollm2-fp8-kv8"] * 2,
    }
