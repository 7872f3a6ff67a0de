"""Every decoder of what arrives, on mutated messages: no crash, no hang, errors that explain."""

import itertools
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.decoder import ACCEPTED, BODY_BYTES, Decoder, DefectError, parse, watched
from tests.fuzz.groups import GROUPS, SHARES, Group
from tests.fuzz.mutator import JSON, part_at, paths, put

INPUTS = int(os.environ.get("FP8RL_FUZZ_INPUTS", "20000"))
"""Of all decoders together, a tenth of them made by hypothesis."""
MANY = INPUTS * 9 // 10 // SHARES
EXAMPLES = INPUTS // 10 // SHARES
each_group = pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)


def test_each_decoder_has_its_share() -> None:
    found = []
    for group in GROUPS:
        with group.decoders() as decoders:
            found += [decoder.name for decoder in decoders]
    assert len(found) == len(set(found)) == SHARES


@pytest.mark.guarantee("malformed", fault="mutated messages and bytes, every decoder")
@each_group
def test_mutated_messages(group: Group) -> None:
    with watched(), group.decoders() as decoders:
        for decoder in decoders:
            outcomes = set()
            for index, data in enumerate(itertools.islice(decoder.inputs(0), MANY)):
                outcomes.add(decoder.check(data))
                is_valid = not index and not decoder.reports
                assert not is_valid or outcomes == {ACCEPTED}, f"{decoder.name} refuses its seed"
            assert outcomes - {ACCEPTED}, f"{decoder.name} refuses nothing"


@pytest.mark.guarantee("malformed", fault="valid messages with other parts, every decoder")
@each_group
def test_structured_messages(group: Group) -> None:
    with watched(), group.decoders() as decoders:
        for decoder in decoders:
            structured(decoder)()


def structured(decoder: Decoder) -> Callable[[], None]:
    """A check of this decoder on messages that hypothesis makes."""

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), deadline=None)
    @given(replaced(decoder))
    def check(value: Any) -> None:
        decoder.check(decoder.encode(value)[:BODY_BYTES])

    return check


@st.composite
def replaced(draw: st.DrawFn, decoder: Decoder) -> Any:
    """A valid message with other parts in one to three places."""
    value = draw(st.sampled_from(decoder.seeds))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(paths(value))))
        part = draw(JSON | st.just(part_at(value, path)))
        value = put(value, path, part)
    return value


def crash(data: bytes) -> None:
    raise KeyError(parse(data)["name"])


def say_little(data: bytes) -> None:
    raise ValueError("no")


def hoard(data: bytes) -> None:
    bytearray(json.loads(data))


@pytest.mark.parametrize(
    ("decode", "value", "fault"),
    [
        (crash, {"name": 1}, "lets KeyError"),
        (say_little, {}, "says 'no'"),
        (hoard, 1 << 26, "allocates"),
    ],
)
def test_a_broken_decoder_is_found(decode: Any, value: Any, fault: str) -> None:
    """The control: each promise can fail."""
    decoder = Decoder("broken", (value,), decode, (ValueError,))
    with watched(), pytest.raises(DefectError, match=fault):
        decoder.check(decoder.encode(value))
