"""What becomes of the arms' reports and failures: rows, the result file, the page's tables."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cases, environment, models, processes, readme, result_rows, traffic, update


def a_report(case: cases.Case, wall: list[float], **more: Any) -> result_rows.Report:
    parameters = list(models.parameters(models.MODELS["qwen3-8b"]))
    ours = not case.stock
    share = 1.0 if case.mapped else 0.0
    report = {
        "arm": case.arm,
        "case": case.name,
        "model": "qwen3-8b",
        "parameters": 8_190_735_360,
        "layers": 36,
        "source": case.source,
        "moved_bytes": traffic.update_traffic(
            parameters, case.source, case.target, None if case.mapped else case.target
        ),
        "mapped_share": share,
        "copy_tb_s": 4.3,
        "logprob_changed": True,
        "policy_version": 14 if ours else None,
        **more,
    }
    gpu = [6.5, 6.4, 7.0] if ours else []
    values = result_rows.measured(wall, gpu, parameters, report) | {"peak_extra_gib": [1.0]}
    return report | {"values": values}


def all_reports() -> list[result_rows.Report]:
    big, small, flash, mapped, bucket, _ = cases.CASES
    failure = {"failure": "ended by SIGKILL: IndexError: a | b"}
    return [
        a_report(big, [40.0, 45.0, 39.0]),
        a_report(small, [80.0, 144.0, 78.0]),
        {"arm": flash.arm, "case": flash.name, "model": "qwen3-8b", **failure},
        a_report(mapped, [10.0, 8.0, 9.0]),
        a_report(bucket, [20.0, 16.0, 18.0]),
    ]


def row_of(made: list[result_rows.Row], case: str, metric: str) -> result_rows.Row:
    (row,) = [r for r in made if (r["case"], r["metric"]) == (case, metric)]
    return row


def test_rows_have_medians_spreads_and_ratios() -> None:
    made = result_rows.rows_of(all_reports())
    schema = {"arm", "model", "case", "metric", "unit", "median", "min", "max", "n", "ratios"}
    assert all(schema <= row.keys() for row in made)
    wall = row_of(made, "from BF16, mapped", "update_wall_ms")
    assert [wall[k] for k in ("median", "min", "max", "n", "unit")] == [9.0, 8.0, 10.0, 3, "ms"]
    assert wall["ratios"] == {
        "stock-bf16, buckets of 2 GiB": 4.444,
        "stock-bf16, buckets of 512 MiB": 8.889,
        "fp8rl, from BF16, bucket": 2.0,
    }
    assert wall["logprob_changed"] is True and wall["mapped_share"] == 1.0
    assert row_of(made, "buckets of 2 GiB", "update_wall_ms")["ratios"][
        "fp8rl, from BF16, mapped"
    ] == pytest.approx(9 / 40)
    rate = row_of(made, "from BF16, mapped", "update_gb_s")
    assert rate["median"] == pytest.approx(16.38147072 / 9e-3, rel=1e-4)
    assert rate["ratios"]["fp8rl, from BF16, bucket"] == pytest.approx(2.0, rel=1e-3)
    kernel = row_of(made, "from BF16, mapped", "quantize_tb_s")
    assert kernel["median"] == pytest.approx(25.81886976 / 6.5, rel=1e-4)
    share = row_of(made, "from BF16, mapped", "quantize_copy_fraction")
    assert share["median"] == pytest.approx(25.81886976 / 6.5 / 4.3, rel=1e-4)
    assert share["ratios"] == {}
    assert row_of(made, "from BF16, mapped", "update_floor_ms")["median"] == 6.0044
    failed = row_of(made, "buckets of 2 GiB, 4 layers", "failure")
    assert failed["sentence"] == "ended by SIGKILL: IndexError: a | b" and failed["n"] == 0


def test_arms_of_another_size_are_not_compared() -> None:
    big, _, flash, mapped, *_ = cases.CASES
    reports = [
        a_report(big, [40.0]),
        a_report(flash, [5.0], parameters=2_000_000_000, layers=4),
        a_report(mapped, [10.0]),
    ]
    made = result_rows.rows_of(reports)
    wall = [row for row in made if row["metric"] == "update_wall_ms"]
    assert [set(row["ratios"]) for row in wall] == [
        {"fp8rl, from BF16, mapped"},
        set(),
        {"stock-bf16, buckets of 2 GiB"},
    ]


ENVIRONMENT = {
    "device": "NVIDIA H200",
    "count": 1,
    "driver": "580.1",
    "sglang": "0.5.17",
    "torch": "2.11.0",
    "flashinfer": "0.6.15",
    "date": "2026-11-21",
    "commit": "abc1234",
    "command": "python examples/benchmarks/update.py",
}


def test_the_file_keeps_other_models_of_the_same_commit_only(tmp_path: Path) -> None:
    path = tmp_path / "results" / "update.json"
    made = result_rows.rows_of(all_reports())
    assert result_rows.kept(path, ENVIRONMENT, ["qwen3-8b"]) == []
    result_rows.save(path, ENVIRONMENT, made, [])
    content = json.loads(path.read_text())
    assert content["benchmark"] == "update"
    assert content["environment"] == ENVIRONMENT | {"copy_tb_s": 4.3}
    assert content["rows"] == made
    later = ENVIRONMENT | {"date": "2026-11-22"}
    assert result_rows.kept(path, later, ["qwen3-30b-a3b"]) == made
    assert result_rows.kept(path, later, ["qwen3-8b"]) == []
    assert result_rows.kept(path, later | {"commit": "def5678"}, ["qwen3-30b-a3b"]) == []
    assert [file.name for file in path.parent.iterdir()] == ["update.json"]


def test_the_file_keeps_rows_whichever_arms_ran_beside_them(tmp_path: Path) -> None:
    """One model may be run with fewer arms; its size and its number of updates must be the same."""
    path, made = tmp_path / "update.json", result_rows.rows_of(all_reports())
    result_rows.save(path, ENVIRONMENT, made, [])

    def kept_after(*words: str) -> list[result_rows.Row]:
        command = update.command(update.arguments([*words, "--output", "x"]))
        return result_rows.kept(path, ENVIRONMENT | {"command": command}, ["qwen3-30b-a3b"])

    assert kept_after("--arms", "fp8rl") == made
    assert kept_after("--arms", "stock-bf16", "fp8rl") == made
    for words in (["--updates", "3"], ["--arms", "fp8rl", "--layers", "2"]):
        assert kept_after(*words) == []


def test_the_readme_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    text = "a\n<!-- measured: update -->\n<!-- end -->\nb\n"
    assert readme.BLOCK.sub(readme.filled, text) == text  # nothing was measured yet
    result_rows.save(tmp_path / "update.json", ENVIRONMENT, result_rows.rows_of(all_reports()), [])
    once = readme.BLOCK.sub(readme.filled, text)
    assert readme.BLOCK.sub(readme.filled, once) == once
    assert once.startswith("a\n<!-- measured: update -->\n| qwen3-8b |")
    assert once.endswith("<!-- end -->\nb\n")
    lines = once.splitlines()
    assert (
        "| fp8rl, from BF16, mapped | 9.0 ms (8.0 to 10.0) | 4.44x | 6.0 ms | 6.5 ms | 92% "
        "| 1.00 GiB |" in lines
    )
    assert "| stock-bf16, buckets of 2 GiB | 40.0 ms (39.0 to 45.0) |  | 15.2 ms |  |  " in once
    assert (
        r"| stock-flash-rl, buckets of 2 GiB, 4 layers | fails: ended by SIGKILL: "
        r"IndexError: a \| b | | | | | |" in lines
    )
    for fact in ("NVIDIA H200", "580.1", "0.5.17", "2026-11-21", "abc1234", "4.30 TB/s"):
        assert fact in once


CRASHED = """\
WARNING nothing: ValueError is only mentioned here
[2026-11-21 11:00:00] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 1, in run
    raise IndexError("out of range")
