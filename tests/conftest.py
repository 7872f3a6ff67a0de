"""What every test shares: few threads, no network, and red runs that stay red."""

import os
import signal
import sys
from collections.abc import Generator, Iterator
from importlib.util import find_spec

# Set before torch is imported, and inherited by every process that a test starts: the machines
# that run these tests have few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Checkpoints are made by the tests themselves.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# NIXL is refused where nobody names UCX's transports: tests reach this host alone.
os.environ.setdefault("UCX_TLS", "tcp,sm,self")

import pytest
from hypothesis import settings

from sgl_fp8rl.engine import compat
from sgl_fp8rl.options import current_options
from tests import without_sglang
from trainer_bridge.session.kept import KEPT

# A pytest that is ended from outside still ends the servers that it started.
signal.signal(signal.SIGTERM, signal.default_int_handler)
# A shell has what it runs in the background ignore it, and with that all that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Derandomized: a run that fails fails again. No database: tests leave no files behind.
settings.register_profile("fp8rl", deadline=None, derandomize=True, database=None, max_examples=50)
settings.load_profile("fp8rl")


ENGINE_TIMEOUT_S = 900
"""Of a test with an engine that names no other limit: one may take minutes to start."""


def pytest_configure(config: pytest.Config) -> None:
    if find_spec("sglang") is None:
        config.pluginmanager.register(without_sglang)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("engine") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show with a failure what the engines printed meanwhile."""
    report = yield
    harness = sys.modules.get("tests.engine.harness")
    if report.failed and harness is not None:
        grown = (log for log in harness.logs if log.exists() and log.stat().st_mtime >= call.start)
        report.sections += [(f"{log.parent.name}/{log.name}", harness.tail(log)) for log in grown]
    return report


@pytest.fixture(autouse=True)
def _lazy_symbols() -> Iterator[None]:
    """Let each test look SGLang's symbols up, as another one may have patched SGLang itself."""
    compat.forget()
    before = set(vars(compat))
    yield
    for name in set(vars(compat)) - before:
        delattr(compat, name)


@pytest.fixture(autouse=True)
def _fresh_options() -> None:
    """Let each test read the ``FP8RL_*`` variables that it sets."""
    current_options.cache_clear()


@pytest.fixture(autouse=True)
def _connections_end(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget the engines at addresses: the kernel gives the port of one that ended to a later test.

    Those of ``engine`` tests serve several tests; who stops them calls ``close``.
    """
    yield
    if request.node.get_closest_marker("engine") is None:
        KEPT.close_all(timeout_s=0.0)
