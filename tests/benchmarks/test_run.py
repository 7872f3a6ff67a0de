"""The runner, with real processes of ``tiny_benchmark``."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import benchmark, run
from benchmarks.environment import COMMIT_VARIABLE


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The result file of the benchmark."""
    monkeypatch.setenv(COMMIT_VARIABLE, "abc1234")
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    reference = "tests.benchmarks.tiny_benchmark:BENCHMARK"
    monkeypatch.setitem(benchmark.BENCHMARKS, "tiny", reference)
    return tmp_path / "tiny.json"


def results_of(output: Path, *words: str) -> dict[str, Any]:
    run.main(["tiny", *words, "--output", str(output)])
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def test_rows_and_environment_are_stamped(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = results_of(output, "--repeats", "2", "--restarts", "2")
    assert found["benchmark"] == "tiny" and found["failures"] == {}
    environment = found["environment"]
    assert environment["commit"] == "abc1234" and environment["engine"] == "tiny"
    assert environment["command"] == "python -m benchmarks.run tiny --repeats 2"
    assert {"device", "torch", "date", "host"} <= environment.keys()
    assert [row["arm"] for row in found["rows"]] == ["good", "ours", "stock"]
    row = found["rows"][0]
    assert (row["metric"], row["unit"], row["median"], row["n"]) == ("step_ms", "ms", 2.0, 12)
    done = [line for line in capsys.readouterr().out.splitlines() if ": done" in line]
    assert [line.partition(":")[0] for line in done] == ["m/good", "m/ours", "m/stock"] * 2


@pytest.mark.parametrize(
    ("job", "failure"),
    [
        ("crash", "exit status 1: MemoryError: too much"),
        ("killed", "ended by SIGKILL: IndexError: out of range"),
        ("early", "ended without output: its log names no exception"),
    ],
)
def test_a_job_that_fails_gives_the_exception_s_line(
    output: Path, job: str, failure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = results_of(output, "--only", job, "good")
    assert list(found["failures"].values()) == [failure]
    assert [row["arm"] for row in found["rows"]] == ["good"]
    assert f"measuring {job}" in capsys.readouterr().err


def test_a_job_that_hangs_is_ended_with_what_it_started(output: Path) -> None:
    found = results_of(output, "--only", "hangs", "--limit-s", "8")
    assert found["failures"] == {"hangs": "did not end within 8 s: its log names no exception"}
    status = Path(f"/proc/{(output.parent / 'pid').read_text()}/stat")
    deadline = time.monotonic() + 30
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_may_be_cut_into_calls(
    output: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results_of(output, "--only", "good", "--logs", str(tmp_path / "logs"))
    assert "measuring good" in (tmp_path / "logs" / "m, good.log").read_text()
    assert len(results_of(output, "--only", "*/stock")["rows"]) == 2
    other, merged = output.with_name("other.json"), output.with_name("merged.json")
    results_of(other, "--only", "crash")
    run.main(["tiny", "--merge", str(output), str(other), "--output", str(merged)])
    both = json.loads(merged.read_text())
    assert len(both["rows"]) == 2 and list(both["failures"]) == ["m/crash"]
    monkeypatch.setenv(COMMIT_VARIABLE, "def5678")
    assert len(results_of(output, "--only", "good")["rows"]) == 1


def test_what_the_command_line_refuses(
    output: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "gpus", lambda: None)
    for words, error in (
        (["tiny", "--layers", "2"], "name another --output"),
        (["tiny", "--only", "absent"], "no job matches absent"),
        (["update"], "nvidia-smi found no GPU"),
        (["fp8_forward"], "there is no GPU here"),
    ):
        with pytest.raises(SystemExit):
            run.main(words)
        assert error in capsys.readouterr().err
    with pytest.raises(SystemExit, match="NAME: update"):
        run.main(["absent"])


def test_every_benchmark_lists_its_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    run.main(["list", *benchmark.BENCHMARKS])
    listed = capsys.readouterr().out.splitlines()
    for name, reference in benchmark.BENCHMARKS.items():
        names = [job.name for job in benchmark.load(reference).jobs]
        assert name in listed and len(set(names)) == len(names) > 0
