"""Rows of a batch: a slice, a mask or indices, as lists, arrays or tensors."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

Rows: TypeAlias = "slice | Sequence[int] | Sequence[bool] | np.ndarray[Any, Any] | torch.Tensor"


def indices_of(name: str, rows: Any, count: int) -> list[int]:
    """The indices that ``rows`` names, of ``count`` sequences.

    Args:
        name: of what has the rows, for errors.
        rows: a slice; or a bool for each sequence; or integers, of which negative ones count from
            the end.

    Raises:
        ValueError: it is of another kind or shape, or an index is out of range.
    """
    if isinstance(rows, slice):
        return list(range(count)[rows])
    try:
        given = torch.as_tensor(rows)
    except (TypeError, ValueError, RuntimeError):
        given = None
    if given is not None and given.ndim == 1:
        if given.dtype == torch.bool and len(given) == count:
            return torch.nonzero(given)[:, 0].tolist()
        is_whole = given.dtype != torch.bool and not given.is_floating_point()
        if not len(given) or (is_whole and bool(((-count <= given) & (given < count)).all())):
            return (given.long() % max(count, 1)).tolist()
    raise ValueError(
        f"{name}[...] has {count} sequences and got {rows!r}; pass a slice ([i : i + 1] for one), "
        f"{count} booleans, or indices below {count}"
    )
