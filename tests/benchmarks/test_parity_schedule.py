"""The scheduler with jobs that are small scripts: order, room, deadline, failure, going on."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.parity import policies, run_all, warm_up
from benchmarks.parity import schedule as scheduling
from benchmarks.parity.judge import to_judge
from benchmarks.parity.paths import FINISHED, JUDGED, WARMED
from benchmarks.parity.run import STOPPED
from benchmarks.parity.schedule import Job, Schedule
from benchmarks.parity.variants import ARMS
from examples.grpo import placement

LONG_S = 60.0
SHARED = """
import os, pathlib, sys, time
folder, name, words = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
(folder / f"{name}.on").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
def count(kind):
    return len(list(folder.glob(f"*.{kind}")))
def done():
    (folder / f"{name}.done").touch()
    (folder / f"{name}.on").unlink()
"""
WORKS = SHARED + "time.sleep(0.3); (folder / f'{name}.saw{count(\"on\")}').touch(); done()"
FAILS = SHARED + "print('why it failed'); sys.exit(1)"
FAILS_ONCE = SHARED + (
    "first = folder / f'{name}.first'\n"
    "if not first.exists():\n    first.touch(); sys.exit(1)\n"
    "done()"
)
# Goes on from what it did before, one unit in each call, and stops in good time.
STOPS = SHARED + (
    "assert time.time() < float(words[words.index('--until') + 1]) < time.time() + 120\n"
    "units = count('unit'); (folder / f'{name}.{units}.unit').touch()\n"
    f"done() if units == 2 else sys.exit({STOPPED})"
)
HANGS = SHARED + (
    "import subprocess\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "(folder / 'child').write_text(str(child.pid)); time.sleep(60)"
)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting between starts, and no time that a job must have before it."""
    monkeypatch.setattr(scheduling, "BETWEEN_STARTS_S", 0.0)
    monkeypatch.setattr(scheduling, "LEAST_S", 0.0)
    monkeypatch.setattr(scheduling, "POLL_S", 0.02)


def job(folder: Path, name: str, script: str, needs: tuple[str, ...] = ()) -> Job:
    return Job(
        name,
        [sys.executable, "-c", script, str(folder), name],
        (folder / f"{name}.done",),
        tuple(folder / f"{need}.done" for need in needs),
        stops=script is STOPS,
    )


def schedule(
    folder: Path, gpus: Sequence[str] = ("0", "1"), per_gpu: int = 2, deadline: float = LONG_S
) -> Schedule:
    return Schedule(gpus, per_gpu, folder / "logs", time.monotonic() + deadline)


