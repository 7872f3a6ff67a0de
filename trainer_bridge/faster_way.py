"""Whether engines on other hosts are sent an update whole or as changes: by what each way took.

Changes are fewer bytes on the link, but are compared with the last update before, and put into what
the engine stores after that. On a fast link, or with a trainer on a CPU, this can take longer.
"""

import logging
from collections import deque

logger = logging.getLogger(__name__)

LEAST_GAIN_S, LEAST_GAIN = 0.1, 0.1
"""Seconds, and part of what changes took, that an update must be faster whole: less is noise, and
changes that fail are undone, where a whole update that fails quarantines."""
RETRY = 16
"""Updates after which the other way is tried again, if it took less than twice as long."""


class FasterWay:
    """What the updates of some engines took, from the first chunk to the commit."""

    def __init__(self) -> None:
        self._whole: float | None = None
        self._changes: deque[float] = deque(maxlen=2)
        """The last ones, of which the shorter one counts: the first may compile kernels."""
        self._was_whole = True
        self._in_a_row = 0
        """Updates that went as the last one did."""

    def note(self, is_whole: bool, seconds: float) -> None:
        """Note what an update took that has committed."""
        if is_whole:
            self._whole = seconds
        else:
            self._changes.append(seconds)
        self._in_a_row = self._in_a_row + 1 if is_whole == self._was_whole else 1
        self._was_whole = is_whole

    def goes_whole(self) -> bool:
        """Whether the next update is sent whole, though it could be sent as changes."""
        if self._whole is None or len(self._changes) < 2:
            return False
        whole, changes = self._whole, min(self._changes)
        if self._in_a_row >= RETRY and max(whole, changes) < 2 * min(whole, changes):
            return not self._was_whole
        is_faster = changes - whole > max(LEAST_GAIN_S, LEAST_GAIN * changes)
        if is_faster and not self._was_whole:
            logger.warning(
                "updates are sent whole from now on, which took %.2f s; only what changed took "
                "%.2f s",
                whole,
                changes,
            )
        return is_faster
