"""Sessions: the state an engine is left in, what SGLang's loader writes, and fixed addresses."""

from typing import Any

import pytest
import torch

from sgl_fp8rl.protocol.manifest import ManifestError, describe
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from sgl_fp8rl.receiver.session import Session, SessionError
from sgl_fp8rl.receiver.writers.shared_memory import Bucket, SharedMemoryError
from tests.sgl_fp8rl.receiver import fake_gpu, toy
from tests.sgl_fp8rl.receiver.fake_gpu import Make, in_place
from tests.sgl_fp8rl.receiver.toy import BF16, BIG, Model, Weights, begin, ragged, update

gpu, make = fake_gpu.gpu, fake_gpu.make


@pytest.fixture
def weights() -> EngineWeights:
    return toy.engine(toy.toy(), toy.SHAPES)


# -- versions and states


def test_a_run_does_not_come_back_once_another_committed(weights: EngineWeights) -> None:
    tensors = toy.checkpoint()
    update(weights, tensors, version=5)
    begin(weights, tensors, version=0, run="another")
    weights.quarantine("its trainer died")
    weights.check_policy(Policy(toy.RUN, 6))  # what did not commit replaced nothing
    update(weights, tensors, version=0, run="another")
    with pytest.raises(ManifestError, match=f"'{toy.RUN}' was replaced"):
        weights.check_policy(Policy(toy.RUN, 6))
    weights.check_policy(Policy("a third", 0))


def test_a_commit_is_known_by_its_token_while_it_serves(weights: EngineWeights) -> None:
    session = begin(weights, toy.checkpoint(), version=3)
    toy.write(session, toy.checkpoint())
    session.finish()
    assert not weights.committed_by("t", session.policy)
    weights.commit("t")
    assert weights.committed_by("t", session.policy)
    assert not weights.committed_by("other", session.policy)
    assert not weights.committed_by("t", Policy(toy.RUN, 4))
    assert not weights.committed_by("t", Policy("another", 3))
    weights.quarantine("released")
    assert not weights.committed_by("t", session.policy)
    assert not weights.committed_by("", session.policy)


def test_a_second_session_is_refused(weights: EngineWeights) -> None:
    tensors = toy.checkpoint()
    session = begin(weights, tensors, version=1)
    assert weights.state is State.UPDATING
    with pytest.raises(ManifestError, match="an update to version 1 is under way"):
        weights.check_policy(Policy(toy.RUN, 2))
    assert weights.session is session


def test_a_session_that_wrote_nothing_leaves_things_as_they_were(weights: EngineWeights) -> None:
    begin(weights, toy.checkpoint())
    weights.resume()
    assert (weights.state, weights.reason, weights.policy.version) == (State.SERVING, "", -1)
    weights.quarantine("a fault")
    begin(weights, toy.checkpoint())
    weights.resume()
    assert (weights.state, weights.reason) == (State.QUARANTINED, "a fault")


def test_the_first_update_records_the_routes() -> None:
    """An engine with dummy weights knows its tensors from the first manifest."""
    weights = EngineWeights(toy.toy(), BF16)
    assert (weights.state, weights.policy.version) == (State.QUARANTINED, -1)
    tensors = toy.checkpoint()
    update(weights, toy.quantized(tensors))
    assert toy.same(toy.contents(weights.model), toy.expected(tensors))


