"""Tests that need an NVIDIA GPU; without one they are skipped.

With TRITON_INTERPRET=1 the kernel tests run on the CPU instead, through Triton's interpreter;
``tests/sgl_fp8rl/ops/test_triton_kernels.py`` starts them so. ``sizes.py`` says which tests of
engines can be rehearsed there, too.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import triton

with suppress(ImportError):  # its platform must be resolved before our modules are loaded
    import sglang  # noqa: F401

from tests.gpu.sizes import REHEARSAL, REHEARSED

INTERPRETED = triton.knobs.runtime.interpret
Record = Callable[[str, object], None]
"""pytest's ``record_property``."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    workers = config.pluginmanager.hasplugin("xdist")
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker("gpu")
        case = getattr(item, "callspec", None)
        if workers and case and "run" in case.indices:
            # schedule.py: an engine of this fixture is of one worker
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}-{case.indices['run']}"))
        if INTERPRETED:
            if "exhaustive" in item.name:
                item.add_marker(pytest.mark.skip(reason="too much for Triton's interpreter"))
        elif not torch.cuda.is_available() and not (REHEARSAL and item.path.name in REHEARSED):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run."""
    if INTERPRETED:
        from tests.gpu import interpreter

        interpreter.correct()
        return "cpu"
    return "cuda"


@pytest.fixture(params=["small", "large"])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of both sizes for the KV cache, however few tokens there are."""
    from sgl_fp8rl.ops import kv_int8_triton

    monkeypatch.setattr(kv_int8_triton, "_MANY", 0 if request.param == "large" else 2**62)
