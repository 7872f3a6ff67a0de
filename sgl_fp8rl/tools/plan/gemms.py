"""Times of the FP8 GEMMs of a layer: those that ``sgl-fp8rl tune`` measured on an H200, and for
other shapes a line through them."""

import json
from bisect import bisect_left
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sgl_fp8rl.tools.plan.shape import Shape

TABLE = Path(__file__).parents[2] / "engine" / "gemm" / "tables" / "nvidia-h200.json"
STACKS = {"ours": "us", "stock": "stock_us"}
"""The fields of the table, by whose choice of a kernel they are of."""


class Measured(NamedTuple):
    """One shape: times in microseconds by rows, ascending."""

    rows: tuple[int, ...]
    us: tuple[float, ...]


class Line(NamedTuple):
    """Microseconds of a GEMM: a constant, and what a MB of its operands and a GFLOP add."""

    launch: float
    mb: float
    gflop: float

    def us(self, n: int, k: int, m: int) -> float:
        mb, gflop = quantities(n, k, m)
        return self.launch + self.mb * mb + self.gflop * gflop


Lines = Mapping[str, Line]
"""By stack."""


def quantities(n: int, k: int, m: int) -> tuple[float, float]:
    """MB that a GEMM of m rows reads and writes, and its GFLOP."""
    return (n * k + m * k + 2 * m * n) / 1e6, 2e-9 * m * n * k


@cache
def table(stack: str) -> dict[tuple[int, int], Measured]:
    """The measured shapes (N, K).

    Args:
        stack: "ours" or "stock".
    """
    found = {}
    for name, entries in json.loads(TABLE.read_text())["shapes"].items():
        n, k = map(int, name.split("x"))
        rows = tuple(entry["m"] for entry in entries)
        found[n, k] = Measured(rows, tuple(entry[STACKS[stack]] for entry in entries))
    return found


def shapes_of(shape: Shape, tp: int = 1) -> list[tuple[int, int]]:
    """N and K of a layer's linears on a rank; experts are none of them."""
    queries = shape.heads * shape.head_dim // tp
    keys = max(shape.kv_heads // tp, 1) * shape.head_dim
    found = [(queries + 2 * keys, shape.hidden), (shape.hidden, queries)]
    if not shape.experts:
        inner = shape.intermediate // tp
        found += [(2 * inner, shape.hidden), (shape.hidden, inner)]
    return found


def layer_ms(shape: Shape, m: float, stack: str, lines: Lines, tp: int = 1) -> float:
    """All of a layer.

    Args:
        m: rows.
        lines: for shapes that were not measured, by stack.
    """
    known = table(stack)
    total = 0.0
    for n, k in shapes_of(shape, tp):
        measured = known.get((n, k))
        total += between(measured, m) if measured else lines[stack].us(n, k, round(m))
    return total / 1e3


def between(measured: Measured, m: float) -> float:
    """Microseconds for m rows, on the line between two measured numbers of rows."""
    rows, us = measured
    right = bisect_left(rows, m)
    if right == 0:
        return us[0]
    if right == len(rows):
        return us[-1] * m / rows[-1]
    left = right - 1
    part = (m - rows[left]) / (rows[right] - rows[left])
    return us[left] + part * (us[right] - us[left])
