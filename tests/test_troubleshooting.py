"""docs/troubleshooting.md quotes messages that the code writes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
PACKAGES = ("sgl_fp8rl", "server_args", "trainer_bridge")
LEAST = 6
"""Characters of a piece that is looked up; shorter ones stand between two values."""


def literals() -> Iterator[str]:
    """Every string of the packages; what an f-string fills in becomes ``...``."""
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
                elif isinstance(node, ast.JoinedStr):
                    yield "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "..."
                        for part in node.values
                    )


def quoted(text: str) -> list[str]:
    """Indented lines, and the first cells of tables that are code."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    return lines + re.findall(r"^\| `(.*?)` \|", text, re.MULTILINE)


def missing(messages: list[str]) -> list[str]:
    code = list(literals())
    return [
        piece
        for message in messages
        for piece in map(str.strip, message.split("..."))
        if len(piece) >= LEAST and not any(piece in literal for literal in code)
    ]


def test_messages_are_those_of_the_code() -> None:
    messages = quoted(PAGE.read_text())
    assert len(messages) > 40
    assert missing(messages) == [], f"quote these as the code writes them in {PAGE.name}"


def test_the_control_is_missed() -> None:
    assert missing(["version ... is not younger than the engine's version ..."]) != []
