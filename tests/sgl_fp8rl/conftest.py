"""SGLang's own configuration, as an engine of some arguments would see it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

Publish = Callable[..., None]


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
