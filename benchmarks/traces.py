"""A torch profiler's trace, as SGLang writes it, becomes a table of where a step's time goes."""

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from benchmarks import kernel_classes

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""The trace's categories of what the GPU does."""
GRAPH_KERNELS = 32
"""A launch of so many kernels is a CUDA graph; any model has more of them."""


class Kernel(NamedTuple):
    """One execution, in microseconds."""

    name: str
    start: float
    duration: float
    launch: int
    """Of the CUDA graph, for all of its kernels."""


class Step(NamedTuple):
    """The kernels of one step, in the order of their start, and when the step ends."""

    kernels: Sequence[Kernel]
    end: float

    @property
    def wall_us(self) -> float:
        """From the first kernel to the end."""
        return self.end - self.kernels[0].start

    @property
    def busy_us(self) -> float:
        """Time in which at least one kernel runs."""
        total, until = 0.0, 0.0
        for kernel in self.kernels:
            end = kernel.start + kernel.duration
            total += max(0.0, end - max(until, kernel.start))
            until = max(until, end)
        return total


def kernels(path: Path) -> list[Kernel]:
    """All kernels and copies of a trace, in the order of their start.

    Raises:
        ValueError: it has none.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    found = [
        Kernel(e["name"], float(e["ts"]), float(e["dur"]), int(e["args"]["correlation"]))
        for e in events
        if e.get("ph") == "X" and e.get("cat") in ON_GPU
    ]
    if not found:
        raise ValueError(f"{path.name} has no kernel of a GPU; profile the activity GPU")
    return sorted(found, key=lambda kernel: kernel.start)


def decode_steps(found: Sequence[Kernel], count: int, edge: int) -> list[Step]:
    """``count`` steps, each from the start of one CUDA graph to that of the next.

    Args:
        edge: last steps to leave out, of which the very last has no end.

    Raises:
        ValueError: the trace has too few CUDA graphs.
    """
    sizes = Counter(kernel.launch for kernel in found)
    starts: dict[int, int] = {}
    for index, kernel in enumerate(found):
        if sizes[kernel.launch] >= GRAPH_KERNELS:
            starts.setdefault(kernel.launch, index)
    bounds = list(starts.values())
    if len(bounds) < count + edge:
        raise ValueError(
            f"the trace has {len(bounds)} launches of a CUDA graph, {count + edge} are needed; "
            f"is the batch above cuda_graph_max_bs_decode?"
        )
    bounds = bounds[len(bounds) - edge - count :][: count + 1]
    return [Step(found[a:b], found[b].start) for a, b in pairwise(bounds)]


def whole(found: Sequence[Kernel]) -> Step:
    """All kernels of a trace as one step."""
    return Step(found, max(kernel.start + kernel.duration for kernel in found))


def means(steps: Sequence[Step]) -> dict[str, list[float]]:
    """Means over steps as values of metrics: ``CLASS, us`` and ``CLASS, calls`` of each class of
    kernel, the largest first, then ``step``, ``busy`` and ``idle`` in us, and how many ``steps``.

    Idle is the time in which no kernel runs. A class is the sum of its kernels, so those that run
    side by side count in full. Kernels whose class is not known are printed.
    """
    by_class: dict[str, list[float]] = defaultdict(list)
    unknown: Counter[str] = Counter()
    for step in steps:
        kinds = kernel_classes.classes([kernel.name for kernel in step.kernels])
        for kernel, kind in zip(step.kernels, kinds, strict=True):
            by_class[kind].append(kernel.duration)
            if kind == kernel_classes.OTHER:
                unknown[kernel.name] += 1
    for name, count in unknown.most_common():
        print(f"no class: {count / len(steps):.1f} calls a step: {name}")
    found: dict[str, list[float]] = {}
    for kind, times in sorted(by_class.items(), key=lambda item: -sum(item[1])):
        found[f"{kind}, us"] = [sum(times) / len(steps)]
        found[f"{kind}, calls"] = [len(times) / len(steps)]
    wall = fmean(step.wall_us for step in steps)
    busy = fmean(step.busy_us for step in steps)
    return found | {
        "step, us": [wall],
        "busy, us": [busy],
        "idle, us": [wall - busy],
        "steps": [len(steps)],
    }