IndexError: tuple index out of range

Traceback (most recent call last):
  File "arms.py", line 1, in main
RuntimeError: the engine is gone
"""


def test_the_sentence_of_a_log() -> None:
    assert processes.exception_in(CRASHED) == "IndexError: tuple index out of range"
    lone = "Traceback:\nValueError: a\nDuring handling:\ntorch.OutOfMemoryError: no memory\n"
    assert processes.exception_in(lone) == "torch.OutOfMemoryError: no memory"
    assert processes.exception_in("AssertionError\n") == "AssertionError"
    assert processes.exception_in("all is well") is None


ARM = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
job = json.loads(Path(sys.argv[1]).read_text())
assert job["layers"] <= 4 if job["arm"] == "stock-flash-rl" else job["layers"] == 36
stock = job["arm"].startswith("stock")
assert os.environ.get("SGLANG_PLUGINS") == ("none" if stock else None)
{body}
"""
HANGS = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path({pid!r}).write_text(str(child.pid))
time.sleep(600)
"""


def fake_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    (tmp_path / "arms.py").write_text(ARM.format(body=body))
    monkeypatch.setattr(update, "HERE", tmp_path)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)


def run_case(case: cases.Case, *more: str) -> result_rows.Report:
    return update.run_case(case, "qwen3-8b", update.arguments(["--models", "qwen3-8b", *more]))


def test_an_arm_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_arm(tmp_path, monkeypatch, "Path(job['report']).write_text(json.dumps(job))")
    report = run_case(cases.find("fp8rl", "from BF16, bucket"), "--updates", "12")
    assert report["updates"] == 12 and report["arm"] == "fp8rl" and "failure" not in report
    assert not Path(report["folder"]).exists()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("raise MemoryError('too much')", "exit status 1: MemoryError: too much"),
        (
            f"print({CRASHED!r}, flush=True); os.kill(os.getpid(), signal.SIGKILL)",
            "ended by SIGKILL: IndexError: tuple index out of range",
        ),
        ("pass", "ended without a report: its log names no exception"),
    ],
    ids=["raises", "is killed", "ends early"],
)
def test_an_arm_that_dies_becomes_a_row(
    body: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_arm(tmp_path, monkeypatch, body)
    report = run_case(cases.find("stock-flash-rl", "buckets of 2 GiB, 4 layers"))
    (row,) = result_rows.rows_of([report])
    assert (row["metric"], row["sentence"]) == ("failure", sentence)
    assert sentence in update.line(report, 1.0)


def test_an_arm_that_hangs_becomes_a_row_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    fake_arm(tmp_path, monkeypatch, HANGS.format(pid=str(pid)))
    report = run_case(cases.find("stock-bf16", "buckets of 2 GiB"), "--limit-s", "5")
    assert report["failure"] == "did not end within 5 s: its log names no exception"
    deadline = time.monotonic() + 30
    while is_running(int(pid.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = update.arguments([])
    assert options.models == list(models.MODELS) and options.arms == list(cases.ARMS)
    assert update.command(options) == "python examples/benchmarks/update.py"
    one = update.arguments(["--models", "qwen3-8b", "--output", "here/update.json"])
    assert update.command(one) == update.command(options)
    tried = update.arguments(
        ["--arms", "fp8rl", "--layers", "2", "--updates", "3", "--output", "x"]
    )
    assert update.command(tried).endswith("update.py --arms fp8rl --updates 3 --layers 2")
    with pytest.raises(SystemExit):
        update.arguments(["--layers", "2"])
    assert "name another --output" in capsys.readouterr().err


def test_a_copy_of_the_tree_names_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.COMMIT_VARIABLE, "abc1234")
    assert environment.commit(tmp_path) == "abc1234"
    monkeypatch.delenv(environment.COMMIT_VARIABLE)
    assert environment.commit(tmp_path) == "unknown"


def test_the_commit_that_was_named_goes_before_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy's repository is not that of the tree."""
    (tmp_path / ".git").mkdir()  # git itself would fail in it
    monkeypatch.setenv(environment.COMMIT_VARIABLE, "abc1234")
    assert environment.commit(tmp_path) == "abc1234"


def test_without_a_gpu_the_benchmark_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="on a machine with an NVIDIA GPU"):
        environment.environment("a command")
