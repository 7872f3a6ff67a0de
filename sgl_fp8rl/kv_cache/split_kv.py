"""Into how many splits XQA cuts each sequence, so that the memory is busy to the end.

A split of a sequence and a KV head is one CTA; three fit an SM. Left to itself FlashInfer's kernel
makes few splits, and where the last CTAs are too few to keep the memory busy, all wait for them: at
64 sequences x 8 heads, 116 of 512. Splits are merged at a cost. The model below gives the times of
``MEASURED`` in tests/sgl_fp8rl/kv_cache/test_split_kv.py to some percent; by it 64 x 8192 takes
263 us in two splits, 307 in one, and 16 x 30016 takes 231 for 321 (H200).
"""

from functools import cache

CTAS_OF_SM = 3
"""``__launch_bounds__`` of the kernel for groups of up to 16 query heads."""
BUSY_CTAS_OF_SM = 2.0
"""So many keep the memory busy; fewer read at a speed that grows with ``GROWTH``."""
GROWTH = 0.75
BYTES_A_US = 4.25e6
"""What an H200 reads of the cache in a microsecond."""
MERGE_US, MERGE_CTA_US = 2.5, 0.004
"""What it costs to merge splits at all, and for each CTA."""
CONTEXT_BYTES = 4096 * 2 * 128
"""Of a sequence and a head, in the middle of a long rollout: a graph cannot know it. Short contexts
pay for this: 64 x 576 takes 36 us, and 34 in one split."""
MAX_SPLITS = 32
ENOUGH = 1.03
"""Fewer splits are taken where they are as good within this."""


@cache
def num_splits(items: int, sms: int) -> int:
    """How many splits are best for ``items`` sequences times KV heads, on so many SMs."""
    times = [_time_us(items, count, sms) for count in range(1, MAX_SPLITS + 1)]
    limit = min(times) * ENOUGH
    return next(count for count, us in enumerate(times, 1) if us <= limit)


@cache
def sm_count(items: int, sms: int) -> int:
    """The ``sm_count`` from which ``flashinfer.xqa.xqa`` makes that many splits.

    It makes ``round(sm_count * 3 // items * 0.25)`` of them, at least one (``mha_sm90.cu``).
    """
    return (4 * num_splits(items, sms) + 1) * items // CTAS_OF_SM


def _time_us(items: int, count: int, sms: int) -> float:
    ctas = items * count
    waves, rest = divmod(ctas, CTAS_OF_SM * sms)
    speed = min(1.0, (rest / (BUSY_CTAS_OF_SM * sms)) ** GROWTH) if rest else 1.0
    share = (waves * CTAS_OF_SM * sms + rest / speed) / ctas
    merged = MERGE_US + MERGE_CTA_US * ctas if count > 1 else 0.0
    return share * items * CONTEXT_BYTES / BYTES_A_US + merged
