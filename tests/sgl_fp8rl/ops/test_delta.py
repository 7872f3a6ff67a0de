"""Deltas of bytes, beside an oracle that makes and reads them byte by byte."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given

from sgl_fp8rl.ops import delta
from sgl_fp8rl.ops.delta import DeltaError, apply, difference
from tests import delta_oracle


@st.composite
def edits(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes before and after."""
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
def test_a_delta_is_the_oracles_and_makes_the_new_of_the_old(
    drawn: tuple[torch.Tensor, torch.Tensor],
) -> None:
    old, new = drawn
    found = difference(old, new)
    before, after = old.numpy().tobytes(), new.numpy().tobytes()
    wanted = delta_oracle.delta_of(before, after)
    assert (None if found is None else found.numpy().tobytes()) == wanted
    if found is None or wanted is None:
        return
    assert delta_oracle.read(before, wanted) == after
    changed = old.clone()
    back = delta.undoing(found, apply(changed, found))
    assert torch.equal(changed, new)
    apply(changed, found)
    assert torch.equal(changed, new)
    apply(changed, back)
    assert torch.equal(changed, old)


def test_records_are_applied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "AT_ONCE", 7)
    old, new = far_apart(*range(5, 60, 3), 70_000, 300_000)
    found = difference(old, new)
    assert found is not None and found.numel() > 3 * 2 * delta.AT_ONCE
    apply(old, found)
    assert torch.equal(old, new)


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
    given_ = torch.tensor(list(data), dtype=torch.uint8)
    try:
        wanted = delta_oracle.read(bytes(size), data) if len(data) % 3 == 0 else None
    except IndexError:
        wanted = None
    first = int.from_bytes(data[:2], "little") if len(data) >= 3 else 1
    if wanted is None or first == 0:
        with pytest.raises(DeltaError, match="does not fit"):
            apply(content, given_)
        assert not content.any()
    else:
        apply(content, given_)
