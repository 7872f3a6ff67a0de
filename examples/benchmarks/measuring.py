"""Clocks and memory of the GPU: the bandwidth of a copy, wall time, least free memory."""

import gc
import threading
import time
from collections.abc import Callable
from statistics import median
from types import TracebackType
from typing import TypeVar

import torch

COPY_BYTES = 4 << 30
COPY_REPEATS = 10
POLL_S = 0.001

T = TypeVar("T")


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


def timed(action: Callable[[], T]) -> tuple[float, T]:
    """Milliseconds of ``action`` between two synchronisations of the GPU, and what it returned."""
    gc.collect()
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = action()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start), result


def free_bytes() -> int:
    """Memory of the device that no process holds."""
    return int(torch.cuda.mem_get_info()[0])


class LeastFree:
    """Context that looks at the device's free memory every millisecond: ``bytes`` is the least."""

    def __init__(self) -> None:
        self.bytes = free_bytes()
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
            self.bytes = min(self.bytes, free_bytes())
