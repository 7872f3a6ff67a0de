"""The checks of an adapter: what is sound passes, and each fault that they are for is found."""

import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
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
    """A sound one, and the base of those with a fault; the first of its ranks leads."""

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
        return self.drained(pairs)

    def drained(self, pairs: Pairs) -> int:
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


class Faulty(Adapter):
    """One that breaks the contract in one way."""

    def __init__(self, engine: FakeEngine | None, fault: str, leads: bool = True) -> None:
        self.fault, self.last = fault, -1
        super().__init__(engine, leads)

    def start(self) -> Any:
        super().start()
        if "resumes" in self.fault:
            self.run = "run"
        if self.fault == "resumes where the engine is":
            self.version = self.engine.ranks[0].policy.version  # type: ignore[union-attr]
        return self.sync

    def sync(self, pairs: Pairs, step: int | None) -> int:
        version, again, self.last = self.version, step == self.last, step  # type: ignore[assignment]
        match self.fault:
            case "step is version":
                self.version = -1  # so that the next version is the step
            case "not again" if again:  # the same step is the same policy, it thinks
                return self.drained(pairs)
            case "new runs":
                self.start()
                self.version = version
            case "swallows":
                with suppress(EngineError, ValueError):
                    return super().sync(pairs, step)
                return self.version
            case "stops reading":
                pairs = iter([next(pairs)])
            case "stops at an error":
                pairs = iter([(n, t) for n, t in pairs if t.isfinite().all() or stop()])
            case "leads alone" if not self.leads:  # it reads on where its leader has not failed
                self.version = next_version(step, version)
                all(tensor.isfinite().all() for _, tensor in pairs)
                return self.version
        version = super().sync(pairs, step)
        return step if self.fault == "says step" and step is not None else version

    def sample(self) -> list[int]:
        match self.fault:
            case "unversioned":
                return []
            case "mixes versions":
                return [*super().sample(), -1]
            case "samples in quarantine":
                return [self.engine.ranks[0].policy.version]  # type: ignore[union-attr]
        return super().sample()


def stop() -> bool:
    raise ValueError("a NaN")


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("step is version", r"step 0 raised .*max\(step, last \+ 1\)"),
        ("says step", "says that step 0 is version 0, and the engine has 1"),
        ("not again", "step 0 is version 0 of run .*; update at each step"),
        ("new runs", "step 0 is version 1 of run .*; update at each step, in one run"),
        ("swallows", "no rank raised"),
        ("stops reading", rf"\[1\] of {len(TENSORS)} tensors were read"),
        ("stops at an error", rf"of {len(TENSORS)} tensors were read at step 9"),
        ("unversioned", r"tokens of version 0 are said to be of \[\]"),
        ("mixes versions", r"tokens of version 0 are said to be of \[-1, 0\]"),
        ("samples in quarantine", "quarantined engine was sampled"),
        ("resumes as the same run", "step 5 raised .*a resumed trainer a run of its own"),
        ("resumes where the engine is", "name its run anew"),
    ],
)
def test_an_adapter_that_breaks_the_contract(fault: str, found: str) -> None:
    with pytest.raises(ContractError, match=found):
        check(Faulty(engine_of(1), fault))


def two_ranks(rank: int, folder: Path) -> None:
    engine, leads = engine_of(1) if rank == 0 else None, rank == 0
    check(Adapter(engine, leads), dist.group.WORLD)
    with pytest.raises(ContractError, match=rf"\[{len(TENSORS)}, \d\] of {len(TENSORS)} tensors"):
        check(Faulty(engine, "leads alone", leads), dist.group.WORLD)
    with pytest.raises(ContractError, match="no rank raised"):
        check(Faulty(engine, "swallows", leads), dist.group.WORLD)
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
