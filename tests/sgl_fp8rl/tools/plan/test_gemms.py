"""Times of FP8 GEMMs: the table's own, those between its rows, and those of other shapes."""

import pytest

from benchmarks.engines import models
from sgl_fp8rl.tools.plan import gemms, shape
from sgl_fp8rl.tools.plan.speed import speed_of

KERNELS = speed_of(1.0).kernels
QWEN = shape.of(models.config(models.MODELS["qwen3-8b"]))
MEASURED = gemms.Measured((64, 128), (10.0, 30.0))
LINE_ERROR = 0.17
"""Of the lines through the table, in the mean: 15.1% of ours, 16.8% of stock's."""


@pytest.mark.parametrize(
    ("rows", "us"), [(1, 10.0), (64, 10.0), (80, 15.0), (128, 30.0), (256, 60.0)]
)
def test_between_rows(rows: int, us: float) -> None:
    assert gemms.between(MEASURED, rows) == us


def test_shapes_are_those_of_the_layer() -> None:
    assert gemms.shapes_of(QWEN) == [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
    assert gemms.shapes_of(QWEN, tp=2) == [(3072, 4096), (4096, 2048), (12288, 4096), (4096, 6144)]
    moe = shape.of(models.config(models.MODELS["qwen3-30b-a3b"]))
    assert gemms.shapes_of(moe) == [(5120, 2048), (2048, 4096)]


def test_a_layer_is_the_sum_of_its_table() -> None:
    """At 128 rows stock runs gate_up by a slow kernel, and ours by another one."""
    ours, stock = (gemms.layer_ms(QWEN, 128, stack, KERNELS.lines) for stack in ("ours", "stock"))
    table = gemms.table("ours")
    places = [table[n, k].us[table[n, k].rows.index(128)] for n, k in gemms.shapes_of(QWEN)]
    assert ours == pytest.approx(sum(places) / 1e3)
    assert stock > 1.5 * ours


@pytest.mark.parametrize("stack", gemms.STACKS)
def test_a_line_is_near_what_it_goes_through(stack: str) -> None:
    line = KERNELS.lines[stack]
    errors = [
        abs(line.us(n, k, m) / us - 1)
        for (n, k), measured in gemms.table(stack).items()
        for m, us in zip(*measured, strict=True)
    ]
    assert sum(errors) / len(errors) < LINE_ERROR
