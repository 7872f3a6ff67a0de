"""Every decoder of what arrives, on mutated messages: no crash, no hang, errors that explain."""

import itertools
import json
import os
from types import ModuleType
from typing import Any

import pytest

from tests.fuzz.decoder import ACCEPTED, Decoder, DefectError, parse, watched
from tests.fuzz.groups import GROUPS, SHARES

INPUTS = int(os.environ.get("FP8RL_FUZZ_INPUTS", "20000"))
"""Of all decoders together."""


def test_each_decoder_has_its_share() -> None:
    found = []
    for group in GROUPS:
        with group.decoders() as decoders:
            found += [decoder.name for decoder in decoders]
    assert len(found) == len(set(found)) == SHARES


@pytest.mark.guarantee("malformed", fault="mutated messages and bytes, every decoder")
@pytest.mark.guarantee("malformed", fault="valid messages with other parts, every decoder")
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_mutated_messages(group: ModuleType) -> None:
    with watched(), group.decoders() as decoders:
        for decoder in decoders:
            outcomes = set()
            for index, data in enumerate(itertools.islice(decoder.inputs(0), INPUTS // SHARES)):
                outcomes.add(decoder.check(data))
                is_valid = not index and not decoder.reports
                assert not is_valid or outcomes == {ACCEPTED}, f"{decoder.name} refuses its seed"
            assert outcomes - {ACCEPTED}, f"{decoder.name} refuses nothing"


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