def test_what_fails_before_the_first_write_leaves_the_version_whole(
    weights: EngineWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as an allocation: nothing is lost, so the engine need not be quarantined."""
    before = toy.contents(weights.model)
    session = begin(weights, toy.checkpoint())

    def no_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "slot", no_memory)
        with pytest.raises(MemoryError):
            session.write(0)
    assert not session.dirty
    assert toy.same(toy.contents(weights.model), before)
    toy.write(session, toy.checkpoint())
    assert session.dirty
    weights.quarantine("it broke off")
    assert not begin(weights, toy.checkpoint()).dirty, "the next one is not tainted"


def test_what_is_only_kept_for_the_loader_is_not_a_write() -> None:
    gemma = Gemma(GEMMA)
    weights = toy.engine(gemma.model, GEMMA)
    tensors = toy.checkpoint(shapes=GEMMA)
    session = begin(weights, tensors, chunk_bytes=128 * 128 * 2)
    (norm,) = [i for i, chunk in enumerate(session.writer.chunks) if chunk[0].name == "norm"]
    toy.fill(session, tensors, norm)
    session.write(norm)
    assert not session.dirty


def test_each_chunk_is_written_once_and_none_is_left_out() -> None:
    tensors = toy.checkpoint(shapes=BIG)
    session = begin(ragged(), tensors, chunk_bytes=128 * 200 * 2)
    assert len(session.writer.chunks) == 5

    def write(index: int) -> None:
        toy.fill(session, tensors, index)
        session.write(index)
        with pytest.raises(SessionError, match=f"chunk {index} is not awaited"):
            session.write(index)

    for index in (3, 0, 4, 1):
        write(index)
    with pytest.raises(SessionError, match="1 of 5 chunks are missing, w among them"):
        session.finish()
    assert not session.finished
    write(2)
    session.finish()
    assert session.finished
    with pytest.raises(SessionError, match="chunk 2 is not awaited"):
        session.write(2)


# -- writers and memory that are kept from update to update


def accept(weights: EngineWeights, tensors: toy.Tensors, chunk_bytes: int) -> str:
    manifest = describe(tensors.items(), chunk_bytes)
    weights.accept(manifest)
    return manifest.fingerprint


def test_the_last_four_plans_are_kept(weights: EngineWeights) -> None:
    tensors = toy.checkpoint()
    known = [accept(weights, tensors, 256 * lines) for lines in range(400, 404)]
    assert all(weights.knows(fingerprint) for fingerprint in known)
    weights.begin(known[0], Policy(toy.RUN, 0))  # used, so it is the last to be forgotten
    weights.resume()
    newer = accept(weights, tensors, 256 * 500)
    assert [weights.knows(f) for f in [*known, newer]] == [True, False, True, True, True]
    accept(weights, tensors, 256 * 500)  # the same again pushes nothing out
    assert [weights.knows(f) for f in [*known, newer]] == [True, False, True, True, True]
    weights.forget(newer)
    weights.forget("unknown")
    assert [weights.knows(f) for f in [*known, newer]] == [True, False, True, True, False]


def test_the_bucket_stays_open_while_updates_succeed(weights: EngineWeights) -> None:
    tensors = toy.checkpoint()
    update(weights, tensors)
    assert weights.memory.known() == ["toy"]
    begin(weights, tensors, version=1)
    weights.resume()
    assert weights.memory.known() == []
    begin(weights, tensors, version=1)
    weights.quarantine("it broke off")
    assert weights.memory.known() == []


def test_mapped_tensors_make_the_last_chunk() -> None:
    """What is routed and what falls back, each once in the bucket and once in place."""
    shapes: toy.Shapes = {"norm": (128,), "w": (256, 128), "v": (256, 128)}
    gemma = Gemma(shapes)
    weights = toy.engine(gemma.model, shapes)
    for version, mapped in enumerate([("w",), ("norm", "v")]):
        tensors = toy.checkpoint(version, shapes=shapes)
        session = begin(weights, tensors, version, 1 << 16, mapped=mapped)
        last = len(session.writer.chunks) - 1
        with pytest.raises(SharedMemoryError, match="segments; open them first"):
            session.write(last)
        weights.memory.segments = in_place(None, {name: tensors[name] for name in mapped}, 64)
        toy.write(session, tensors)
        session.finish()
        weights.commit()
        assert gemma.holds(tensors)
        assert weights.memory.known() == ["toy", "s"]
        weights.memory.segments = None


def test_an_update_that_maps_nothing_lets_go_of_the_trainers_parameters() -> None:
    weights, tensors = ragged(), toy.checkpoint(shapes=BIG)
    segments = weights.memory.segments = in_place(None, {}, 0)
    mappings: list[Any] = list(segments._mappings)
    assert weights.memory.known() == ["s"]
    begin(weights, tensors)
    assert [mapping.closed for mapping in mappings] == [1, 1]
    assert weights.memory.known() == ["toy"]


# -- what goes through SGLang's loader, and addresses


class Gemma:
    """A loader that keeps weight + 1 beside a norm's weight, unless it is told to skip it."""

    def __init__(self, shapes: toy.Shapes) -> None:
        self.skips = False
        storage = {name: torch.zeros(shape, dtype=BF16) for name, shape in shapes.items()}
        self.model = Model(storage, self.load)
        self.model.register_buffer("plus_one", torch.ones(shapes["norm"], dtype=BF16))

    def load(self, model: Model, named: Weights) -> None:
        for name, weight in named:
            if name == "norm" and self.skips:
                continue
            model.data(name).copy_(weight)
            if name == "norm":
                torch.add(model.data(name), 1.0, out=model.get_buffer("plus_one"))

    def holds(self, tensors: toy.Tensors) -> bool:
        """Whether all are there, and what is derived of them."""
        derived = torch.equal(self.model.get_buffer("plus_one"), tensors["norm"] + 1.0)
        return derived and all(torch.equal(self.model.data(n), t) for n, t in tensors.items())


GEMMA: toy.Shapes = {"w": (256, 128), "norm": (128,)}


def test_a_loader_that_leaves_its_parameter_unwritten_is_caught() -> None:
    gemma = Gemma(GEMMA)
    weights = toy.engine(gemma.model, GEMMA)
    gemma.skips = True
    with pytest.raises(SessionError, match="left norm unwritten"):
        update(weights, toy.checkpoint(shapes=GEMMA))
    assert weights.state is not State.SERVING


LARGEST = torch.finfo(torch.float32).max
"""It is finite, and Inf in BF16."""


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), LARGEST])
def test_nan_and_inf_never_stay_in_the_loaders_parameter(bad: float) -> None:
    gemma = Gemma(GEMMA)
    weights = toy.engine(gemma.model, GEMMA)
    tensors = toy.checkpoint(shapes=GEMMA, dtype=torch.float32)
    tensors["norm"][5] = bad
    with pytest.raises(ValueError, match="norm holds NaN or Inf"):
        update(weights, tensors)
    assert weights.state is not State.SERVING
    assert bad == LARGEST or not gemma.model.data("norm").any(), "it reached the loader"


