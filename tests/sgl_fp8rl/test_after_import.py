"""What is called once a module has been imported."""

import importlib
import sys
from pathlib import Path

import pytest

from sgl_fp8rl.after_import import after_import


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of one that can be imported, in a package."""
    package = tmp_path / "to_import"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "module.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("to_import", "to_import.module"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)  # and again at the end
    return "to_import.module"


def test_a_module_is_waited_for_and_not_imported(module: str) -> None:
    called: list[int] = []
    after_import(module, lambda: called.append(sys.modules[module].VALUE))
    assert called == [] and module not in sys.modules
    importlib.import_module(module)
    assert called == [1]
    importlib.reload(sys.modules[module])
    assert called == [1]
    after_import(module, lambda: called.append(2))
    assert called == [1, 2]


def test_a_failure_is_the_imports(module: str) -> None:
    def fail() -> None:
        raise ValueError("reason")

    after_import(module, fail)
    with pytest.raises(ValueError, match="reason"):
        importlib.import_module(module)
    assert importlib.import_module(module).VALUE == 1


def test_a_module_that_is_not_there_is_waited_for(module: str, tmp_path: Path) -> None:
    called: list[int] = []
    after_import("to_import.later", lambda: called.append(1))
    with pytest.raises(ModuleNotFoundError, match="later"):
        importlib.import_module("to_import.later")
    (tmp_path / "to_import" / "later.py").touch()
    importlib.invalidate_caches()
    importlib.import_module("to_import.later")
    assert called == [1]
