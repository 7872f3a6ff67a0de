"""Whether engines on other hosts are sent an update whole or as changes: by what each way took.

Changes are fewer bytes on the link, but they are compared with the last update before, and put into
what the engine stores after that. Where a CPU compares and the link is fast, this takes longer.
"""

import logging
from collections import deque

logger = logging.getLogger(__name__)

LEAST_GAIN_S, LEAST_GAIN = 0.1, 0.1
"""Seconds, and part of what changes took, that an update must be faster whole: less is noise, and
changes that fail are undone, where a whole update that fails quarantines."""
RETRY = 16
"""Updates after which the other way is tried again, if it took less than twice as long, or was
measured once: the first time may compile kernels."""


class FasterWay:
    """What updates took, from the first chunk to the commit.

    Args:
        fingerprint: of their manifest.
    """

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._seconds: dict[bool, deque[float]] = {way: deque(maxlen=2) for way in (True, False)}
        """Of whole updates, and of changes: the last two, of which the shorter one counts."""
        self._is_whole = False
        """What was chosen last, other than to try the other way."""
        self._was_whole = True
        self._in_a_row = 0
        """Updates that went as the last one did."""

    def note(self, is_whole: bool, seconds: float) -> None:
        """Note what an update took that has committed."""
        self._seconds[is_whole].append(seconds)
        self._in_a_row = self._in_a_row + 1 if is_whole == self._was_whole else 1
        self._was_whole = is_whole

    def goes_whole(self) -> bool:
        """Whether the next update is sent whole, though it could be sent as changes."""
        if not self._seconds[True] or len(self._seconds[False]) < 2:
            return False
        whole, changes = min(self._seconds[True]), min(self._seconds[False])
        is_near = max(whole, changes) < 2 * min(whole, changes)
        if self._in_a_row >= RETRY and (is_near or len(self._seconds[not self._was_whole]) < 2):
            return not self._was_whole
        is_whole = changes - whole > max(LEAST_GAIN_S, LEAST_GAIN * changes)
        if is_whole != self._is_whole:
            logger.warning(
                "updates are sent %s from now on: a whole one took %.2f s, only what changed "
                "%.2f s",
                "whole" if is_whole else "as changes",
                whole,
                changes,
            )
        self._is_whole = is_whole
        return is_whole
