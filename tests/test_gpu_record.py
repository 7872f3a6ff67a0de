"""Joining the parts of a GPU run: what must not be called a pass is refused."""

import re
from typing import Any

import pytest

from tests.gpu import schedule
from tests.gpu.record import HERE, PACKAGES, Part, join

FILES = {"test_a.py", "test_b.py"}


def part(name: str, **fields: Any) -> Part:
    return {
        "files": [f"tests/gpu/{name}"],
        "alone": False,
        "status": 0,
        "passed": 7,
        "failed": 0,
        "skipped": 1,
        "failures": [],
        "seconds": 61,
        "date": "2026-01-01 00:00",
        "gpu": "NVIDIA H200",
        "driver": "580",
        "commit": "abc1234",
        **dict.fromkeys(PACKAGES, "1.0"),
        **fields,
    }


def test_the_record_names_commit_gpu_and_counts() -> None:
    record = join([part("test_a.py"), part("test_b.py")], FILES)
    for fact in ("abc1234", "NVIDIA H200", "14 passed", "2 skipped", "2:02", "torch 1.0"):
        assert fact in record


def test_rows_are_in_the_order_of_the_files_not_of_the_parts() -> None:
    files = ["test_d.py", "test_a.py"]
    whole = part("", files=files), part("test_c.py"), part("test_b.py")
    rows = [line for line in join(list(whole), {*files}).splitlines() if line.startswith("|")][2:]
    assert [row.split(" | ")[0] for row in rows] == ["| a, d", "| b", "| c"]


@pytest.mark.parametrize(
    ("second", "fault"),
    [
        ({"commit": "def5678"}, "different commit: abc1234, def5678"),
        ({"sglang": "2.0"}, "different sglang"),
        ({"failures": ["test_b"], "status": 1}, "test_b"),
        ({"status": 2}, "not all tests passed"),
        ({"files": ["tests/gpu/test_a.py"]}, r"did not run: test_b\.py"),
    ],
)
def test_what_is_not_a_whole_pass_is_refused(second: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        join([part("test_a.py"), part("test_b.py", **second)], FILES)


def test_every_file_is_scheduled() -> None:
    together, alone = (
        {f"test_{name}.py" for names in parts for name in names}
        for parts in (schedule.TOGETHER, schedule.ALONE)
    )
    texts = {path.name: path.read_text() for path in HERE.glob("test_*.py")}
    assert together | alone | {f"test_{schedule.ON_ALL_GPUS}.py"} == texts.keys()
    assert alone == {name for name, text in texts.items() if "mark.alone" in text}
    # a part without tests fails
    whole = {
        name for name, text in texts.items() if re.search(r"pytestmark = \[[^]]*mark\.alone", text)
    }
    assert whole and not together & whole
