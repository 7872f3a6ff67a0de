"""Values that another process sent: how they are checked, and how an error quotes them."""

import reprlib
from typing import Any

LONGEST_EXCERPT = 500
"""Characters of a value that an error quotes."""
_EXCERPT = reprlib.Repr()
_EXCERPT.maxstring = _EXCERPT.maxother = 100


def excerpt(value: Any) -> str:
    """A value as an error quotes it: short, however large or nested."""
    text = _EXCERPT.repr(value)
    return text if len(text) <= LONGEST_EXCERPT else f"{text[:LONGEST_EXCERPT]}..."


def are_names(value: Any) -> bool:
    """Whether a value is a list of strings."""
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def are_whole(value: Any, least: int) -> bool:
    """Whether a value is a list of whole numbers from ``least`` up that an int64 holds."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        return False
    return not value or (least <= min(value) and max(value) < 2**63)
