"""Values of another process: how they are quoted, and checked."""

from typing import Any

import pytest

from sgl_fp8rl.protocol.values import LONGEST_EXCERPT, are_names, are_whole, excerpt


def nested(value: Any, wide: int, deep: int) -> Any:
    for _ in range(deep):
        value = [value] * wide
    return value


@pytest.mark.parametrize(
    "value",
    [
        "x" * 100_000,
        10**4000,
        ["x" * 1000] * 1000,
        nested("x" * 1000, 7, 7),
        nested(1, 1, 900),
        {f"{i}" + "x" * 1000: nested("y" * 1000, 6, 4) for i in range(10)},
    ],
)
def test_an_excerpt_is_short(value: Any) -> None:
    assert 10 < len(excerpt(value)) <= LONGEST_EXCERPT + len("...")


@pytest.mark.parametrize("value", [None, True, 1.5, "a\n", [1, "2"], {"a": [1]}])
def test_a_small_value_is_quoted_as_it_is(value: Any) -> None:
    assert excerpt(value) == repr(value)


@pytest.mark.parametrize(
    ("value", "least", "expected"),
    [
        ([], 0, True),
        ([0, 5, 2**63 - 1], 0, True),
        ([-1, 5], -1, True),
        ([-1, 5], 0, False),
        ([2**63], 0, False),
        ([1, True], 0, False),
        ([1.0], 0, False),
        ((1, 2), 0, False),
        ("12", 0, False),
        (None, 0, False),
    ],
)
def test_whole_numbers(value: Any, least: int, expected: bool) -> None:
    assert are_whole(value, least) is expected


@pytest.mark.parametrize(
    ("value", "expected"), [([], True), (["a"], True), (["a", 1], False), ("ab", False)]
)
def test_names(value: Any, expected: bool) -> None:
    assert are_names(value) is expected
