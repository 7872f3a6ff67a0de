"""SGLang's own configuration, as an engine of some arguments would see it, and another format."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

with suppress(ImportError):  # its platform must be resolved before our modules are loaded
    import sglang  # noqa: F401

if TYPE_CHECKING:
    from sgl_fp8rl.formats.weight_format import WeightFormat
    from tests.sgl_fp8rl.resolving import Start

Publish = Callable[..., None]


@pytest.fixture(autouse=True)
def _no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test put the hooks of an engine on in this process, which they would all have then."""
    if "sglang" in sys.modules:
        monkeypatch.setattr("sgl_fp8rl.engine.startup.activate.activate", lambda: None)


@pytest.fixture
def publish() -> Iterator[Publish]:
    """Publish SGLang's ``ServerArgs`` with these fields, until the test ends; a later call wins."""
    import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)
    from sglang.srt.runtime_context import get_context

    with ExitStack() as stack:

        def published(**fields: Any) -> None:
            stack.enter_context(get_context().override_server_args(**fields))

        published()
        yield published


@pytest.fixture
def start(tmp_path: Path) -> Iterator["Start"]:
    """SGLang's arguments as it resolves them, on a GPU of any compute capability."""
    from tests.sgl_fp8rl import resolving

    with resolving.start(tmp_path) as made:
        yield made


@pytest.fixture
def other_format(monkeypatch: pytest.MonkeyPatch) -> "WeightFormat":
    """A weight format that the package does not have, added to its tables."""
    from tests.sgl_fp8rl.formats.other_format import register

    return register(monkeypatch)
