"""Tries a step and returns its error, which other ranks of an engine or a trainer wait for."""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def attempt(action: Callable[..., T], *args: Any) -> tuple[T | None, Exception | None]:
    """Call ``action``; its caller passes an error on, to ranks that would wait forever otherwise.

    Returns:
        what it returned and None, or None and what it raised.
    """
    try:
        return action(*args), None
    except Exception as error:  # noqa: BLE001  (whatever it is, the other ranks wait for it)
        return None, error
