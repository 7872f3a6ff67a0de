"""docs/architecture.md names every folder, from the lowest layer up; modules say what they do."""

import ast
import re
from pathlib import Path

from tests.test_imports import PACKAGES, ROOT, layer_of

PAGE = ROOT / "docs" / "architecture.md"


def modules() -> list[Path]:
    return sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))


def test_every_folder_has_a_line() -> None:
    named = re.findall(r"^\| `([\w/]+)` \| .+ \|$", PAGE.read_text(), re.M)
    assert len(named) == len(set(named))
    assert set(named) == {str(file.parent.relative_to(ROOT)) for file in modules()}
    layers = [layer_of(folder.replace("/", ".")) for folder in named]
    assert layers == sorted(layers), "the page does not list folders from the lowest layer up"


def test_every_module_says_what_it_does() -> None:
    silent = [str(file) for file in modules() if not ast.get_docstring(ast.parse(file.read_text()))]
    assert not silent
