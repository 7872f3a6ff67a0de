"""The memory that this process holds resident: torch's and mappings too, which ``tracemalloc`` does
not see."""

import resource
from pathlib import Path

_RESET_PEAK = "5"
"""Linux takes the present size as the peak."""


def reset_peak() -> None:
    """Count from what is held now."""
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


def peak_bytes() -> int:
    """The most since the last reset."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
