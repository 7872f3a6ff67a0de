"""All jobs of the study, with small scripts in their place: order, room, deadline, going on."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import processes
from benchmarks.learning import run_all
from benchmarks.learning.run_all import Job, run_jobs

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
HANGS = SHARED + (
    "import subprocess\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "unread = folder / 'unread'; unread.write_text(str(child.pid))\n"
    "unread.replace(folder / 'child'); time.sleep(60)"
)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "BETWEEN_STARTS_S", 0.0)
    monkeypatch.setattr(processes, "POLL_S", 0.02)


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


def test_a_failed_job_does_not_stop_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [job(tmp_path, "fails", FAILS), job(tmp_path, "works", WORKS)]
    run_jobs(jobs, [""], tmp_path / "logs", time.time() + LONG_S)
    assert [job.is_done for job in jobs] == [False, True]
    assert "fails  failed: 1" in capsys.readouterr().out
    assert "why it failed" in (tmp_path / "logs" / "fails.log").read_text()
    run_jobs(jobs[1:], [""], tmp_path / "logs", time.time() + LONG_S)
    assert "starts" not in capsys.readouterr().out, "what is done does not start again"


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


def test_a_call_that_is_ended_ends_its_jobs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CALL, str(tmp_path), HANGS]
    call = subprocess.Popen(command, cwd=ROOT)
    while not (tmp_path / "child").exists():
        assert call.poll() is None
        time.sleep(0.05)
    call.terminate()
    assert call.wait() == 1
    assert_ends(tmp_path / "child")


CALL = """
import sys
from pathlib import Path
from benchmarks.learning import run_all

folder, script = Path(sys.argv[1]), sys.argv[2]
command = (sys.executable, "-c", script, str(folder), "run")
job = run_all.Job("run", command, (folder / "run.done",))
run_all.phases_of = lambda of, args: [(args.until, [job])]
sys.argv = ["run_all", "--state", str(folder / "state")]
run_all.main()
"""
