"""What MLA derives of its weights: made again with each update, in place, and undone with it."""

import pytest
import torch

from sgl_fp8rl.receiver.session import SessionError
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.test_changes import change, commit
from tests.sgl_fp8rl.receiver.toy import BF16, Model, begin, update

SHAPES = {"kv_b": (256, 128)}


class Attention(torch.nn.Module):
    """As SGLang's MLA: tensors derived from ``kv_b_proj`` are not parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w_kc: torch.Tensor | None = None
        self.w_vc: torch.Tensor | None = None


class MlaModel(Model):
    """One weight of two heads, each with 64 rows of keys and 64 of values."""

    def __init__(self) -> None:
        super().__init__({"kv_b": torch.zeros(256, 128, dtype=BF16)})
        self.attention = Attention()

    def post_load_weights(self) -> None:
        keys, values = self.data("kv_b").view(2, 128, 128).split(64, dim=1)
        for name, rows in (("w_kc", keys), ("w_vc", values.transpose(1, 2))):
            held = getattr(self.attention, name)
            setattr(self.attention, name, rows.clone() if held is None else held.copy_(rows))


@pytest.mark.guarantee("in-place", fault="tensors that MLA derives from a weight")
def test_what_is_derived_follows_in_place() -> None:
    model = MlaModel()
    weights = toy.engine(model, SHAPES)
    before = {name: t.data_ptr() for name, t in weights.derived.tensors().items()}
    assert set(before) == {"attention.w_kc", "attention.w_vc"}
    for version in (0, 1):
        policy = toy.checkpoint(version, shapes=SHAPES)
        update(weights, policy, version=version)
        keys, values = policy["kv_b"].view(2, 128, 128).split(64, dim=1)
        derived = weights.derived.tensors()
        assert torch.equal(derived["attention.w_kc"], keys)
        assert torch.equal(derived["attention.w_vc"], values.transpose(1, 2))
        assert {name: t.data_ptr() for name, t in derived.items()} == before


@pytest.mark.guarantee("all-or-none", fault="NaN in a weight that MLA derives tensors from")
def test_what_is_derived_stays_where_an_update_fails_before_its_end() -> None:
    model = MlaModel()
    weights = toy.engine(model, SHAPES)
    update(weights, toy.checkpoint(0, shapes=SHAPES), version=0)
    before = {name: t.clone() for name, t in weights.derived.tensors().items()}
    broken = toy.checkpoint(1, shapes=SHAPES)
    broken["kv_b"][0, 0] = torch.nan
    session = begin(weights, broken, version=1)
    with pytest.raises(ValueError, match="NaN"):
        toy.write(session, broken)
    weights.quarantine("failed")
    assert not weights.may_generate
    assert all(torch.equal(t, before[name]) for name, t in weights.derived.tensors().items())
    update(weights, toy.checkpoint(2, shapes=SHAPES), version=1)
    assert weights.may_generate
    assert not torch.equal(weights.derived.tensors()["attention.w_kc"], before["attention.w_kc"])


def test_what_is_derived_must_not_move() -> None:
    model = MlaModel()
    weights = toy.engine(model, SHAPES)
    model.attention.w_vc = model.attention.w_vc.clone()  # type: ignore[union-attr]
    with pytest.raises(SessionError, match=r"attention\.w_vc moved"):
        update(weights, toy.checkpoint(0, shapes=SHAPES), version=0)


@pytest.mark.guarantee("one-version", fault="an undone update of MLA")
def test_what_is_derived_is_undone_with_its_weight() -> None:
    weights = toy.engine(MlaModel(), SHAPES)
    before = toy.checkpoint(0, shapes=SHAPES)
    after = {"kv_b": before["kv_b"].clone()}
    after["kv_b"][::16, 0] *= 2
    commit(weights, before)
    held = {name: t.clone() for name, t in weights.derived.tensors().items()}
    session = begin(weights, after, version=1, chunk_bytes=1 << 17)
    change(session, before, after)
    session.finish()  # another rank may still fail
    assert not torch.equal(weights.derived.tensors()["attention.w_kc"], held["attention.w_kc"])
    session.undo()
    weights.resume()
    assert all(torch.equal(t, held[name]) for name, t in weights.derived.tensors().items())
