"""Sessions: the state an engine is left in, what SGLang's loader writes, and fixed addresses."""

import pytest
import torch

from sgl_fp8rl.weight_update.manifest import ManifestError, describe
from sgl_fp8rl.weight_update.session import EngineWeights, SessionError, State
from tests.sgl_fp8rl.weight_update import toy
from tests.sgl_fp8rl.weight_update.toy import BF16, BIG, Model, Weights, begin, ragged, update


@pytest.fixture
def weights() -> EngineWeights:
    return toy.engine(toy.toy(), toy.SHAPES)


# -- versions and states


def test_versions_only_grow(weights: EngineWeights) -> None:
    tensors = toy.checkpoint()
    update(weights, tensors, version=3)
    for version in (0, 2, 3):
        with pytest.raises(ManifestError, match=f"version {version} is not newer"):
            weights.check(describe(tensors.items(), version))
    update(weights, tensors, version=7)
    assert weights.version == 7


def test_a_second_session_is_refused(weights: EngineWeights) -> None:
    tensors = toy.checkpoint()
    session = begin(weights, tensors, version=1)
    assert weights.state is State.UPDATING
    with pytest.raises(ManifestError, match="an update to version 1 is under way"):
        weights.check(describe(tensors.items(), 2))
    assert weights.session is session


def test_a_session_that_wrote_nothing_leaves_things_as_they_were(weights: EngineWeights) -> None:
    begin(weights, toy.checkpoint())
    weights.resume()
    assert (weights.state, weights.reason, weights.version) == (State.SERVING, "", -1)
    weights.quarantine("a fault")
    begin(weights, toy.checkpoint())
    weights.resume()
    assert (weights.state, weights.reason) == (State.QUARANTINED, "a fault")


def test_a_complete_update_heals_a_quarantined_engine(weights: EngineWeights) -> None:
    tensors = toy.checkpoint()
    session = begin(weights, tensors)
    session.write("norm.weight", tensors["norm.weight"])
    weights.quarantine("it broke off")
    assert (weights.state, weights.version, weights.session) == (State.QUARANTINED, -1, None)
    update(weights, tensors, version=0)
    assert (weights.state, weights.reason, weights.version) == (State.SERVING, "", 0)
    assert toy.same(toy.contents(weights.model), toy.expected(tensors))


def test_an_engine_serves_nothing_before_its_first_weights() -> None:
    weights = EngineWeights(toy.toy(), BF16)
    assert weights.state is State.QUARANTINED
    assert weights.version == -1


def test_the_first_update_records_the_routes() -> None:
    """An engine with dummy weights knows its tensors from the first manifest."""
    weights = EngineWeights(toy.toy(), BF16)
    tensors = toy.checkpoint()
    update(weights, toy.quantized(tensors))
    assert toy.same(toy.contents(weights.model), toy.expected(tensors))


def test_a_first_manifest_that_the_loader_refuses_leaves_no_routes() -> None:
    weights = EngineWeights(toy.toy(), BF16)
    tensors = toy.checkpoint()
    wrong = {**tensors, "unknown.weight": torch.zeros(4)}
    with pytest.raises(ManifestError, match=r"failed at unknown\.weight"):
        weights.check(describe(wrong.items(), 0))
    partial = {name: t for name, t in tensors.items() if name != "attn.k.weight"}
    with pytest.raises(ManifestError, match=r"elements of attn\.qkv\.weight"):
        weights.check(describe(partial.items(), 0))
    assert weights.table is None
    update(weights, tensors)


# -- what goes through SGLang's loader, and addresses


class Gemma:
    """A loader that keeps weight + 1 beside a norm's weight, unless it is told to skip it."""

    def __init__(self) -> None:
        self.skips = False
        storage = {"w": torch.zeros(256, 128, dtype=BF16), "norm": torch.zeros(128, dtype=BF16)}
        self.model = Model(storage, self.load)
        self.model.register_buffer("plus_one", torch.ones(128, dtype=BF16))

    def load(self, model: Model, named: Weights) -> None:
        for name, weight in named:
            if name == "norm" and self.skips:
                continue
            model.data(name).copy_(weight)
            if name == "norm":
                torch.add(model.data(name), 1.0, out=model.get_buffer("plus_one"))


GEMMA: toy.Shapes = {"w": (256, 128), "norm": (128,)}


def test_what_falls_back_goes_through_the_loader_with_all_that_is_derived() -> None:
    gemma = Gemma()
    weights = toy.engine(gemma.model, GEMMA)
    tensors = toy.checkpoint(shapes=GEMMA)
    update(weights, tensors)
    assert torch.equal(gemma.model.data("norm"), tensors["norm"])
    assert torch.equal(gemma.model.get_buffer("plus_one"), tensors["norm"] + 1.0)
    assert torch.equal(gemma.model.data("w"), tensors["w"])


def test_a_loader_that_leaves_its_parameter_unwritten_is_caught() -> None:
    gemma = Gemma()
    weights = toy.engine(gemma.model, GEMMA)
    gemma.skips = True
    with pytest.raises(SessionError, match="left norm unwritten"):
        update(weights, toy.checkpoint(shapes=GEMMA))
    assert weights.state is not State.SERVING


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_never_reaches_the_loader(bad: float) -> None:
    gemma = Gemma()
    weights = toy.engine(gemma.model, GEMMA)
    tensors = toy.checkpoint(shapes=GEMMA)
    tensors["norm"][5] = bad
    with pytest.raises(ValueError, match="norm holds NaN or Inf"):
        update(weights, tensors)
    assert weights.state is not State.SERVING
    assert torch.equal(gemma.model.data("norm"), torch.zeros(128, dtype=BF16))


def test_what_falls_back_is_not_split_and_not_fp8() -> None:
    weights = toy.engine(Gemma().model, GEMMA)
    tensors = toy.checkpoint(shapes=GEMMA)
    session = begin(weights, tensors)
    with pytest.raises(SessionError, match="norm is split"):
        session.write("norm", tensors["norm"][:64], (0, 64))


def test_a_parameter_that_moved_is_caught() -> None:
    weights = ragged()
    tensors = toy.checkpoint(shapes=BIG)
    session = begin(weights, tensors)
    for name, tensor in tensors.items():
        session.write(name, tensor)
    parameter = weights.model.get_parameter("norm")
    parameter.data = parameter.data.clone()
    with pytest.raises(SessionError, match="norm moved in memory"):
        session.finish()
    assert not session.finished


def test_a_parameter_that_is_new_is_caught() -> None:
    weights = ragged()
    weights.check_addresses()
    weights.model.register_parameter("extra", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(SessionError, match="extra moved in memory"):
        weights.check_addresses()
