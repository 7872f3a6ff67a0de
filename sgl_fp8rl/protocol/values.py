"""Values that another process sent: how they are checked, and how an error quotes them."""

import reprlib
from typing import Any

_EXCERPT = reprlib.Repr()
_EXCERPT.maxstring = _EXCERPT.maxother = 100


def excerpt(value: Any) -> str:
    """A value as an error quotes it: short, however large or nested."""
    return _EXCERPT.repr(value)


def are_names(value: Any) -> bool:
    """Whether a value is a list of strings."""
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
