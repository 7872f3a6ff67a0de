"""Result files: rows, what stays of an earlier run, and files that are merged."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import result_rows

ENVIRONMENT = {"device": "H200", "commit": "abc1234", "host": "01", "date": "2026-11-21"}


def rows(arm: str, *values: float) -> list[result_rows.Row]:
    measurement = {"arm": arm, "model": "m", "case": "c", "values": {"step_ms": list(values)}}
    return result_rows.rows_of([measurement])


def results(**more: Any) -> result_rows.Results:
    return {"benchmark": "b", "environment": ENVIRONMENT, "failures": {}, "rows": []} | more


def test_a_row_has_median_spread_and_unit() -> None:
    values = {"step_ms": [3.0, 1.0, 2.123456], "copy_tb_s": [4.0], "tokens_s": [1.0], "ess": [0.9]}
    found = result_rows.rows_of([{"arm": "a", "model": "m", "case": "c", "values": values}])
    common = {"arm": "a", "model": "m", "case": "c"}
    spread = {"median": 2.1235, "min": 1.0, "max": 3.0, "n": 3}
    assert found[0] == common | {"metric": "step_ms", "unit": "ms"} | spread
    assert [row["unit"] for row in found] == ["ms", "TB/s", "tokens/s", "1"]


def test_a_job_takes_the_place_of_what_it_gave_before() -> None:
    first = result_rows.updated(results(), "a", rows("a", 1.0), None)
    both = result_rows.updated(first, "b", [], "exit status 1: ValueError")
    assert both["failures"] == {"b": "exit status 1: ValueError"}
    again = result_rows.updated(both, "b", rows("b", 2.0), None)
    again = result_rows.updated(again, "a", rows("a", 3.0), None)
    assert again == results(rows=rows("a", 3.0) + rows("b", 2.0))


def test_only_rows_of_the_same_setting_stay(tmp_path: Path) -> None:
    path = tmp_path / "results" / "b.json"
    assert result_rows.earlier(path, "b", ENVIRONMENT) == results()
    whole = results(rows=rows("a", 1.0), failures={"b": "x"})
    result_rows.write(path, whole)
    assert json.loads(path.read_text()) == whole
    assert [file.name for file in path.parent.iterdir()] == ["b.json"]
    later = ENVIRONMENT | {"date": "2026-11-22"}
    assert result_rows.earlier(path, "b", later) == whole | {"environment": later}
    for changed in ({"commit": "def5678"}, {"host": "02"}, {"command": "--updates 3"}):
        assert result_rows.earlier(path, "b", ENVIRONMENT | changed)["rows"] == []


def test_files_of_one_host_are_merged(tmp_path: Path) -> None:
    """Starts of an arm on several GPUs become one row."""
    paths = [tmp_path / name for name in ("1.json", "2.json", "3.json")]
    for path, values in zip(paths, ((1.0, 2.0, 9.0), (4.0, 5.0, 6.0), (3.0,)), strict=True):
        own = {"failures": {path.stem: "x"}, "rows": rows("a", *values) + rows(path.stem, 1.0)}
        result_rows.write(path, results(**own))
    found = result_rows.merged("b", paths)
    one = rows("a", 1.0)[0] | {"median": 3.0, "min": 1.0, "max": 9.0, "n": 7}
    assert found["rows"] == [one, *(row for n in "123" for row in rows(n, 1.0))]
    assert found == results(rows=found["rows"], failures=dict.fromkeys("123", "x"))
    result_rows.write(paths[1], results(environment=ENVIRONMENT | {"commit": "def5678"}))
    with pytest.raises(ValueError, match=r"2\.json is of another machine, boot, commit"):
        result_rows.merged("b", paths)
