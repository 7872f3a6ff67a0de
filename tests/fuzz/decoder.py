"""What every decoder promises of bytes that arrive, and the check of one input."""

import json
import logging
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from sgl_fp8rl.protocol import framing
from tests.fuzz.mutator import mutate_bytes, mutate_value

HANG_S = 10.0
"""Seconds of CPU time for one input."""
MOST_BYTES, MOST_BYTES_PER_BYTE = 4 << 20, 100
"""Bytes that one input may allocate: at all, and more for each byte of its own."""
SHORTEST, LONGEST = 16, 2000
"""Characters of an error: enough to name a fault, too few to repeat what arrived."""
BODY_BYTES = 20_000
"""The longest input; it waits in a socket's buffer, which may count each byte several times."""
ACCEPTED = "accepted"


class Hang(BaseException):
    """An input takes too long; no handler of ``Exception`` keeps it back."""


class DefectError(AssertionError):
    """An input that breaks a promise."""


def to_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def to_frames(value: Any) -> bytes:
    """The frames of a list of messages."""
    bodies = [to_json(message) for message in (value if isinstance(value, list) else [value])]
    return b"".join(len(body).to_bytes(4, "big") + body for body in bodies)


def parse(data: bytes) -> Any:
    """A message as it comes off the wire."""
    return framing._parse(data)


@dataclass(frozen=True)
class Decoder:
    """One place where bytes of another process are read.

    Args:
        seeds: valid messages, as JSON values.
        decode: reads one input to its end.
        errors: the types that it documents; others are defects, their subclasses too.
        encode: a JSON value as the bytes that arrive.
        relays: its errors may be sentences of the peer, of which only the length is checked.
        reports: what it reads is an error, so it raises one for valid messages too.
    """

    name: str
    seeds: tuple[Any, ...]
    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    encode: Callable[[Any], bytes] = to_json
    relays: bool = False
    reports: bool = False

    def inputs(self, seed: int) -> Iterator[bytes]:
        """Valid messages first, then mutated ones without end."""
        yield from map(self.encode, self.seeds)
        random = Random(f"{self.name} {seed}")
        while True:
            value = random.choice(self.seeds)
            for _ in range(random.choice((0, 1, 1, 2, 3))):
                value = mutate_value(random, value)
            data = self.encode(value)
            yield (data if random.random() < 0.6 else mutate_bytes(random, data))[:BODY_BYTES]

    def check(self, data: bytes) -> str:
        """Decode one input; the error's type, or ``ACCEPTED``.

        Raises:
            DefectError: an undocumented error, a message that is not a sentence, too much memory,
                or a hang.
        """
        shown = data[:300]
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        signal.setitimer(signal.ITIMER_VIRTUAL, HANG_S)
        outcome = ACCEPTED
        try:
            self.decode(data)
        except Hang:
            raise DefectError(f"{self.name} takes more than {HANG_S} s for {shown!r}") from None
        except Exception as error:
            if type(error) not in self.errors:
                fault = f"{error!r:.200}"
                raise DefectError(f"{self.name} lets {fault} through for {shown!r}") from error
            outcome = type(error).__name__
            text = str(error)
            explains = text.count(" ") >= 3 and "\n" not in text and len(text) >= SHORTEST
            if len(text) > LONGEST or not ((text and self.relays) or explains):
                raise DefectError(f"{self.name} says {text[:200]!r} for {shown!r}") from error
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        peak = tracemalloc.get_traced_memory()[1] - before
        if peak > MOST_BYTES + MOST_BYTES_PER_BYTE * len(data):
            raise DefectError(f"{self.name} allocates {peak} bytes for {len(data)}: {shown!r}")
        return outcome


@contextmanager
def watched() -> Iterator[None]:
    """Where inputs are checked: memory is traced, hangs end, and nothing is logged."""

    def hang(signum: int, frame: Any) -> None:
        raise Hang

    previous = signal.signal(signal.SIGVTALRM, hang)
    logging.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        logging.disable(logging.NOTSET)
        signal.signal(signal.SIGVTALRM, previous)
