"""The runner of `make test`: one suite's failure hides no other's result."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests import run

TESTS = {
    "test_good.py": "def test_one(): pass\ndef test_two(): pass\n",
    "test_bad.py": "import pytest\ndef test_three(): assert not 'well'\n"
    "def test_four(): pytest.skip('not here')\n",
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with tests, and an environment for the version 1.0 alone."""
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text)
    environment = tmp_path / ".venv" / "1.0"
    (environment / "bin").mkdir(parents=True)
    python = environment / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (environment / ".ready").touch()
    monkeypatch.setattr(run, "ROOT", tmp_path)
    return tmp_path


def test_what_quick_leaves_out_exists() -> None:
    """pytest says nothing of a ``--deselect`` that matches no test."""
    here = Path(__file__).parents[1]
    for test in run.SLOW:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (here / file).read_text(), test


def of_plan(monkeypatch: pytest.MonkeyPatch, *suites: run.Suite) -> int:
    monkeypatch.setattr(run, "PLANS", {"test": suites})
    monkeypatch.setattr(sys, "argv", ["run.py", "test"])
    return run.main()


def test_every_suite_is_reported(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root)
    bad, good, absent = (
        run.Suite("bad", "1.0", ("test_bad.py",)),
        run.Suite("good", "1.0", ("test_good.py",)),
        run.Suite("good", "2.0", ("test_good.py",)),
    )
    assert of_plan(monkeypatch, bad, good, absent) == 1
    out = capfd.readouterr().out
    assert "[bad 1.0] " in out and "[good 1.0] " in out
    rows = [[cell.strip() for cell in line.split("|")[1:6]] for line in out.splitlines()]
    assert ["bad", "1.0", "FAILED", "0", "1"] in rows
    assert ["good", "1.0", "passed", "2", "0"] in rows
    assert ["good", "2.0", "NOT INSTALLED", "0", "0"] in rows
    assert "- [bad 1.0] test_bad.py::test_three: AssertionError: assert not 'well'" in out


@pytest.mark.parametrize("failure", ["raise RuntimeError({})", "assert 1 == 2, {}"])
def test_the_cause_is_reported_where_it_is_said_last(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], failure: str
) -> None:
    monkeypatch.chdir(root)
    text = "\n\n".join(["rank 1 ended", *["Traceback"] * 999, "in step", "ValueError: too late"])
    failure = failure.format(repr(text))
    (root / "test_rank.py").write_text(f"def test_rank(): {failure}\n")
    assert of_plan(monkeypatch, run.Suite("ranks", "1.0", ("test_rank.py",))) == 1
    reported = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("- ["))
    assert reported.count("Traceback") == 1
    assert "rank 1 ended" in reported and reported.endswith("in step / ValueError: too late")


def test_a_skipped_test_fails_a_suite_that_may_not_skip(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root)
    (root / "test_skips.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('not here')\n"
    )
    suite = run.Suite("skips", "2.0", ("test_skips.py",), environment="1.0")
    assert of_plan(monkeypatch, suite) == 0
    assert of_plan(monkeypatch, replace(suite, may_skip=False)) == 1
    assert "| skips | 2.0 | FAILED: tests were skipped |" in capfd.readouterr().out


def test_a_suite_that_ends_without_results_has_failed(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root)
    (root / "test_dies.py").write_text("import os\ndef test_dies(): os._exit(0)\n")
    assert of_plan(monkeypatch, run.Suite("dies", "1.0", ("test_dies.py",))) == 1
    assert "| dies | 1.0 | FAILED" in capfd.readouterr().out


def test_what_a_version_leaves_out_is_there() -> None:
    """pytest ignores without a word what is misspelt."""
    assert all((run.ROOT / path).exists() for path in run.MEGATRON)
    cases = (run.ROOT / "tests/engine/test_updates.py").read_text()
    assert all(f'id="{layout}"' in cases for layout in run.LAYOUTS_OF_OLDEST)
