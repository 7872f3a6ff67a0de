"""What the runs of training frameworks share: options, the environment's row, the log."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.frameworks import command
from benchmarks.run import RESULTS
from benchmarks.tables import trl


def test_a_study_leaves_a_log_a_picture_and_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = (RESULTS / "trl.jsonl").read_text()
    log, picture = tmp_path / "log.jsonl", tmp_path / "picture.png"
    monkeypatch.setattr(sys, "argv", ["study", "--log", str(log), "--picture", str(picture)])

    def measure() -> list[command.Row]:
        return [json.loads(line) for line in recorded.splitlines()]

    command.compare("A study.", Path("other"), Path("other"), measure, trl.table)
    assert log.read_text() == recorded
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == trl.table(measure()) + "\n"


def test_the_first_row_names_command_and_packages() -> None:
    row = command.environment_row("how", ["pytest"], bucket_bytes=1)
    assert (row["kind"], row["command"], row["bucket_bytes"]) == ("environment", "how", 1)
    assert row["pytest"] == version("pytest")
    assert {"device", "date", "commit", "sglang"} <= row.keys()


def test_a_log_without_a_default_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parser("A run.").parse_args([])
    assert "--log" in capsys.readouterr().err
