"""What a test does at the calls of a function."""

from collections.abc import Callable
from typing import Any

import pytest


def before(patch: pytest.MonkeyPatch, owner: Any, name: str, hook: Callable[..., Any]) -> None:
    """Have ``hook`` called with the arguments of each call, before it."""
    call = getattr(owner, name)

    def hooked(*args: Any, **keywords: Any) -> Any:
        hook(*args, **keywords)
        return call(*args, **keywords)

    patch.setattr(owner, name, hooked)
