"""The table of what a correction takes."""

import json
from typing import Any

from benchmarks import correction_tables

ENVIRONMENT = {"device": "H", "torch": "2", "date": "d", "commit": "c", "command": "run"}


def row(arm: str, case: str, metric: str, *values: float) -> dict[str, Any]:
    numbers = {"median": sorted(values)[len(values) // 2], "min": min(values), "max": max(values)}
    return {"model": "1M", "arm": arm, "case": case, "metric": metric, "n": len(values), **numbers}


def test_a_machine_without_a_gpu_has_no_column_of_one() -> None:
    rows = [
        row("one core", "a", "correction_ms", 30.4, 28.0, 35.0),
        row("one core", "a", "correction_launches", 7),
        row("one core", "b", "correction_ms", 9.444),
    ]
    text = json.dumps({"environment": ENVIRONMENT, "rows": rows})
    told = correction_tables.times(text)
    assert "| 1M | one core | operations |\n|---|---|---|\n" in told
    assert "| a | 30 ms (28 to 35) | 7 |" in told
    assert "| b | 9.44 ms (9.44 to 9.44) |  |" in told
    assert "`run`: H, torch 2, d, commit c. Medians of 3 (least to most)" in told

    rows.append(row("one GPU", "a", "correction_ms", 0.5))
    rows.append(row("one GPU", "a", "correction_kernels_ms", 0.124))
    more = ENVIRONMENT | {"cpu": "C", "sglang": "1"}
    told = correction_tables.times(json.dumps({"environment": more, "rows": rows}))
    assert "| a | 30 ms (28 to 35) | 7 | 0.50 ms (0.50 to 0.50) | 0.12 ms |" in told
    assert "| b | 9.44 ms (9.44 to 9.44) |  |  |  |" in told
    assert "H, a core of C, SGLang 1, torch 2" in told
