"""The checks of an adapter: what is sound passes, and each fault that they are for is found."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sgl_fp8rl.integrations.contract import (
    ContractError,
    check_engine,
    check_updates,
    check_weights,
)
from sgl_fp8rl.protocol.states import State
from tests.sgl_fp8rl.engine.fake_engine import FakeEngine
from tests.sgl_fp8rl.weight_update import toy
from tests.trainer_bridge.test_update import engine_of, holds
from trainer_bridge.engine_client import EngineError

pytestmark = pytest.mark.timeout(60)
TENSORS = toy.checkpoint()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_file(TENSORS, folder / "model.safetensors")
    return folder


def walk() -> Iterator[tuple[str, torch.Tensor]]:
    return iter(TENSORS.items())


def test_weights_of_a_checkpoint(checkpoint: Path) -> None:
    check_weights(walk, checkpoint)
    check_weights(lambda: iter([*walk(), ("lm_head.weight", torch.zeros(2))]), checkpoint)


FAULTS = {
    "comes twice": [*TENSORS.items(), *TENSORS.items()],
    "is not in the checkpoint": [(f"model.{name}", tensor) for name, tensor in TENSORS.items()],
    "did not come": list(TENSORS.items())[:-1],
    "has shape": [(name, tensor[:1]) for name, tensor in TENSORS.items()],
    "is torch.float64": [(name, tensor.double()) for name, tensor in TENSORS.items()],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_are_not_those_of_the_checkpoint(fault: str, checkpoint: Path) -> None:
    with pytest.raises(ContractError, match=fault):
        check_weights(lambda: iter(FAULTS[fault]), checkpoint)


def test_weights_that_come_once_only(checkpoint: Path) -> None:
    once = walk()
    with pytest.raises(ContractError, match="at every walk"):
        check_weights(lambda: once, checkpoint)


def test_an_engine() -> None:
    check_engine(engine_of(1))


class Careless(FakeEngine):
    """Passes control messages on, but for one of them."""

    def __init__(self, fault: str) -> None:
        super().__init__(engine_of(1).ranks)
        self.fault = fault

    def control(self, message: dict[str, Any]) -> dict[str, Any]:
        if self.fault == "status" and message["op"] == "status":
            return {}
        try:
            return super().control(message)
        except EngineError as error:
            if self.fault == "swallowed":
                return {"error": str(error)}
            if self.fault == "other error":
                raise RuntimeError(str(error)) from error
            raise EngineError(str(error), None if self.fault == "no status" else 400) from error


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("status", "reply to a status message"),
        ("swallowed", "came as the reply"),
        ("other error", "raise EngineError"),
        ("no status", "has status None"),
    ],
)
def test_an_engine_whose_refusals_do_not_arrive(fault: str, found: str) -> None:
    with pytest.raises(ContractError, match=found):
        check_engine(Careless(fault))


def sample(engine: FakeEngine) -> list[int]:
    (weights,) = engine.ranks
    if weights.state is not State.SERVING:
        raise EngineError("quarantined", 503)
    return [weights.policy.version] * 3


def test_updates() -> None:
    engine = engine_of(1)
    for _ in range(2):
        result = check_updates(engine, walk, lambda: sample(engine))
        assert holds(engine, TENSORS)
        assert result.tensors == len(TENSORS)


def test_tokens_of_another_version() -> None:
    engine = engine_of(1)
    for versions in ([], [-1], [0, -1]):
        with pytest.raises(ContractError, match="tokens of version"):
            check_updates(engine, walk, lambda found=versions: found)  # type: ignore[misc]


def test_a_quarantine_that_rollouts_do_not_show() -> None:
    engine = engine_of(1)
    with pytest.raises(ContractError, match="quarantined engine was sampled"):
        check_updates(engine, walk, lambda: [engine.ranks[0].policy.version])


def test_failed_updates_that_pass_for_good_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an adapter that catches the error and goes on, or that stops reading at an error."""
    from sgl_fp8rl.integrations import contract

    engine, real = engine_of(1), contract.update

    def swallowed(*args: Any, **keywords: Any) -> Any:
        try:
            return real(*args, **keywords)
        except (EngineError, ValueError):
            return None

    monkeypatch.setattr(contract, "update", swallowed)
    with pytest.raises(ContractError, match="came again, and the update was committed"):
        check_updates(engine, walk, lambda: sample(engine))

    calls = iter([real, lambda pairs, *a, **k: real(iter([next(pairs)]), *a, **k)])
    monkeypatch.setattr(contract, "update", lambda *a, **k: next(calls)(*a, **k))
    with pytest.raises(ContractError, match=f"1 of {len(TENSORS)} tensors were read"):
        check_updates(engine, walk, lambda: sample(engine))
