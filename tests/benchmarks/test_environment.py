"""What is recorded of the machine and of the checkout."""

from pathlib import Path

import pytest

from benchmarks import environment


def test_a_copy_of_the_tree_names_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".git").mkdir()  # a copy's repository is not that of the tree; git would fail in it
    monkeypatch.setenv(environment.COMMIT_VARIABLE, "abc1234")
    assert environment.commit(tmp_path) == "abc1234"
    monkeypatch.delenv(environment.COMMIT_VARIABLE)
    (tmp_path / ".git").rmdir()
    assert environment.commit(tmp_path) == "unknown"


def test_gpus_and_their_driver_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(environment.COMMIT_VARIABLE, "abc1234")
    without = environment.environment("a command")
    assert without["device"] == without["cpu"] and "driver" not in without
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.1'\necho 'NVIDIA H200, 580.1'\n")
    smi.chmod(0o755)
    found = environment.environment("a command")
    assert (found["device"], found["count"], found["driver"]) == ("NVIDIA H200", 2, "580.1")
