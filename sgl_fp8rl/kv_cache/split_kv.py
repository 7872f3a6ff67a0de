"""The number of split-KV splits of XQA that keeps the memory busy until the end.

A split of a sequence and a KV head is one CTA; three fit an SM. By default FlashInfer's kernel
makes few splits, and the last wave of CTAs may be too small to keep the memory busy: 116 of 512
at 64 sequences x 8 heads. Merging splits has a cost. The model below predicts the times of
``MEASURED`` in tests/sgl_fp8rl/kv_cache/test_split_kv.py to some percent; by it 64 x 8192 takes
263 us in two splits, 307 in one, and 16 x 30016 takes 231 for 321 (H200).
"""

from functools import cache

CTAS_OF_SM = 3
"""``__launch_bounds__`` of the kernel for groups of up to 16 query heads."""
BUSY_CTAS_OF_SM = 2.0
"""This many CTAs keep the memory busy; fewer read at a speed that grows with ``GROWTH``."""
GROWTH = 0.75
BYTES_A_US = 4.25e6
"""Bytes of the cache that an H200 reads per microsecond."""
MERGE_US, MERGE_CTA_US = 2.5, 0.004
"""Cost of merging splits: fixed, and per CTA."""
CONTEXT_BYTES = 4096 * 2 * 128
"""Assumed for a sequence and a head, as in the middle of a long rollout: a graph cannot know it.
Short contexts are slower for it: 64 x 576 takes 36 us, and 34 in one split."""
MAX_SPLITS = 32
ENOUGH = 1.03
"""Fewer splits are preferred if they are as good within this."""


@cache
def num_splits(items: int, sms: int) -> int:
    """The best number of splits for ``items`` (sequences times KV heads) on ``sms`` SMs."""
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
