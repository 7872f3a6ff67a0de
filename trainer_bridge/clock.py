"""Wall time by stage."""

import time


class Clock:
    """Adds up wall time by stage."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """Count the time since the last lap to ``stage``."""
        now = time.perf_counter()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """Seconds of each stage and of all."""
        return {**self._seconds, "total": time.perf_counter() - self._started}
