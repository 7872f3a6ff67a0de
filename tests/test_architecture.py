"""docs/architecture.md maps every module of the three packages, and none that does not exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("sgl_fp8rl", "server_args", "trainer_bridge")


def mapped(text: str) -> list[str]:
    """Paths such as ``sgl_fp8rl/gemm/tune.py``, in the order of the page."""
    found: list[str] = []
    folder = ""
    for line in text.splitlines():
        if heading := re.fullmatch(r"#+ (.*)", line):
            folder = heading[1]
        elif row := re.fullmatch(r"\| `(\w+\.py)` \| .+ \|", line):
            found.append(f"{folder}/{row[1]}")
    return found


def modules() -> set[str]:
    """All modules but the ``__init__`` of folders."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    return {str(file.relative_to(ROOT)) for file in files if file.name != "__init__.py"}


def test_every_module_has_a_line() -> None:
    missing = sorted(modules() - set(mapped(PAGE.read_text())))
    folders = [f"under '### {m.rpartition('/')[0]}': | `{Path(m).name}` | ... |" for m in missing]
    assert not missing, "add to docs/architecture.md, " + "; ".join(folders)


def test_every_line_names_a_module() -> None:
    lines = mapped(PAGE.read_text())
    gone = sorted(set(lines) - modules())
    assert not gone, f"remove from docs/architecture.md: {', '.join(gone)}"
    assert len(lines) == len(set(lines)), "a module has two lines in docs/architecture.md"
