"""Leave out CUDA graphs of decode batches that are faster in the graph of the next size.

A batch between two sizes is padded to the next one. GEMM kernels compute whole tiles, so one of 320
rows can take longer than one of 384.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sgl_fp8rl.engine.compat.settings import resolved, user_set_decode_sizes
from sgl_fp8rl.engine.gemm.table import Shape, Table

logger = logging.getLogger(__name__)

SMALLEST = 128
"""Up to this batch a GEMM waits for its weight, and what differs between sizes is mostly noise."""
MIN_GAIN = 0.07
"""Part of the GEMMs' time by which the next size must be faster, since other kernels of a step have
more rows in it. Qwen3-8B on an H200: 0.13 for 320 and 448; 0.05 for 160, which stays."""


def leave_out_slow_sizes(server_args: Any, counts: Mapping[Shape, int], table: Table) -> None:
    """Shorten SGLang's list of decode batch sizes.

    It stays where the user set it, with --disable-cuda-graph-padding, or if the table lacks a
    shape. The runner of decode graphs reads it when it is made, after weights are loaded.

    Args:
        server_args: those that this process has published.
        counts: how many GEMMs of each shape a step runs.
    """
    settings = resolved(server_args)
    decode = settings.cuda_graph_config.decode
    if user_set_decode_sizes(server_args) or settings.disable_cuda_graph_padding:
        return

    def gemms_us(size: int) -> float:
        total = 0.0
        for shape, count in counts.items():
            entry = next((each for each in table.get(shape, ()) if size <= each.m), None)
            if entry is None:
                return 0.0
            total += count * entry.us
        return total

    kept = fast_sizes(decode.bs, gemms_us)
    if left_out := sorted(set(decode.bs) - set(kept)):
        logger.info("decode batches of %s run padded to the next size: faster GEMMs", left_out)
        decode.bs = kept


def fast_sizes(sizes: Sequence[int], us: Callable[[int], float]) -> list[int]:
    """The sizes that are not slower than the next one that stays, ascending.

    Args:
        us: the time of a batch of a size; 0 if unknown, and such a size and the one before it stay.
    """
    kept: list[int] = []
    for size in sorted(sizes, reverse=True):
        is_slow = kept and size > SMALLEST and 0 < us(kept[-1]) < (1 - MIN_GAIN) * us(size)
        if not is_slow:
            kept.append(size)
    return kept[::-1]
