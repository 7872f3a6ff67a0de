"""The order of copies: all GPUs are read at once, each at a rate of its own."""

from itertools import accumulate

import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_fp8rl.ops.copy_descriptors import CopyDescriptor, interleave

FP8 = torch.float8_e4m3fn
GPUS = "GPU-d", "GPU-b", "GPU-c"


def copies(sizes: list[tuple[int, int]]) -> list[CopyDescriptor]:
    """One of each (segment, rows), with its place as its tag."""
    return [
        CopyDescriptor(segment, 0, 0, 0, rows, 128, 128, 128, 0, FP8, FP8, False, tag)
        for tag, (segment, rows) in enumerate(sizes)
    ]


def lag(ordered: list[CopyDescriptor], gpus: tuple[str, ...]) -> float:
    """How far, at worst, the share that is read of one GPU is ahead of another's, in copies of the
    largest share."""
    totals = {gpu: sum(d.rows for d in ordered if gpus[d.segment] == gpu) for gpu in gpus}
    totals = {gpu: total for gpu, total in totals.items() if total}
    shares = [{gpus[d.segment]: d.rows / totals[gpus[d.segment]]} for d in ordered]
    largest = max((share for each in shares for share in each.values()), default=1.0)
    read = accumulate(
        shares,
        lambda done, share: done | {k: done[k] + v for k, v in share.items()},
        initial=dict.fromkeys(totals, 0.0),
    )
    return max(max(each.values()) - min(each.values()) for each in read if each) / largest


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 400)), min_size=1, max_size=60),
    st.sampled_from([*GPUS, "GPU-a"]),
)
def test_all_gpus_are_read_at_the_rates_that_end_together(
    sizes: list[tuple[int, int]], own: str
) -> None:
    given_ = copies(sizes)
    ordered = interleave(given_, GPUS, own)
    assert sorted(each.tag for each in ordered) == list(range(len(sizes)))  # each once
    for segment in range(len(GPUS)):  # what lies together is read in turn, as before
        tags = [each.tag for each in ordered if each.segment == segment]
        assert tags == sorted(tags)
    assert lag(ordered, GPUS) <= 1 + 1e-9


def test_engines_begin_with_different_gpus() -> None:
    """Of experts of one GPU after those of another, which is as uneven as can be: the control."""
    experts = copies([(segment, 128) for segment in range(3) for _ in range(8)])
    assert lag(experts, GPUS) == 8
    orders = [interleave(experts, GPUS, own) for own in sorted(GPUS)]
    assert [lag(order, GPUS) for order in orders] == [1, 1, 1]
    assert [GPUS[order[0].segment] for order in orders] == sorted(GPUS)
    for together in zip(*orders, strict=True):  # as long as none is faster than another
        assert sorted(GPUS[each.segment] for each in together) == sorted(GPUS)


def test_one_gpu_is_read_as_before() -> None:
    given_ = copies([(0, 128), (1, 5), (0, 3), (1, 256)])
    assert interleave(given_, ("GPU-a", "GPU-a"), "GPU-a") == given_
    assert interleave([], (), "GPU-a") == []
