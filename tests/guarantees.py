"""What an update promises, and the last run that showed it: ``python -m tests.guarantees``.

A test that attacks a promise is marked ``@pytest.mark.guarantee("all-or-none", fault="...")``. The
recorded runs (``tests/run.py``, ``tests/gpu/record.py``) keep when each passed last; this module
writes the table of docs/guarantees.md from marks and records. Standard library only.
"""

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guarantees.md"
BLOCK = re.compile(r"(<!-- guarantees -->\n).*?(<!-- end -->)", re.DOTALL)
CPU, GPU = (ROOT / "tests" / f"guarantees_{kind}.json" for kind in ("cpu", "gpu"))
PROMISES = {
    "check-first": "Check first",
    "one-version": "Requests in flight",
    "in-place": "In place",
    "all-or-none": "All or none",
    "quarantine": "Quarantine",
    "malformed": "Malformed messages",
    "released": "Release and resume",
    "runs": "Runs and versions",
    "rollouts": "Rollouts",
    "no-bypass": "No bypass",
    "several-engines": "Several engines",
    "memory": "Memory ends with its owner",
    "soak": "All of them together",
}
"""Name in a mark, and on the page."""
Record = dict[str, list[str]]
"""Date (UTC) and commit of the last pass of each marked test, and the versions of SGLang with which
it passed, by its node id; older records name no version."""


class Mark(NamedTuple):
    """A test that attacks a promise."""

    promise: str
    fault: str
    node: str


def marks(folder: Path = ROOT / "tests") -> list[Mark]:
    """The marks in the tests' sources, in the order of the promises."""
    found = [mark for file in sorted(folder.rglob("test_*.py")) for mark in _marks_in(file)]
    order = list(PROMISES)
    return sorted(found, key=lambda mark: order.index(mark.promise))


def _marks_in(file: Path) -> Iterator[Mark]:
    for function in ast.parse(file.read_text()).body:
        for call in getattr(function, "decorator_list", ()):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.guarantee":
                (promise,) = map(ast.literal_eval, call.args)
                (fault,) = (ast.literal_eval(keyword.value) for keyword in call.keywords)
                assert isinstance(function, ast.FunctionDef)
                yield Mark(promise, fault, f"{file.relative_to(ROOT).as_posix()}::{function.name}")


def outcomes(xml: Path) -> dict[str, bool]:
    """Whether each test of a JUnit file passed, all its parameters together.

    Skipped tests are absent.
    """
    passed: dict[str, bool] = {}
    for case in ElementTree.parse(xml).iter("testcase") if xml.exists() else ():
        if case.find("skipped") is not None:
            continue
        name = case.get("name", "").partition("[")[0]
        node = f"{case.get('classname', '').replace('.', '/')}.py::{name}"
        is_well = case.find("failure") is None and case.find("error") is None
        passed[node] = passed.get(node, True) and is_well
    return passed


def keep(path: Path, runs: Iterable[tuple[str, Mapping[str, bool]]], commit: str) -> None:
    """Note in a record which marked tests passed in every one of these runs that ran them.

    Args:
        runs: the version of SGLang and the outcomes of each.
    """
    ran, failed = defaultdict[str, set[str]](set), set[str]()
    for sglang, run in runs:
        for node, is_well in run.items():
            ran[node].add(sglang)
            if not is_well:
                failed.add(node)
    marked = {mark.node for mark in marks()}
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    record = {node: last for node, last in read(path).items() if node in marked}
    for node in (marked & ran.keys()) - failed:
        record[node] = [today, commit, *sorted(ran[node])]
    path.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")


def read(path: Path) -> Record:
    """A record; empty where no run was recorded yet."""
    return json.loads(path.read_text()) if path.exists() else {}  # type: ignore[no-any-return]


def table(found: list[Mark], cpu: Record, gpu: Record) -> str:
    """The promises with the faults that attack them, as Markdown."""

    def last(record: Record, node: str, is_run_there: bool) -> str:
        if not is_run_there:
            return "-"
        if node not in record:
            return "not recorded"
        date, commit, *versions = record[node]
        return f"{date}, {commit}" + (f" ({', '.join(versions)})" if versions else "")

    lines = [
        "| promise | fault | test | last pass on a CPU | on a GPU |",
        "|---|---|---|---|---|",
    ]
    for promise, fault, node in found:
        on_gpu = node.startswith("tests/gpu/")
        lines.append(
            f"| {PROMISES[promise]} | {fault} | `{node}` | {last(cpu, node, not on_gpu)} "
            f"| {last(gpu, node, on_gpu)} |"
        )
    return "\n".join(lines)


def filled(page: str) -> str:
    """The page with its table made anew."""
    made = table(marks(), read(CPU), read(GPU))
    return BLOCK.sub(lambda match: f"{match[1]}{made}\n{match[2]}", page)


def write_page() -> None:
    """Make the table of the page anew."""
    PAGE.write_text(filled(PAGE.read_text()))


if __name__ == "__main__":
    write_page()
