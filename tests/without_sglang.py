"""What is skipped where SGLang is not installed, as in the environment of ``make quick``.

A module that cannot be imported for want of a package, a test that ends so, and one that is marked
``sglang``. Our packages and those of the extra ``quick`` must be there. ``conftest.py`` registers
these hooks.
"""

from collections.abc import Generator, Iterable
from pathlib import Path

import pytest

from sgl_fp8rl.engine.compat import IncompatibleSGLangError

REQUIRED = {
    *("sgl_fp8rl", "server_args", "trainer_bridge", "benchmarks", "examples", "tests"),
    *("torch", "numpy", "safetensors", "transformers", "zstandard"),
}


def missing(error: BaseException | None) -> str | None:
    """The package for want of which this error was raised, or None."""
    while error is not None:
        if isinstance(error, IncompatibleSGLangError):
            return "sglang"
        if isinstance(error, ModuleNotFoundError) and error.name:
            package = error.name.partition(".")[0]
            return None if package in REQUIRED else package
        error = error.__cause__ or error.__context__
    return None


class _Module(pytest.Module):
    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except (self.CollectError, IncompatibleSGLangError) as error:
            if package := missing(error):
                pytest.skip(f"needs {package}", allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return _Module.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("sglang"):
            item.add_marker(pytest.mark.skip(reason="needs sglang"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    return (yield from _skips())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    return (yield from _skips())


def _skips() -> Generator[None, None, None]:
    try:
        return (yield)
    except Exception as error:
        if package := missing(error):
            pytest.skip(f"needs {package}")
        raise
