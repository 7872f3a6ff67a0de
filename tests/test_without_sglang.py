"""Without SGLang what needs it is skipped, and nothing else."""

import subprocess
import sys
from pathlib import Path

CONFTEST = "pytest_plugins = ['tests.without_sglang']\n"
SOURCES = {
    "test_needs.py": "import not_installed\n",
    "test_ours.py": "import sgl_fp8rl.not_there\n",
    "test_mixed.py": """
import pytest
from sgl_fp8rl.engine.compat import IncompatibleSGLangError
def test_runs(): pass
def test_fails(): assert False
def test_imports(): import not_installed
def test_imports_ours(): import tests.not_there
def test_is_told():
    raise IncompatibleSGLangError("it is not installed")
@pytest.mark.sglang
def test_is_marked(): assert False
""",
}


def test_what_needs_it_is_skipped(tmp_path: Path) -> None:
    for name, text in {"conftest.py": CONFTEST, **SOURCES}.items():
        (tmp_path / name).write_text(text)
    options = ["-q", "-rA", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "pytest", f"--rootdir={tmp_path}", *options, str(tmp_path)]
    root = Path(__file__).resolve().parents[1]
    out = subprocess.run(command, cwd=root, capture_output=True, text=True).stdout
    assert "1 passed, 4 skipped" in out and "2 failed" in out and "1 error" in out, out
    ended = [
        line.split(" - ")[0] for line in out.splitlines() if line.startswith(("FAILED", "ERR"))
    ]
    names = ["test_mixed.py::test_fails", "test_mixed.py::test_imports_ours", "test_ours.py"]
    assert sorted(line.rpartition("/")[2] for line in ended) == names
