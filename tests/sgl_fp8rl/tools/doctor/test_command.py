"""The doctor's report: it tells of failures, and no check hides the others."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_fp8rl.tools.doctor import check, command
from sgl_fp8rl.tools.doctor.check import Check

OK = Check("a", "ok", "well")
WARN = Check("longer name", "warn", "hm")
FAIL = Check("b", "fail", "broken", "Traceback")


def run_with(monkeypatch: pytest.MonkeyPatch, *checks: Check) -> None:
    monkeypatch.setattr(command, "PROBES", {"planted": lambda: iter(checks)})


def test_the_report_and_the_exit_code_tell_of_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with(monkeypatch, OK, WARN)
    assert command.run() == 0
    first, second, _, counts = capsys.readouterr().out.splitlines()[-4:]
    assert first.split() == [OK.status, OK.name, OK.message]
    assert second.split(maxsplit=1) == [WARN.status, f"{WARN.name}  {WARN.message}"]
    assert "1 ok" in counts and "1 warn" in counts
    run_with(monkeypatch, OK, FAIL, WARN)
    assert command.run() == 1
    assert "1 ok, 1 fail, 1 warn" in capsys.readouterr().out
    run_with(monkeypatch, FAIL)
    assert command.run(as_json=True) == 1
    assert json.loads(capsys.readouterr().out) == {
        "checks": [{"name": "b", "status": "fail", "message": "broken", "detail": "Traceback"}]
    }


@pytest.mark.parametrize(
    "error", [OSError("no such thing"), SystemExit("sgl-fp8rl cannot start: no such thing")]
)
def test_a_check_that_raises_is_a_failure_and_the_others_still_run(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def broken() -> Iterator[Check]:
        yield OK
        raise error

    monkeypatch.setattr(command, "PROBES", {"broken": broken, "fine": lambda: iter([WARN])})
    first, failure, last = command.run_checks()
    assert (first, last) == (OK, WARN)
    assert (failure.name, failure.status) == ("broken", "fail")
    assert type(error).__name__ in failure.message and str(error) in failure.message
    assert "Traceback" in failure.detail


def test_without_sglang_the_engine_checks_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "installed", {"torch": "2.11.0"}.get)
    needing = {name: command.PROBES[name] for name in command.NEED_SGLANG}
    monkeypatch.setattr(command, "PROBES", needing)
    assert [(check.name, check.status) for check in command.run_checks()] == [
        (name, "skip") for name in command.NEED_SGLANG
    ]


@pytest.mark.sglang
def test_this_installation_is_well(tmp_path: Path) -> None:
    """The console command itself, with the real SGLang where there is one."""
    doctor_ = [sys.executable, "-m", "sgl_fp8rl.tools.cli", "doctor", "--json"]
    child = subprocess.run(doctor_, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert child.stdout, child.stderr
    report = json.loads(child.stdout)["checks"]
    assert [check for check in report if check["status"] == "fail"] == []
    assert child.returncode == 0
    assert {"ok"} == {check["status"] for check in report if "on cpu" in check["name"]}
