"""A failed test shows what its engines printed, and a test that passes does not."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.engine import harness

START_S = 1e9
"""When the test began, as a time of files."""


@pytest.mark.parametrize("failed", [True, False])
def test_logs_that_grew_are_shown(
    failed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = {tmp_path / "of_now": START_S + 1, tmp_path / "of_before": START_S - 1}
    for log, time in logs.items():
        log.write_text(f"port taken, {log.name}")
        os.utime(log, (time, time))
    monkeypatch.setattr(harness, "logs", {*logs, tmp_path / "absent"})
    report: Any = SimpleNamespace(failed=failed, sections=[("stdout", "kept")])
    call: Any = SimpleNamespace(start=START_S)
    hook = conftest.pytest_runtest_makereport(call)
    next(hook)
    with pytest.raises(StopIteration) as end:
        hook.send(report)
    assert end.value.value is report
    shown = [(f"{tmp_path.name}/of_now", "port taken, of_now")] if failed else []
    assert report.sections == [("stdout", "kept"), *shown]
