"""Decode attention over FP8 KV: stock's XQA, which sums FP8 products, and our kernel."""

from collections.abc import Iterator
from statistics import median

import torch

from benchmarks.kernels.pair import Pair
from benchmarks.kv import attention as kv_attention
from benchmarks.kv import attention_kernels as kernels
from benchmarks.kv.attention_inputs import Load, draw, errors, exact

DEVICE = "cuda"
LOADS = (
    Load(1, 8192),
    Load(8, 8192),
    Load(16, 30016),
    Load(32, 576),
    Load(64, 576),
    Load(64, 8192),
    Load(128, 4096),
    Load(256, 576),
)
ERROR = 1.02
"""Ours over XQA's, of the medians of relative L2 errors, which are the codes' at a scale of 1."""


def pairs() -> Iterator[Pair]:
    """Each load, batch x context, at scales of 1."""
    for load in LOADS:
        yield pair(load)
        torch.cuda.empty_cache()


def pair(load: Load) -> Pair:
    """One load: the kernels alone, behind one that has made q whole."""
    inputs = draw(load, DEVICE)
    layer = kernels.layer_of("unit", inputs)
    caches = kernels.stored(layer, inputs)
    stock = kernels.attend_stock_xqa(inputs)
    ours = kernels.attend_paged(inputs, layer)

    def check() -> None:
        wanted = exact(inputs)
        mine, other = (
            median(errors(attend(caches), wanted)["kv_error"]) for attend in (ours, stock)
        )
        if not mine <= ERROR * other:  # a NaN neither
            raise RuntimeError(f"our kernel's error is {mine:.4f}, XQA's {other:.4f}")

    return Pair(
        "XQA decode",
        load.name,
        load.cache_bytes(1),
        check,
        kv_attention.calls_over(stock, caches),
        kv_attention.calls_over(ours, caches),
    )
