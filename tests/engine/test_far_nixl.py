"""A server whose trainer, as if on another host, writes chunks into its memory by NIXL."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trainer_bridge
from sgl_fp8rl.protocol import nixl_memory
from sgl_fp8rl.protocol.nixl_memory import Writer
from tests.engine import models
from tests.engine.conftest import Policies
from tests.engine.harness import FORKED, Server
from tests.engine.serving import (
    assert_quarantined,
    assert_serves,
    leave_the_host,
    update,
    version_of,
)
from trainer_bridge.engines.engine_client import EngineError

pytest.importorskip("nixl._api", reason="NIXL is not installed (extra nixl)")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

KEY, DIES_S = "a-shared-secret", 120.0
Write = Callable[..., None]


@pytest.fixture(scope="module")
def server(policies: Policies, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(
        tmp_path_factory.mktemp("nixl") / "server.log",
        FORKED,
        policies("qwen3")[0],
        *("--fp8rl-bucket-bytes", "1MiB", "--fp8rl-listen", "any", "--fp8rl-network", "nixl"),
        environment={"FP8RL_KEY": KEY},
        key=KEY,
    ) as started:
        yield started


@pytest.fixture(autouse=True)
def remote(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    leave_the_host(monkeypatch, tmp_path)
    monkeypatch.setenv("FP8RL_KEY", KEY)
    yield
    trainer_bridge.close(server)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each transfer."""
    sizes: list[int] = []
    write = Writer.write

    def count(self: Writer, data: Any, *args: Any) -> None:
        sizes.append(data.numel())
        write(self, data, *args)

    monkeypatch.setattr(Writer, "write", count)
    return sizes


@pytest.mark.guarantee("all-or-none", fault="a trainer on another host, over NIXL")
def test_updates(server: Server, policies: Policies, written: list[int]) -> None:
    for policy in policies("qwen3")[1:4]:
        written.clear()
        assert_serves(server, policy, update(server, policy))
        assert sum(written) > 1 << 20


def die_in_a_write(address: str, policy: Path, version: int, folder: Path) -> None:
    """A trainer that is killed when its third chunk is on its way."""
    begun: list[None] = []

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        leave_the_host(patch, folder)
        patch.setenv("FP8RL_KEY", KEY)
        write = Writer.write

        def die(self: Writer, *args: Any) -> None:
            begun.append(None)
            if len(begun) == 3:
                transfer = self._agent.transfer
                patch.setattr(self._agent, "transfer", lambda handle: transfer(handle) and kill())
            write(self, *args)

        patch.setattr(Writer, "write", die)
        trainer_bridge.update(models.named_tensors(policy), address, version=version)


@pytest.mark.guarantee("quarantine", fault="a trainer that dies while it writes by NIXL")
def test_a_trainer_that_dies(server: Server, policies: Policies, tmp_path: Path) -> None:
    policy, context = policies("qwen3")[1], multiprocessing.get_context("spawn")
    arguments = server.address, policy, version_of(server) + 1, tmp_path
    trainer = context.Process(target=die_in_a_write, args=arguments)
    trainer.start()
    trainer.join(DIES_S)
    assert trainer.exitcode == -signal.SIGKILL
    server.control({"op": "end"})
    assert_quarantined(server, "")
    assert_serves(server, policy, update(server, policy))


@pytest.mark.guarantee("quarantine", fault="a transfer by NIXL that fails")
def test_a_transfer_that_fails(
    server: Server, policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To an address where nothing is exposed: the engine hears of no chunk that has not come."""
    policy, write, begun = policies("qwen3")[2], Writer.write, []

    def outside(self: Writer, data: Any, offset: int, *args: Any) -> None:
        begun.append(time.monotonic())
        write(self, data, offset + (1 << 40) * (len(begun) == 3), *args)

    version = version_of(server) + 1
    trainer_bridge.close(server)
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", outside)
        with pytest.raises(EngineError):
            trainer_bridge.update(models.named_tensors(policy), server, version=version)
    assert len(begun) == 3
    assert_quarantined(server, "")
    assert_serves(server, policy, update(server, policy))


def test_a_trainer_without_nixl(
    server: Server, policies: Policies, monkeypatch: pytest.MonkeyPatch, written: list[int]
) -> None:
    def missing() -> None:
        raise nixl_memory.NixlError("NIXL is not installed")

    trainer_bridge.close(server)
    nixl_memory._WRITERS.clear()
    monkeypatch.setattr(nixl_memory, "check_usable", missing)
    policy = policies("qwen3")[3]
    assert_serves(server, policy, update(server, policy))
    assert not written
