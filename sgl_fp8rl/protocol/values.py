"""What another process or a caller gives us: how it is checked, and how an error quotes
it; and an error as a value.

Numbers and token ids may be Python's, NumPy's and torch's; nothing is coerced: text, floats and
booleans are not token ids, and True is not a number. All else is a ValueError that begins with the
name that it was given.
"""

import reprlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")

LONGEST_EXCERPT = 500
"""Characters of a value that an error quotes."""
_EXCERPT = reprlib.Repr()
_EXCERPT.maxstring = _EXCERPT.maxother = 100
LARGEST_WHOLE = 2**63 - 1
"""What an int64 holds."""
_NO_ID = LARGEST_WHOLE + 1


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


def attempt(action: Callable[..., T], *args: Any) -> tuple[T | None, Exception | None]:
    """Call ``action``; its caller passes an error on, to ranks that would wait forever otherwise.

    Returns:
        what it returned and None, or None and what it raised.
    """
    try:
        return action(*args), None
    except Exception as error:  # noqa: BLE001  (whatever it is, the other ranks wait for it)
        return None, error


def as_python(value: Any) -> Any:
    """NumPy's and torch's numbers and arrays as Python's numbers and lists; all else as it is."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray | torch.Tensor) else value


def whole(name: str, value: Any, least: int, most: int = LARGEST_WHOLE) -> int:
    """A whole number.

    Args:
        name: what the error calls it.

    Raises:
        ValueError: it is of another kind (2.0 and True are), or out of range.
    """
    found = as_python(value)
    if _is_whole(found) and least <= found <= most:
        return int(found)
    bounds = f"from {least} up" if most == LARGEST_WHOLE else f"from {least} to {most}"
    raise ValueError(f"{name} is {shown(value)}; pass a whole number {bounds}")


def real(name: str, value: Any, *, above: bool = False, most: float = sys.float_info.max) -> float:
    """A finite number from 0, or ``above`` 0, to ``most``."""
    found = as_python(value)
    if (
        (isinstance(found, float) or _is_whole(found))
        and 0 <= found <= most
        and (found > 0 or not above)
    ):
        return float(found)
    bounds = "above 0" if above else "from 0 up"
    upper = "" if most == sys.float_info.max else f", at most {most:g}"
    raise ValueError(f"{name} is {shown(value)}; pass a finite number {bounds}{upper}")


def seconds(name: str, value: Any) -> float | None:
    """A timeout; None waits for ever."""
    return None if value is None else real(name, value, above=True)


def flag(name: str, value: Any) -> bool:
    """A boolean, also as 0 or 1."""
    found = as_python(value)
    if isinstance(found, int) and found in (0, 1):
        return bool(found)
    raise ValueError(f"{name} is {shown(value)}; pass True or False")


def token_ids(name: str, row: Any) -> list[int]:
    """The token ids of one sequence.

    Args:
        name: what the error calls it.
        row: a list, or a one-dimensional array or tensor, of integers.

    Raises:
        ValueError: it is of another kind, as text, bytes and a tokenizer's dict are, or it holds
            text, floats or booleans.
    """
    found = as_python(row)
    if is_listed(found):
        ids = list(found)
        if not set(map(type, ids)) <= {int}:  # of most rows it is, and to look at each takes long
            ids = [as_python(each) for each in ids]
            ids = [int(each) if _is_whole(each) else _NO_ID for each in ids]
        if not ids or max(-min(ids), max(ids)) <= LARGEST_WHOLE:
            return ids
    raise ValueError(
        f"{name} is {shown(row)}; pass token ids: a list, or a one-dimensional array or tensor, "
        f"of integers (what a tokenizer or its chat template gives as input_ids, without padding)"
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def token_rows(name: str, rows: Any) -> list[list[int]]:
    """The token ids of several sequences.

    Args:
        rows: a list of what ``token_ids`` takes, or a two-dimensional array or tensor.
    """
    return [token_ids(f"{name}[{index}]", row) for index, row in enumerate(listed(name, rows))]


def listed(name: str, rows: Any) -> Sequence[Any]:
    """The entries of a list, an array or a tensor."""
    found = as_python(rows)
    if is_listed(found):
        return found  # type: ignore[no-any-return]
    raise ValueError(f"{name} is {shown(rows)}; pass a list, or an array or a tensor of rows")


def is_listed(value: Any) -> bool:
    """Whether it is a sequence, and not text or bytes."""
    text = str | bytes | bytearray | memoryview
    return isinstance(value, Sequence) and not isinstance(value, text)


def shown(value: Any) -> str:
    """A value as an error quotes it, on one line: an array's own has several."""
    return " ".join(excerpt(value).split())
