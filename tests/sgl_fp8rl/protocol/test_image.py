"""Deltas of chunks, beside a second implementation that reads them byte by byte."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given

from sgl_fp8rl.protocol import image
from sgl_fp8rl.protocol.image import Change, DeltaError, Image, apply, difference


def read(content: bytes, delta: bytes) -> bytes:
    """What a delta makes of some bytes."""
    records, at, changed = len(delta) // 3, -1, bytearray(content)
    for record in range(records):
        at += int.from_bytes(delta[2 * record : 2 * record + 2], "little")
        changed[at] = delta[2 * records + record]
    return bytes(changed)


@st.composite
def edits(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk before and after."""
    size = draw(st.integers(0, 300_000))
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    old = generator.integers(0, 256, size, dtype=np.uint8)
    new = old.copy()
    for at in draw(st.lists(st.integers(0, max(size - 1, 0)), max_size=20)) if size else ():
        new[at] = draw(st.integers(0, 255))
    if size and draw(st.booleans()):
        several = generator.integers(0, size, size // 50)
        new[several] = generator.integers(0, 256, len(several), dtype=np.uint8)
    return torch.from_numpy(old), torch.from_numpy(new)


def far_apart(*at: int) -> tuple[torch.Tensor, torch.Tensor]:
    old = torch.zeros(1 << 20, dtype=torch.uint8)
    new = old.clone()
    new[list(at)] = 7
    return old, new


@given(edits())
@example(far_apart(0, 65535, 2 * 65535 + 1, (1 << 20) - 1))
@example(far_apart((1 << 20) - 1))
@example(far_apart())
def test_a_delta_makes_the_new_of_the_old(drawn: tuple[torch.Tensor, torch.Tensor]) -> None:
    old, new = drawn
    delta = difference(old, new)
    if delta is None:
        words = (old != new)[: len(new) // 8 * 8].view(-1, 8).any(1).sum()
        bytes_ = int((old != new).sum()) + len(new) // image.MOST_DISTANCE
        assert words > image.WORTH * len(new) / 8 or bytes_ * 3 > image.WORTH * len(new) - 24
        return
    assert delta.dtype == torch.uint8
    assert len(delta) <= 3 * (int((old != new).sum()) + len(new) // image.MOST_DISTANCE + 1)
    assert read(old.numpy().tobytes(), delta.numpy().tobytes()) == new.numpy().tobytes()
    changed = old.clone()
    apply(changed, delta)
    assert torch.equal(changed, new)
    apply(changed, delta)
    assert torch.equal(changed, new)


def test_too_much_is_no_delta() -> None:
    old = torch.zeros(3000, dtype=torch.uint8)
    new = old.clone()
    new[::17] = 1
    assert difference(old, new) is not None
    new[::8] = 1  # every word
    assert difference(old, new) is None
    new[:] = old
    new[:600] = 1  # a fifth of the words, whole
    assert difference(old, new) is None


@given(st.binary(max_size=40), st.integers(0, 70_000))
def test_malformed_deltas_write_nothing(data: bytes, size: int) -> None:
    content = torch.zeros(size, dtype=torch.uint8)
    delta = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
    try:
        wanted = read(bytes(size), data) if len(data) % 3 == 0 else None
    except IndexError:
        wanted = None
    first = int.from_bytes(data[:2], "little") if len(data) >= 3 else 1
    if wanted is None or first == 0:
        with pytest.raises(DeltaError, match="does not fit"):
            apply(content, delta.to(torch.uint8))
        assert not content.any()
    else:
        apply(content, delta.to(torch.uint8))


def test_an_image_goes_on_by_changes_and_whole_chunks() -> None:
    chunks = {n: torch.full((4096,), n, dtype=torch.uint8) for n in range(3)}
    kept = Image("first", {n: chunk.clone() for n, chunk in chunks.items()})
    chunks[0][5] = 9
    chunks[1] = torch.arange(5000).to(torch.uint8)  # of another size
    changes = {n: kept.change_to(n, chunk) for n, chunk in chunks.items()}
    assert [changes[n].is_delta for n in range(3)] == [True, False, True]
    before = {n: chunk.clone() for n, chunk in kept._chunks.items()}
    first = kept
    for n, chunk in chunks.items():
        target = torch.empty_like(chunk)
        kept.write(n, changes[n], target)
        assert torch.equal(target, chunk)
    assert all(torch.equal(kept._chunks[n], before[n]) for n in before), "not before the commit"
    kept = first.advance(changes, "second")
    assert (first.name, kept.name) == ("", "second")
    with pytest.raises(DeltaError, match="does not fit"):  # it has given its chunks away
        first.write(0, changes[0], torch.empty(4096, dtype=torch.uint8))
    assert all(torch.equal(kept._chunks[n], chunk) for n, chunk in chunks.items())


def test_a_change_of_what_is_not_kept_is_refused() -> None:
    delta = Change(torch.tensor([1, 0, 9], dtype=torch.uint8), True)
    target = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(DeltaError, match="chunk 4 does not fit"):
        Image("a", {}).write(4, delta, target)
    with pytest.raises(DeltaError, match="chunk 4 does not fit"):
        Image("a", {4: torch.zeros(7, dtype=torch.uint8)}).write(4, delta, target)
    assert not target.any()


def test_an_image_holds_what_its_update_brought() -> None:
    """A chunk that another rank sent this time must not be the base of a later delta here."""
    first = {chunk: torch.full((64,), chunk, dtype=torch.uint8) for chunk in range(2)}
    image = Image("1", {}).advance({c: Change(v, is_delta=False) for c, v in first.items()}, "1")
    change = image.change_to(0, torch.full((64,), 9, dtype=torch.uint8))
    later = image.advance({0: change}, "2")
    assert not later.change_to(1, first[1]).is_delta, "whole, since nothing is known of it"
    assert later.change_to(0, torch.full((64,), 9, dtype=torch.uint8)).is_delta
