"""A trainer on a GPU and engines on other hosts: weights are quantized, and compared with the image
of the last update, on the GPU.

``test_matrix.py`` has what they hold; ``tests/gpu/test_delta.py`` the kernels.
"""

import pytest
import torch

from sgl_fp8rl.protocol.states import State
from tests.sgl_fp8rl.receiver import toy
from tests.trainer_bridge.test_far_engine import IMAGE_BYTES, imaged, remote_engine, sent, step
from tests.trainer_bridge.test_matrix import on_gpu
from tests.trainer_bridge.test_update import SMALL
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.session.kept import KEPT
from trainer_bridge.updates.update import update
from trainer_bridge.ways.far import Changes

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's."""
    on_gpu(monkeypatch)


def test_an_update_that_does_not_commit_leaves_the_image() -> None:
    """NaN is found when all is sent, and before engines write the first byte."""
    (engine,), tensors = imaged(), toy.checkpoint(0)
    kept, bad = KEPT.connection_to(engine).base, step(tensors, 3)
    bad["attn.q.weight"][0, 0] = torch.nan
    with pytest.raises(EngineError, match="NaN"):
        update(bad, engine, version=3)
    assert {weights.state for weights in engine.ranks} == {State.SERVING}, "nothing was written"
    assert KEPT.connection_to(engine).base == kept
    assert sent(engine, step(tensors, 4), 4) < 0.1


def test_an_image_that_the_gpu_has_no_room_for_fails_no_update(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (engine,), tensors = imaged(), toy.checkpoint(0)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Changes, "commit", full)
        sent(engine, step(tensors, 1), 1)
    assert KEPT.connection_to(engine).base is None
    assert "--fp8rl-image-bytes" in caplog.text
    parts = [sent(engine, step(tensors, version), version) for version in (2, 3)]
    assert parts[0] >= 1 and parts[1] < 0.1


def test_several_engines_of_which_one_lacks_the_image() -> None:
    """The first of these updates is whole for it."""
    engines, tensors = [*imaged(), remote_engine(1, SMALL, IMAGE_BYTES)], toy.checkpoint(0)
    parts = [sent(engines, step(tensors, version), version) for version in (1, 2, 3)]
    assert parts[0] >= 1 and parts[2] < 0.2
