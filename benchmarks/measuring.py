"""Clocks and memory of the GPU: bandwidth of a copy, time of kernels, wall time, free memory."""

import gc
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from types import TracebackType
from typing import Any, TypeVar

import torch

COPY_BYTES = 4 << 30
COPY_REPEATS = 10
POLL_S = 0.001
MINE = 4 << 30
"""More than a process has on the GPU that has only made its context and measured a copy."""
REPLAYS = 20
ROUNDS = 5
AHEAD_CYCLES = 40_000_000
"""About 20 ms in which the GPU waits and the host queues calls."""

T = TypeVar("T")
Call = Callable[[], Any]


def copy_tb_s() -> float:
    """Bytes read plus bytes written by ``Tensor.copy_`` of 4 GiB, TB/s, median of 10."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    target.copy_(source)
    times = []
    for _ in range(COPY_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    del source, target
    torch.cuda.empty_cache()
    return float(2 * COPY_BYTES / median(times) / 1e12)


def graph_us(calls: Sequence[Call], replays: int = REPLAYS) -> list[float]:
    """Microseconds of a call, from each replay of one CUDA graph of all ``calls``.

    The first is called once before, to compile what it needs.
    """
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return [_event_us(graph.replay) / len(calls) for _ in range(replays)]


def queued_us(calls: Sequence[Call]) -> list[float]:
    """Microseconds of a call on the GPU, of what runs outside of graphs with the host ahead."""

    def every() -> None:
        for call in calls:
            call()

    every()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        torch.cuda._sleep(AHEAD_CYCLES)
        times.append(_event_us(every) / len(calls))
    return times


def timed(action: Callable[[], T], meet: Callable[[], object] = lambda: None) -> tuple[float, T]:
    """Milliseconds of ``action`` between two synchronisations of the GPU, and what it returned.

    Args:
        meet: waits for other processes, before the clock starts.
    """
    gc.collect()
    settle()
    meet()
    start = time.perf_counter()
    result = action()
    settle()
    return 1e3 * (time.perf_counter() - start), result


def settle() -> None:
    """Wait until the GPU, where there is one, has done what is queued."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_bytes(device: int | None = None) -> int:
    """Memory of the device, of this thread where none is named, that no process holds."""
    return int(torch.cuda.mem_get_info(device)[0])


def idle_bytes() -> int:
    """Memory that is free on a device that no other process holds memory of."""
    free, total = torch.cuda.mem_get_info()
    if total - free > MINE:
        raise RuntimeError(
            f"{(total - free) / 1e9:.1f} GB of the GPU are in use before the engine starts; end "
            f"the other process, or wait until it has ended"
        )
    return int(free)


class LeastFree:
    """Context that looks at the device's free memory every millisecond: ``bytes`` is the least."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()  # of this thread; another one has the first
        self.bytes = free_bytes(self._device)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "LeastFree":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(POLL_S):
            self.bytes = min(self.bytes, free_bytes(self._device))


def _event_us(action: Call) -> float:
    """Microseconds on the GPU from before ``action`` to after it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    action()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end))
