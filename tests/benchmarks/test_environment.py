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
