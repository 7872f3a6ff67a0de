"""A second try at an update that not every engine has: it brings the same weights, or nothing."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import ManifestError
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge.test_fsdp import failure, run, toy_trainer
from tests.trainer_bridge.test_transaction import late_engine, serves, states
from tests.trainer_bridge.test_update import engine_of
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.updates import weights
from trainer_bridge.updates.update import RUN, update
from trainer_bridge.updates.weights import WholeModel, weights_digest

pytestmark = pytest.mark.timeout(120)


Late = tuple[FakeEngine, FakeEngine, toy.Tensors]


@pytest.fixture
def late() -> Late:
    """An engine that has version 0, and one that had not started."""
    engine, other, tensors = engine_of(1), late_engine(), toy.checkpoint()
    assert list(update(tensors, [engine, other], version=0, require=1).failed) == ["engine 1"]
    other.dead = ()
    return engine, other, tensors


@pytest.mark.guarantee("several-engines", fault="a second try brings other weights")
@pytest.mark.parametrize("alone", [False, True])
def test_other_weights_are_refused(late: Late, alone: bool) -> None:
    """Else two contents of one version would be served."""
    engine, other, tensors = late
    engines, changed = other if alone else [engine, other], toy.checkpoint()
    with torch.no_grad():
        changed["norm.weight"][3] += 0.5
    before = states(other)
    with pytest.raises(ManifestError, match="have changed since an earlier try"):
        update(changed, engines, version=0)
    assert serves(engine, 0, tensors)
    assert states(other) == before
    # the ways back: the same weights, or a newer version
    update(tensors, engines, version=0)
    assert serves(other, 0, tensors)
    update(changed, [engine, other], version=1)
    assert all(serves(each, 1, changed) for each in (engine, other))


@pytest.mark.guarantee(
    "runs", fault="the connection is cut after the commit, and the trainer tries again"
)
@pytest.mark.guarantee("runs", fault="the answer to a commit is lost, and the weights change")
@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("others", [0, 1])
def test_a_commit_whose_answer_was_lost(others: int, is_restarted: bool) -> None:
    """Nothing is to be sent, and the engines would go on with what they have; or the one whose
    answer is lost starts anew then, with nothing."""
    lost, rest, tensors = engine_of(2), [engine_of(1)] * others, toy.checkpoint()
    engines, other = [*rest, lost] if rest else lost, toy.checkpoint(1)
    lost.lost = ["end"]
    with pytest.raises(EngineError, match="cut"):
        update(tensors, engines, version=0)
    if is_restarted:
        lost.ranks = engine_of(2).ranks
    if rest or not is_restarted:
        with pytest.raises(ManifestError, match="have changed since an earlier try"):
            update(other, engines, version=0)
    held = rest if is_restarted else [*rest, lost]
    assert all(serves(each, 0, tensors) for each in held)
    again = update(tensors, engines, version=0)
    assert (again.run, again.version, again.bytes > 0) == (RUN, 0, is_restarted)
    assert all(serves(each, 0, tensors) for each in [*rest, lost])
    # the control: a version whose commit was answered is old
    with pytest.raises(EngineError, match="version 0 is not newer"):
        update(tensors, engines, version=0)
    update(other, engines, version=1)
    assert all(serves(each, 1, other) for each in [*rest, lost])


def test_the_order_of_names_does_not_count(late: Late) -> None:
    engine, other, tensors = late
    update(dict(reversed(tensors.items())), [engine, other], version=0)
    assert all(serves(each, 0, tensors) for each in (engine, other))


def test_weights_that_cannot_be_read_again_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The update committed, so it must not raise."""
    engines, tensors = [engine_of(1), late_engine()], toy.checkpoint()
    with monkeypatch.context() as patch:
        patch.setattr(weights, "weights_digest", lambda named: 1 / 0)
        assert list(update(tensors, engines, version=0, require=1).failed) == ["engine 1"]
    engines[1].dead = ()
    update(toy.checkpoint(1), engines, version=0)
    assert serves(engines[1], 0, toy.checkpoint(1))


def test_kv_scales_count() -> None:
    def digest(scales: torch.Tensor | None) -> str:
        model = WholeModel(toy.checkpoint())
        if scales is not None:
            model.add(KV_SCALES, scales)
        return model.digest()

    scales = torch.ones(2, 2, 4)
    assert digest(scales) == digest(scales.clone()) != digest(2 * scales)
    assert digest(None) not in ("", digest(scales))


def changes_on_one_rank(rank: int, folder: Path) -> None:
    engines = [engine_of(1), late_engine()] if rank == 0 else None
    tensors = toy.checkpoint()
    model = toy_trainer(tensors)
    update(model, engines, version=0, require=1 if rank == 0 else None)
    if engines is not None:
        engines[1].dead = ()
    parameter = model.get_parameter("attn.q.weight")
    assert isinstance(parameter, DTensor)
    local = parameter.to_local().detach()
    if rank == 1:
        local[-1, -1] += 1.0
    assert "have changed" in failure(lambda: update(model, engines, version=0))[1]
    if rank == 1:
        local[-1, -1] = tensors["attn.q.weight"][-1, -1]
    update(model, engines, version=0)
    assert engines is None or all(serves(each, 0, tensors) for each in engines)


def test_shards_that_changed_on_one_rank_are_refused(tmp_path: Path) -> None:
    run(changes_on_one_rank, tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [1, 3, 8, 1025])
@pytest.mark.parametrize("offset", [0, 1])
def test_each_element_counts(dtype: torch.dtype, size: int, offset: int) -> None:
    """The last one too, in tensors and views whose size is not a multiple of a word."""
    tensor = torch.ones(size + offset, dtype=dtype)[offset:]
    digest = partial(weights_digest, [("w", tensor)])
    first = digest()
    for place in {0, size // 2, size - 1}:
        tensor[place] = 2.0
        assert digest() != first
        tensor[place] = 1.0
        assert digest() == first


def test_names_types_and_shapes_count() -> None:
    zeros = torch.zeros(4, 2)
    others = [
        [("v", zeros)],
        [("w", zeros.half())],
        [("w", zeros.view(2, 4))],
        [("w", zeros), ("v", zeros)],
        [],
    ]
    digests = {weights_digest(named) for named in ([("w", zeros)], *others)}
    assert len(digests) == len(others) + 1
    assert weights_digest([("w", zeros.t())]) == weights_digest([("w", torch.zeros(2, 4))])
