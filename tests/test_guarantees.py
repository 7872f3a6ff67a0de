"""Each promise of docs/guarantees.md is attacked by every fault of ``guarantees.json``.

``@pytest.mark.guarantee(promise, fault=...)`` marks the tests that do.
"""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROMISES = json.loads((ROOT / "tests" / "guarantees.json").read_text())
Marks = set[tuple[str, str]]  # promises, each with a fault


def marks_in(source: str) -> Iterator[tuple[str, str]]:
    """The marks of functions; without imports, as some need a GPU or SGLang."""
    for function in ast.parse(source).body:
        for call in getattr(function, "decorator_list", ()):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.guarantee":
                (promise,) = map(ast.literal_eval, call.args)
                (fault,) = (ast.literal_eval(keyword.value) for keyword in call.keywords)
                yield promise, fault


def marked() -> Marks:
    sources = (file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    return {mark for text in sources if "mark.guarantee" in text for mark in marks_in(text)}


def listed() -> Marks:
    return {(name, fault) for name, promise in PROMISES.items() for fault in promise["faults"]}


def test_every_fault_has_a_test() -> None:
    lost = sorted(listed() - marked())
    assert not lost, f"no test is marked with {lost}: mark one that attacks it so"


def test_every_mark_is_listed() -> None:
    unknown = sorted(marked() - listed())
    assert not unknown, f"add {unknown} to tests/guarantees.json"


def test_every_promise_is_on_the_page() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text()
    missing = [
        promise["title"] for promise in PROMISES.values() if f"**{promise['title']}.**" not in page
    ]
    assert not missing
