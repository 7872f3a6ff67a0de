"""docs/guarantees.md: each promise has a test, and the page states what the records hold."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import guarantees
from tests.guarantees import Mark

SOURCE = """
import pytest
@pytest.mark.parametrize("n", [1, 2])
def test_both(n): pass
@pytest.mark.parametrize("n", [1, 2])
def test_one(n): assert n == 1
def test_absent(): pytest.skip("not here")
"""
NODES = [f"test_a.py::test_{name}" for name in ("both", "one", "absent")]


@pytest.fixture(scope="module")
def xml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pytest itself writes of two tests and one that is skipped."""
    folder = tmp_path_factory.mktemp("tests")
    (folder / "test_a.py").write_text(SOURCE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=a.xml"]
    child = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert child.returncode == 1, child.stdout + child.stderr
    return folder / "a.xml"


def test_each_promise_has_a_test() -> None:
    assert {mark.promise for mark in guarantees.marks()} == set(guarantees.PROMISES)


def test_the_page_is_made_from_marks_and_records() -> None:
    page = guarantees.PAGE.read_text()
    assert len(guarantees.BLOCK.findall(page)) == 1
    assert guarantees.filled(page) == page, "run python -m tests.guarantees"


def test_marks_are_read_from_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarantees, "ROOT", tmp_path)
    source = '@pytest.mark.guarantee("in-place", fault="a {}")\ndef test_{}(): pass\n'
    (tmp_path / "test_m.py").write_text(source.format("moved block", "moved") + SOURCE)
    assert guarantees.marks(tmp_path) == [
        Mark("in-place", "a moved block", "test_m.py::test_moved")
    ]


def test_a_test_passed_where_all_its_parameters_did(xml: Path) -> None:
    assert guarantees.outcomes(xml) == {NODES[0]: True, NODES[1]: False}
    assert guarantees.outcomes(xml.with_name("none.xml")) == {}


def test_a_record_keeps_the_last_pass(
    xml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked = [Mark("in-place", "a fault", node) for node in NODES]
    monkeypatch.setattr(guarantees, "marks", lambda: marked)
    path, old = tmp_path / "record.json", ["2026-01-01", "abc1234"]
    path.write_text(json.dumps({**dict.fromkeys(NODES, old), "test_gone.py::test_a": old}))
    later, sooner = guarantees.outcomes(xml), {NODES[0]: True}
    guarantees.keep(path, [("0.5.23", later), ("0.5.17", sooner)], "def5678")
    record = guarantees.read(path)
    assert set(record) == set(NODES)
    assert record[NODES[0]][1:] == ["def5678", "0.5.17", "0.5.23"]
    assert [record[node] for node in NODES[1:]] == [old, old]
    guarantees.keep(path, [("0.5.17", {NODES[0]: True}), ("0.5.23", {NODES[0]: False})], "fff0000")
    assert guarantees.read(path) == record  # one version of SGLang failed it


def test_a_row_states_where_its_test_runs() -> None:
    nodes = "tests/test_a.py::test_a", "tests/gpu/test_b.py::test_b"
    found = [Mark("in-place", "a fault", node) for node in nodes]
    rows = guarantees.table(found, {nodes[0]: ["2026-01-01", "abc1234"]}, {}).splitlines()[2:]
    cells = [[cell.strip() for cell in row.split("|")[4:6]] for row in rows]
    assert cells == [["2026-01-01, abc1234", "-"], ["-", "not recorded"]]


def test_a_row_names_the_versions_that_passed() -> None:
    found = [Mark("in-place", "a fault", NODES[0])]
    record = {NODES[0]: ["2026-01-01", "abc1234", "0.5.17", "0.5.23"]}
    assert "| 2026-01-01, abc1234 (0.5.17, 0.5.23) |" in guarantees.table(found, record, {})