@pytest.mark.parametrize(
    ("shape", "slices"),
    [
        ((), [(0, 1)]),
        ((20_000,), [(0, 16_384), (16_384, 20_000)]),
        ((300, 128), [(0, 128), (128, 256), (256, 300)]),
        ((5, 64, 128), [(0, 2), (2, 4), (4, 5)]),
    ],
)
def test_what_falls_back_is_held_until_it_is_whole(
    make: Make, shape: tuple[int, ...], slices: list[tuple[int, int]]
) -> None:
    shapes: toy.Shapes = {"norm": shape, "w": (256, 128)}
    gemma = Gemma(shapes)
    weights = make(gemma.model, shapes)
    tensors = toy.checkpoint(shapes=shapes)
    session = begin(weights, tensors, chunk_bytes=128 * 128 * 2)
    assert [p.rows for chunk in session.writer.chunks for p in chunk if p.name == "norm"] == slices
    for index in reversed(range(len(session.writer.chunks))):
        toy.fill(session, tensors, index)
        session.write(index)
        assert not gemma.model.data("norm").any()  # the loader takes whole tensors only
    session.finish()
    assert gemma.holds(tensors)


def test_a_parameter_that_is_new_is_caught() -> None:
    weights = ragged()
    weights.check_addresses()
    weights.model.register_parameter("extra", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(SessionError, match="extra moved in memory"):
        weights.check_addresses()


# -- a stream: names come with the chunks


def streamed(weights: EngineWeights, tensors: toy.Tensors) -> Session:
    manifest = describe(tensors.items(), 1 << 17, streamed=True)
    weights.accept(manifest)
    bucket = torch.full((2 * manifest.chunk_bytes,), 0xA5, dtype=torch.uint8)
    weights.memory.bucket = Bucket("toy", bucket)
    return weights.begin(manifest.fingerprint, Policy(toy.RUN, 0))


@pytest.mark.parametrize("names", ["norm.weight", [1], ["unknown"], {"norm.weight": 1}, None])
def test_a_stream_goes_on_with_names_of_its_manifest_once(
    weights: EngineWeights, names: Any
) -> None:
    session = streamed(weights, toy.checkpoint())
    with pytest.raises(SessionError):
        session.extend(names)
    assert not session.dirty
    session.extend(["norm.weight"])
    with pytest.raises(SessionError, match=r"norm\.weight' is not due"):
        session.extend(["norm.weight"])
    weights.resume()
    session = begin(weights, toy.checkpoint())  # not a stream
    with pytest.raises(SessionError, match="is not due"):
        session.extend(["norm.weight"])


def test_a_stream_is_written_whole(weights: EngineWeights) -> None:
    """A chunk when it is full, or the tensors that come into it later would not be; and what ends
    early is not committed."""
    tensors = toy.checkpoint()
    session = streamed(weights, tensors)
    # its chunks are those of one stream
    assert not weights.knows(session.writer.manifest.fingerprint)
    session.extend(["norm.weight"])
    toy.fill(session, tensors, 0)
    session.write(0)
    with pytest.raises(SessionError, match="chunk 0 was written before"):
        session.extend(["attn.q.bias"])
    weights.quarantine("it broke off")
    session = streamed(weights, tensors)
    with pytest.raises(SessionError, match=r"missing: .* and 13 more"):
        session.finish()
    session.extend(list(tensors))
    with pytest.raises(SessionError, match="chunks are missing"):
        session.finish()
