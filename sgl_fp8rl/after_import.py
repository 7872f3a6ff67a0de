"""Calls back once a module has been imported, and imports none itself."""

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Then = Callable[[], None]


class _Watch(MetaPathFinder):
    """Leaves finding to the other finders."""

    def __init__(self) -> None:
        self.calls: dict[str, Then] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in self.calls:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_call(module: ModuleType) -> None:
                load(module)
                self.calls.pop(name)()

            spec.loader.exec_module = load_and_call  # type: ignore[method-assign]
        return spec


_watch = _Watch()


def after_import(name: str, then: Then) -> None:
    """Call ``then`` at the end of the import of a module, or now if it is imported.

    Args:
        name: at most one call waits for a module; a later one replaces it.
        then: what it raises, the import raises.
    """
    if name in sys.modules:
        then()
        return
    _watch.calls[name] = then
    if _watch not in sys.meta_path:
        sys.meta_path.insert(0, _watch)
