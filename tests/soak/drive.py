"""A run's order: updates, with a fault every few of them."""

import sys
import time
from collections.abc import Sequence

from tests import run
from tests.soak.faults import FAULTS, impossible
from tests.soak.soak import IN_FLIGHT, Soak

MEAN_PAUSE_S = 0.1
"""Between updates, for tokens of each version."""
FAULT_RATE = 1 / 3
"""Of all steps: every few updates something goes wrong."""


def faults_of(soak: Soak, only: Sequence[str]) -> list[str]:
    """The kinds that this device can have."""
    cannot = impossible()
    return [name for name in FAULTS if name not in cannot and (not only or name in only)]


def drive(
    soak: Soak,
    updates: int,
    counts: dict[str, int],
    only: Sequence[str] = (),
    fault_rate: float = FAULT_RATE,
) -> None:
    """Run updates and faults. All kinds come once, in a random order, before any comes again.

    Args:
        updates: complete ones.
        counts: of faults by kind; they are added to it.
        only: kinds of faults; all where it is empty.
        fault_rate: how often a step begins with a fault.

    Raises:
        ViolationError: at the first one.
    """
    start, deck = time.monotonic(), list[str]()
    while soak.updates < updates:
        soak.clients.grant()
        time.sleep(soak.choose.expovariate(1 / MEAN_PAUSE_S))
        if soak.choose.random() < fault_rate:
            if not deck:
                deck = faults_of(soak, only)
                soak.choose.shuffle(deck)
            kind = deck.pop()
            counts[kind] = counts.get(kind, 0) + 1
            soak.step = f"{kind!r} before update {soak.updates + 1}"
            FAULTS[kind](soak, soak.choose)
            soak.heal()
        else:
            soak.step = f"update {soak.updates + 1}"
            soak.update(soak.choose.choice(IN_FLIGHT))
        soak.check()
        done = min(soak.updates, updates)
        seconds = time.monotonic() - start
        show_progress(done, updates, sum(counts.values()), soak.judge.tokens, seconds)


def show_progress(done: int, of: int, faults: int, tokens: int, seconds: float) -> None:
    """A line every twentieth."""
    if done == of or done * 20 // of != (done - 1) * 20 // of:
        said = f"{faults} faults, {tokens} tokens checked, {run.duration(seconds)}"
        print(f"{done}/{of} updates, {said}", file=sys.stderr, flush=True)
