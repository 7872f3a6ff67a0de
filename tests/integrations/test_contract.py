"""The checks of an adapter: what is sound passes, and each fault that they are for is found."""

import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge import ranks
from tests.trainer_bridge.test_update import engine_of, holds
from trainer_bridge import EngineError, update
from trainer_bridge.adapters.contract import (
    ContractError,
    Pairs,
    check_engine,
    check_refusals,
    check_resume,
    check_updates,
    check_weights,
)
from trainer_bridge.adapters.updates import next_version

pytestmark = pytest.mark.timeout(60)
TENSORS = toy.checkpoint()
COLLECTIVE_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_file(TENSORS, folder / "model.safetensors")
    return folder


def walk() -> Pairs:
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

    def control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
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


class Adapter:
    """A sound one, and the base of those with a fault.

    Args:
        leads: whether this is the first of its ranks.
    """

    def __init__(self, engine: FakeEngine | None, leads: bool = True) -> None:
        self.engine, self.leads = engine, leads
        self.start()

    def start(self) -> Any:
        self.run, self.version = secrets.token_hex(4), -1
        return self.sync

    def sync(self, pairs: Pairs, step: int | None) -> int:
        self.version = next_version(step, self.version)
        if self.leads:
            update(pairs, self.engine, version=self.version, run=self.run)
        for _ in pairs:
            pass
        return self.version

    def sample(self) -> list[int]:
        return [] if self.engine is None else self.engine.sampled()


def check(adapter: Adapter, group: Any = None) -> None:
    check_updates(adapter.engine, walk, adapter.sync, adapter.sample, group)
    check_resume(adapter.engine, walk, adapter.start, adapter.sample, group)


def test_updates() -> None:
    adapter = Adapter(engine_of(1))
    for _ in range(2):
        check(adapter)
        assert holds(adapter.engine, TENSORS)  # type: ignore[arg-type]


class StepIsVersion(Adapter):
    def sync(self, pairs: Pairs, step: int | None) -> int:
        self.version = -1  # so that the next version is the step
        return super().sync(pairs, step)


class SaysStep(Adapter):
    def sync(self, pairs: Pairs, step: int | None) -> int:
        version = super().sync(pairs, step)
        return version if step is None else step


class NotAgain(Adapter):
    """The same step is the same policy, it thinks."""

    last: int | None = -1

    def sync(self, pairs: Pairs, step: int | None) -> int:
        if step == self.last:
            for _ in pairs:
                pass
            return self.version
        self.last = step
        return super().sync(pairs, step)


class NewRuns(Adapter):
    def sync(self, pairs: Pairs, step: int | None) -> int:
        version = self.version
        self.start()
        self.version = version
        return super().sync(pairs, step)


class Swallows(Adapter):
    def sync(self, pairs: Pairs, step: int | None) -> int:
        try:
            return super().sync(pairs, step)
        except (EngineError, ValueError):
            return self.version


class StopsReading(Adapter):
    def sync(self, pairs: Pairs, step: int | None) -> int:
        return super().sync(iter([next(pairs)]), step)


class StopsAtAnError(Adapter):
    def sync(self, pairs: Pairs, step: int | None) -> int:
        self.version = next_version(step, self.version)
        named = {name: tensor for name, tensor in pairs if tensor.isfinite().all() or stop()}
        update(named, self.engine, version=self.version, run=self.run)
        return self.version


def stop() -> bool:
    raise ValueError("a NaN")


class Unversioned(Adapter):
    def sample(self) -> list[int]:
        return []


class MixesVersions(Adapter):
    def sample(self) -> list[int]:
        return [*super().sample(), -1]


class SamplesInQuarantine(Adapter):
    def sample(self) -> list[int]:
        assert self.engine is not None
        return [self.engine.ranks[0].policy.version]


class ResumesAsTheSameRun(Adapter):
    def start(self) -> Any:
        super().start()
        self.run = "run"
        return self.sync


class ResumesWhereTheEngineIs(ResumesAsTheSameRun):
    def start(self) -> Any:
        super().start()
        assert self.engine is not None
        self.version = self.engine.ranks[0].policy.version
        return self.sync


@pytest.mark.parametrize(
    ("adapter", "found"),
    [
        (StepIsVersion, r"step 0 raised .*max\(step, last \+ 1\)"),
        (SaysStep, "says that step 0 is version 0, and the engine has 1"),
        (NotAgain, "step 0 is version 0 of run .*; update at each step"),
        (NewRuns, "step 0 is version 1 of run .*; update at each step, in one run"),
        (Swallows, "no rank raised"),
        (StopsReading, rf"\[1\] of {len(TENSORS)} tensors were read"),
        (StopsAtAnError, rf"of {len(TENSORS)} tensors were read at step 9"),
        (Unversioned, r"tokens of version 0 are said to be of \[\]"),
        (MixesVersions, r"tokens of version 0 are said to be of \[-1, 0\]"),
        (SamplesInQuarantine, "quarantined engine was sampled"),
        (ResumesAsTheSameRun, "step 5 raised .*a resumed trainer a run of its own"),
        (ResumesWhereTheEngineIs, "name its run anew"),
    ],
)
def test_an_adapter_that_breaks_the_contract(adapter: type[Adapter], found: str) -> None:
    with pytest.raises(ContractError, match=found):
        check(adapter(engine_of(1)))


class LeadsAlone(Adapter):
    """Its other ranks do not read on where their leader may have failed."""

    def sync(self, pairs: Pairs, step: int | None) -> int:
        if self.leads:
            return super().sync(pairs, step)
        self.version = next_version(step, self.version)
        for _, tensor in pairs:
            if not tensor.isfinite().all():
                break
        return self.version


def two_ranks(rank: int, folder: Path) -> None:
    engine = engine_of(1) if rank == 0 else None
    check(Adapter(engine, leads=rank == 0), dist.group.WORLD)
    with pytest.raises(ContractError, match=rf"\[{len(TENSORS)}, \d\] of {len(TENSORS)} tensors"):
        check(LeadsAlone(engine, leads=rank == 0), dist.group.WORLD)
    with pytest.raises(ContractError, match="no rank raised"):
        check(Swallows(engine, leads=rank == 0), dist.group.WORLD)
    (folder / f"passed-{rank}").touch()


@pytest.mark.timeout(180)
def test_two_ranks_find_the_same(tmp_path: Path) -> None:
    ranks.run(two_ranks, tmp_path, 2, COLLECTIVE_TIMEOUT_S)
    assert len(list(tmp_path.glob("passed-*"))) == 2


@pytest.mark.parametrize(
    ("refused", "found"),
    [
        (("top_p", "top_k"), None),
        (("top_p",), "{'top_k': 20} gives no error"),
        (("top_p", "top_k", "n"), "the defaults are refused"),
    ],
)
def test_options_that_change_logprobs(refused: tuple[str, ...], found: str | None) -> None:
    def set_up(options: Mapping[str, Any]) -> None:
        for name in {"n": 1, **options}:
            if name in refused:
                raise ValueError(f"{name} changes logprobs")

    if found is None:
        check_refusals(set_up, ("top_p", "top_k"))
        return
    with pytest.raises(ContractError, match=re.escape(found)):
        check_refusals(set_up, ("top_p", "top_k"))
