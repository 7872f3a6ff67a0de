"""What engine and trainer take of the machine, and how it grows."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import linear_regression, median

import torch

Sample = dict[str, float]
"""By kind, and the number of ``updates`` so far."""
MIB = 1 << 20

BOUNDS: dict[str, float] = {
    "engine RSS MiB": 24,
    "engine descriptors": 10,
    "engine threads": 2,
    "engine regions": 40,
    "engine shared segments": 0,
    "engine temporary files": 0,
    "trainer RSS MiB": 48,
    "trainer descriptors": 10,
    "trainer threads": 1,
    "trainer shared segments": 0,
    "GPU MiB": 64,
}
"""Growth from the median of the second quarter of all samples to that of the last one. Descriptors
come and go with requests, and torch takes GPU memory in pieces of 2 and 20 MiB, some of them late.
"""
NEVER_MORE = [name for name, bound in BOUNDS.items() if bound == 0]
SLOPES: dict[str, float] = {"engine RSS MiB": 64, "trainer RSS MiB": 64}
"""KiB an update over the last half of all samples, fitted by least squares: a matrix of the tiny
model that stays behind at each update is 128 KiB of BF16 or more. oneDNN's kernels grow the engine
unless they are bounded (``settings.py``), and the trainer's heap keeps free memory.
"""
LEAST_UPDATES = 500
"""Of a run whose slope is bounded; a shorter one warms up."""


def sample(root: int, folder: Path, device: str, updates: int) -> Sample:
    """One look.

    Args:
        root: process id of the server; its children count as well.
        folder: its TMPDIR.
        device: "cuda" adds what is in use of the whole GPU.
        updates: so far.
    """
    engine = list(_tree(root))
    found: Sample = {
        "updates": updates,
        "engine RSS MiB": sum(map(_rss_mib, engine)),
        "engine descriptors": sum(len(_entries(pid, "fd")) for pid in engine),
        "engine threads": sum(len(_entries(pid, "task")) for pid in engine),
        "engine regions": sum(len(_regions(pid)) for pid in engine),
        "engine shared segments": len(set().union(*map(_shared, engine))),
        "engine temporary files": sum(1 for _ in folder.rglob("*")),
    }
    here = os.getpid()
    gc.collect()  # a failed update can leave a reference cycle; that is not a leak
    found |= {
        "trainer RSS MiB": _rss_mib(here),
        "trainer descriptors": len(_entries(here, "fd")),
        "trainer threads": len(_entries(here, "task")),
        "trainer shared segments": len(_shared(here)),
    }
    if device == "cuda":
        torch.cuda.empty_cache()  # what the judge's last batch took does not count as growth
        free, total = torch.cuda.mem_get_info()
        found["GPU MiB"] = (total - free) / MIB
    return found


def growth(samples: list[Sample]) -> Sample:
    """Median of the last quarter minus median of the second quarter; the first one warms up."""
    quarter = len(samples) // 4
    if not quarter:
        return {}
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    return {
        name: median(s[name] for s in late) - median(s[name] for s in early)
        for name in samples[0]
        if name in BOUNDS
    }


def slopes(samples: list[Sample]) -> Sample:
    """KiB an update over the last half."""
    half = samples[len(samples) // 2 :]
    if len(half) < 2:
        return {}
    updates = [s["updates"] for s in half]
    return {
        name: linear_regression(updates, [s[name] for s in half]).slope * MIB / 1024
        for name in SLOPES
    }


def leaks(samples: list[Sample]) -> list[str]:
    """What grew beyond its bound."""
    found = [
        f"{name} grew by {grown:g}, more than {BOUNDS[name]:g}"
        for name, grown in growth(samples).items()
        if grown > BOUNDS[name]
    ]
    if samples and samples[-1]["updates"] >= LEAST_UPDATES:
        found += [
            f"{name} grew by {slope:g} KiB an update at the end, more than {SLOPES[name]:g}"
            for name, slope in slopes(samples).items()
            if slope > SLOPES[name]
        ]
    return found


def _tree(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    for task in _entries(pid, "task"):
        for child in _text(Path(f"/proc/{pid}/task/{task}/children")).split():
            yield from _tree(int(child))


def _entries(pid: int, name: str) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/{name}")  # noqa: PTH208  (a link may be gone meanwhile)
    except OSError:  # it has ended
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _rss_mib(pid: int) -> float:
    lines = _text(Path(f"/proc/{pid}/status")).splitlines()
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


def _regions(pid: int) -> list[str]:
    return _text(Path(f"/proc/{pid}/maps")).splitlines()


def _shared(pid: int) -> set[str]:
    """Inodes of the memory files that are mapped."""
    return {
        region.split()[4]
        for region in _regions(pid)
        if "/memfd:" in region or "/dev/shm/" in region
    }
