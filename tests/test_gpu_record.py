"""The record of GPU runs: what must not be called a pass is refused."""

import re
from typing import Any

import pytest

from tests.gpu import schedule
from tests.gpu.record import HERE, PACKAGES, Part, merged


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


def test_a_part_replaces_what_ran_of_its_files_before() -> None:
    alone = part("test_a.py", alone=True)
    old = [part("", files=["test_a.py", "test_b.py"]), alone, part("test_c.py")]
    new = part("", files=["test_a.py"], commit="def5678")
    assert merged(old, [new]) == [new, alone, old[2]]


@pytest.mark.parametrize(
    ("second", "fault"),
    [
        ({"failures": ["test_b"], "status": 1}, "test_b"),
        ({"status": 2}, "not all tests passed"),
    ],
)
def test_what_failed_is_not_recorded(second: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        merged([], [part("test_a.py"), part("test_b.py", **second)])


def test_every_file_is_scheduled() -> None:
    together, alone, on_all = (
        {f"test_{name}.py" for names in parts for name in names}
        for parts in (schedule.TOGETHER, schedule.ALONE, schedule.ON_ALL_GPUS)
    )
    texts = {path.name: path.read_text() for path in HERE.glob("test_*.py")}
    assert together | alone | on_all == texts.keys()
    assert alone == {name for name, text in texts.items() if "mark.alone" in text}
    # a part without tests fails
    whole = {
        name for name, text in texts.items() if re.search(r"pytestmark = \[[^]]*mark\.alone", text)
    }
    assert whole and not together & whole
