"""Versions of a chain within a number of bytes: the largest changes first, the rest later."""

from pathlib import Path

import pytest
import torch

from sgl_fp8rl.formats import BLOCK_FP8
from sgl_fp8rl.ops.delta import MOST_DISTANCE, RECORD_BYTES, difference
from tests.sgl_fp8rl.weight_update import toy
from tests.trainer_bridge.test_chain import bring, encoded, links, trained
from tests.trainer_bridge.test_far_engine import step
from tests.trainer_bridge.test_update import holds
from trainer_bridge.chain import ChainError, ChainFollower, ChainPublisher, budget, files
from trainer_bridge.chain.files import as_bytes

pytestmark = pytest.mark.timeout(120)

Tensors = dict[str, torch.Tensor]


def decoded(tensors: Tensors) -> Tensors:
    """What an engine computes with."""
    scales = "_scale_inv"
    return {
        name: BLOCK_FP8.decode({"": tensor, scales: tensors[name + scales]})
        if name + scales in tensors
        else tensor.float()
        for name, tensor in tensors.items()
        if not name.endswith(scales)
    }


def changed_bytes(before: Tensors, after: Tensors) -> int:
    return sum(int((as_bytes(before[n]) != as_bytes(after[n])).sum()) for n in after)


def pair() -> tuple[Tensors, Tensors]:
    """Two versions, in which codes, scales and BF16 change; the scales of K by little."""
    before = toy.checkpoint(0)
    after = step(before, 1, part=0.05)
    for name, factor in (("attn.k.weight", 1.01), ("attn.v.weight", 3.0)):
        after[name] = after[name] * factor
    return encoded(before), encoded(after)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_the_largest_changes_fit(share: float) -> None:
    """None that is left out is larger than one that is taken, but for those of its own block."""
    before, after = pair()
    whole = RECORD_BYTES * changed_bytes(before, after)
    limit = round(share * whole)
    chosen, is_exact = budget.within(before, after, limit)
    assert not is_exact and 0 < RECORD_BYTES * changed_bytes(before, chosen) <= limit
    old, new, mixed = decoded(before), decoded(after), decoded(chosen)
    taken, left = [], []
    for name in new:
        sizes = (new[name] - old[name]).abs()
        is_taken = mixed[name] == new[name]
        assert bool(((mixed[name] == old[name]) | is_taken).all()), "an element is old or new"
        scales = f"{name}_scale_inv"
        moved = torch.zeros(())
        if scales in after:
            moved = budget._spread(before[scales] != after[scales], sizes.shape, BLOCK_FP8)
        alone = (sizes > 0) & ~moved.bool()
        taken.append(sizes[alone & is_taken])
        left.append(sizes[alone & ~is_taken])
    an_eighth_of_an_octave = 2 ** (1 / budget.BINS_AN_OCTAVE)
    assert torch.cat(left).max() <= an_eighth_of_an_octave * torch.cat(taken).min()


def test_a_block_whose_scale_moves_is_one_change() -> None:
    """Old codes under a new scale, or the other way, would be neither version."""
    before, after = pair()
    names = [name for name in after if name.startswith("attn.v.weight")]
    of_v = RECORD_BYTES * changed_bytes(before, {name: after[name] for name in names})
    chosen, _ = budget.within(before, after, of_v + 200)
    sides = []
    for codes in ("attn.k.weight", "attn.v.weight"):
        scales = f"{codes}_scale_inv"
        for row, column in torch.nonzero(before[scales] != after[scales]).tolist():
            block = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            sides.append(bool(chosen[scales][row, column] == after[scales][row, column]))
            side = after if sides[-1] else before
            found, wanted = (each[codes][block].view(torch.uint8) for each in (chosen, side))
            assert torch.equal(found, wanted)
    assert {*sides} == {True, False}


def test_a_block_that_never_fits_keeps_no_other_change_back() -> None:
    before, after = pair()
    chosen, is_exact = budget.within(before, after, 1000)
    assert not is_exact and torch.equal(
        chosen["attn.v.weight_scale_inv"], before["attn.v.weight_scale_inv"]
    )
    assert 0.9 * 1000 < RECORD_BYTES * changed_bytes(before, chosen) <= 1000


def test_changes_in_every_word_are_no_whole_tensor(tmp_path: Path) -> None:
    """Which would be several times what was counted."""
    before, limit = toy.checkpoint(0), 1000
    after = dict(before)
    after["embed.weight"] = before["embed.weight"].clone()
    after["embed.weight"].view(torch.int16).view(-1)[::4] ^= 1
    publisher = ChainPublisher(tmp_path, trained(), 8, limit)
    for version, tensors in enumerate((before, after)):
        publisher.publish(tensors, version=version, run="r")
    (written,) = [tensor for _, tensor in files.read(tmp_path, links(tmp_path)[-1].delta)]
    nbytes = before["embed.weight"].nbytes
    assert nbytes > 2 * limit, "or a whole one would fit"
    assert 0.9 * limit < written.numel() <= limit + RECORD_BYTES * (nbytes // MOST_DISTANCE)


def test_what_fits_is_exact() -> None:
    before, after = pair()
    whole = RECORD_BYTES * changed_bytes(before, after)
    for limit in (whole, whole + 1):
        chosen, is_exact = budget.within(before, after, limit)
        assert is_exact and chosen is after
    assert not budget.within(before, after, whole - 1)[1]
    assert budget.within(before, before, 1) == (before, True)


def test_what_is_left_out_comes_later(tmp_path: Path) -> None:
    """A trainer that stands still is reached exactly, and so is one at each version that is whole;
    no delta is larger than the budget."""
    engine = trained()
    limit, every = 2_000, 8
    publisher = ChainPublisher(tmp_path, engine, every, limit)
    follower = ChainFollower(tmp_path)
    tensors = toy.checkpoint(0)
    exact = []
    for version in range(2 * every):
        if version in range(1, 4) or version in range(every - 2, every + 1):
            tensors = step(tensors, version, part=0.01)
        before = dict(follower._tensors)
        publisher.publish(tensors, version=version, run="r")
        assert bring(follower, engine) == version
        exact.append(follower.is_exact)
        assert holds(engine, tensors) is follower.is_exact
        if version and not links(tmp_path)[-1].anchor:
            sent = sum(
                difference(as_bytes(before[n]), as_bytes(t)).numel()  # type: ignore[union-attr]
                for n, t in follower._tensors.items()
            )
            assert sent <= limit + 8 * RECORD_BYTES  # and records at regular distances
    assert exact[0] and exact[every] and exact[-1] and not all(exact)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
def test_a_budget_is_a_number_of_bytes(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(ChainError, match="budget_bytes"):
        ChainPublisher(tmp_path, None, budget_bytes=wrong)  # type: ignore[arg-type]