def is_alive(pid: int) -> bool:
    """Whether a process runs; what has ended and waits for its parent does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.timeout(120)
def test_jobs_fill_the_gpus_and_wait_for_what_they_need(tmp_path: Path) -> None:
    jobs = [job(tmp_path, "start", WORKS)]
    jobs += [job(tmp_path, f"run{i}", WORKS, ("start",)) for i in range(6)]
    jobs.append(job(tmp_path, "judge", WORKS, tuple(f"run{i}" for i in range(6))))
    assert schedule(tmp_path).run(jobs) == []
    together = {path.stem: int(path.suffix[4:]) for path in tmp_path.glob("*.saw*")}
    assert together["start"] == together["judge"] == 1
    assert max(together.values()) <= 4
    assert max(together.values()) > 1
    logs = {path.stem for path in (tmp_path / "logs").iterdir()}
    assert logs == {job.name for job in jobs}
    # All is done, so nothing starts again.
    for path in tmp_path.glob("*.saw*"):
        path.unlink()
    assert schedule(tmp_path).run(jobs) == []
    assert not list(tmp_path.glob("*.saw*"))


@pytest.mark.timeout(120)
def test_gpus_get_the_same_load(tmp_path: Path) -> None:
    started: list[str] = []
    mine = schedule(tmp_path, per_gpu=3)
    begin = mine._start
    mine._start = lambda job, gpu: (started.append(gpu), begin(job, gpu))[1]  # type: ignore[func-returns-value, method-assign]
    assert mine.run([job(tmp_path, f"run{i}", WORKS) for i in range(6)]) == []
    assert sorted(started) == ["0"] * 3 + ["1"] * 3


@pytest.mark.timeout(120)
def test_a_failed_job_is_tried_again_and_then_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [job(tmp_path, "once", FAILS_ONCE), job(tmp_path, "always", FAILS)]
    jobs.append(job(tmp_path, "after", WORKS, ("always",)))
    mine = schedule(tmp_path)
    left = mine.run(jobs)
    assert [job.name for job in left] == ["always", "after"]
    assert mine.failures == {"once": 1, "always": scheduling.TRIES}
    assert "why it failed" in capsys.readouterr().err


@pytest.mark.timeout(120)
def test_a_run_that_stops_goes_on_in_the_next_call(tmp_path: Path) -> None:
    jobs = [job(tmp_path, "run", STOPS)]
    counts = []
    for _ in range(3):
        left = schedule(tmp_path).run(jobs)
        counts.append((len(left), len(list(tmp_path.glob("*.unit")))))
    assert counts == [(1, 1), (1, 2), (0, 3)]


@pytest.mark.timeout(120)
def test_nothing_outlives_the_deadline(tmp_path: Path) -> None:
    mine = schedule(tmp_path, deadline=6.0)
    begun = time.monotonic()
    left = mine.run([job(tmp_path, "run", HANGS)])
    assert [job.name for job in left] == ["run"]
    assert time.monotonic() - begun < 40  # it hangs for 60 s
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


@pytest.mark.timeout(120)
def test_a_job_without_time_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "LEAST_S", 30.0)
    left = schedule(tmp_path, deadline=20.0).run([job(tmp_path, "run", WORKS)])
    assert [job.name for job in left] == ["run"]
    assert not (tmp_path / "logs" / "run.log").exists()


def test_the_jobs_of_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    args = run_all.arguments(["--state", str(tmp_path), "--size", "full", "--gpus", "2"])
    jobs = run_all.jobs_of(args)
    names = [job.name for job in jobs]
    assert names[:2] == ["start-dense", "start-moe"]
    judging = [f"judge-{model}-{seed}" for seed in range(3) for model in ("dense", "moe")]
    assert names[-6:] == judging
    runs = names[2:-6]
    assert runs[: len(ARMS)] == [f"{arm}-0" for arm in ARMS]
    assert len(runs) == 5 * 3 + 2 * 3 + 2
    by_name = {job.name: job for job in jobs}
    moe = by_name["moe-fp8-2"]
    assert moe.needs == (tmp_path / "start-moe-full",)
    assert moe.makes == (tmp_path / "moe-fp8-2" / FINISHED,)
    words = ["--state", str(tmp_path), "--arm", "moe-fp8", "--seed", "2", "--size", "full"]
    assert all(word in moe.command for word in words)
    assert [len(by_name[name].needs) for name in judging] == [7, 2, 5, 2, 5, 2]
    assert by_name["judge-moe-1"].makes[0] == tmp_path / "moe-bf16-1" / JUDGED
    assert by_name["judge-moe-1"].command[-2:] == ["--seed", "1"]
    assert {job.name for job in jobs if job.stops} == set(runs)

    timing = run_all.arguments(["--state", str(tmp_path), "--timing", "--per-gpu", "6"])
    assert (timing.per_gpu, timing.steps) == (1, run_all.TIMING_STEPS)
    timed = [job for job in run_all.jobs_of(timing) if job.stops]
    assert [job.name for job in timed] == [f"{a.name}-0" for a in ARMS.values() if a.is_timed]
    assert all(job.makes[0].parts[-3] == "timing" for job in timed)
    assert all("--timing" in job.command for job in timed)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_a_gpu_runs_wait_for_measured_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(placement, "device_type", lambda: device)
    words = ["--state", str(tmp_path), "--size", "full", "--arms", "fp8-kv8", "--seeds", "1"]
    jobs = {job.name: job for job in run_all.jobs_of(run_all.arguments(words))}
    marker = tmp_path / "warm-up-dense-full" / WARMED
    assert (marker in jobs["fp8-kv8-0"].needs) == ("warm-up-dense" in jobs) == (device == "cuda")
    assert tmp_path / "start-dense-full" in jobs["fp8-kv8-0"].needs
    if device == "cuda":
        assert jobs["warm-up-dense"].makes == (marker,)
        assert not jobs["warm-up-dense"].needs  # beside the training of the start


def test_engines_that_differ_in_fp8_are_warmed_up() -> None:
    named = {model: [arm.name for arm in warm_up.engines_of(model)] for model in policies.MODELS}
    assert named == {"dense": ["fp8", "fp8-kv8", "fp8"], "moe": ["moe-fp8", "moe-fp8"]}


def test_a_run_is_judged_once_and_with_its_model(tmp_path: Path) -> None:
    for name in ("fp8-kv8-0", "fp8-0", "moe-fp8-0", "bf16-0", "bf16-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / FINISHED).touch()
    (tmp_path / "fp8-uncorrected-0").mkdir()  # not finished
    (tmp_path / "fp8-0" / JUDGED).touch()
    assert [path.name for path in to_judge(tmp_path, "dense", 0)] == ["bf16-0", "fp8-kv8-0"]
    assert [path.name for path in to_judge(tmp_path, "dense", 1)] == ["bf16-1"]
    assert [path.name for path in to_judge(tmp_path, "moe", 0)] == ["moe-fp8-0"]


def gpus_seen(folder: Path, count: int) -> set[str]:
    """CUDA_VISIBLE_DEVICES of jobs, of which ``count`` run side by side."""
    keeps = SHARED + "(folder / f'{name}.gpu').write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    jobs = [job(folder, f"run{i}", keeps + "time.sleep(1)\ndone()") for i in range(count)]
    args = run_all.arguments(["--gpus", str(count)])
    assert schedule(folder, args.gpus, per_gpu=1).run(jobs) == []
    return {path.read_text() for path in folder.glob("*.gpu")}


def test_jobs_see_gpus_of_the_caller_s_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7, GPU-5e,3")
    assert gpus_seen(tmp_path, 2) == {"7", "GPU-5e"}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7, GPU-5e,3"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert run_all.arguments(["--gpus", "2"]).gpus == ["0", "1"]


def test_jobs_stay_on_the_cpu_where_the_caller_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus_seen(tmp_path, 1) == {""}
    assert "run0  starts on the CPU" in capsys.readouterr().out


def test_gpus_that_are_not_there_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = {("0,1", "3"): "give 2 or less", ("", "2"): "give 1 or less", ("0", "0"): "1 or more"}
    for (visible, count), reason in refused.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(SystemExit):
            run_all.arguments(["--gpus", count])
        assert reason in capsys.readouterr().err
