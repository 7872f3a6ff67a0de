"""Several servers and one trainer: what they commit, they commit together."""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import trainer_bridge
from tests.engine import models
from tests.engine.conftest import Policies
from tests.engine.harness import BUCKET_BYTES, FORKED, ROOT, Server, end_group
from tests.engine.serving import (
    GREEDY,
    PROMPT,
    assert_holds,
    assert_quarantined,
    assert_serves,
)
from tests.trainer_bridge import ranks
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.session.participant import Participant
from trainer_bridge.updates.update import UpdateResult

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ENVIRONMENT = {"FP8RL_BUCKET_BYTES": str(BUCKET_BYTES)}
TRAINER_S = 120.0
COLLECTIVE_TIMEOUT_S = 60.0
DIES_WHILE_IT_COMMITS = """
import os, sys
from pathlib import Path
import trainer_bridge
from tests.engine import models
from trainer_bridge.session.participant import Participant

commit = Participant.commit

def die(self, policy):
    if self.name == sys.argv[3]:
        os._exit(9)
    commit(self, policy)

if __name__ == "__main__":
    Participant.commit = die
    # one after the other, so that the first has committed
    trainer_bridge.session.transaction.call_all = lambda calls: [call() for _, call in calls]
    checkpoint, *engines = sys.argv[1:]
    trainer_bridge.update(models.named_tensors(Path(checkpoint)), engines, version=0, run="dies")
"""


@pytest.fixture(scope="module")
def started(policies: Policies, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder, checkpoint = tmp_path_factory.mktemp("servers"), policies("qwen3")[0]
    start = partial(Server, command=FORKED, checkpoint=checkpoint, environment=ENVIRONMENT)
    with start(folder / "0.log") as first, start(folder / "1.log") as second:
        yield [first, second]


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    """Each test is a run: those before it are over."""
    return str(request.node.name)


@pytest.fixture
def servers(started: list[Server], policies: Policies, run: str) -> list[Server]:
    """Both serve policy 0 as version 0 of the test's run."""
    send(started, policies("qwen3")[0], 0, run)
    return started


def send(
    servers: list[Server], checkpoint: Path, version: int, run: str, require: int | None = None
) -> UpdateResult:
    engines = [server.address for server in servers]
    tensors = models.named_tensors(checkpoint)
    return trainer_bridge.update(tensors, engines, version=version, run=run, require=require)


def test_both_serve_what_was_committed(servers: list[Server], policies: Policies, run: str) -> None:
    version = 4
    assert send(servers, policies("qwen3")[1], version, run).failed == {}
    for server in servers:
        assert_serves(server, policies("qwen3")[1], version)
    prompts, engines = [PROMPT, PROMPT[:5]], [server.address for server in servers]
    sampled = []
    for order in (engines, engines[::-1]):  # each samples what the other did, alone and uncached
        for server in servers:
            server.flush()
        sampled.append(trainer_bridge.rollout(order, prompts, GREEDY, expected_version=version))
        assert sampled[-1].policy_versions == [version]
        assert sampled[-1].prompt_tokens == prompts
    assert sampled[0].tokens == sampled[1].tokens


def sharded_trainer(rank: int, folder: Path) -> None:
    """One of two ranks, of which each holds half of the rows."""
    run, checkpoint, version, *engines = (folder / "arguments").read_text().split()
    mesh = init_device_mesh("cpu", (2,))
    named = {
        name: distribute_tensor(tensor, mesh, [Shard(0)])
        for name, tensor in models.named_tensors(Path(checkpoint))
    }
    to = None if rank else engines
    result = trainer_bridge.update(named, to, version=int(version), run=run)
    assert (result.version, result.failed) == (int(version), {})


def test_two_ranks_update_two_servers(
    servers: list[Server], policies: Policies, run: str, tmp_path: Path
) -> None:
    for version, checkpoint in enumerate(policies("qwen3")[1:3], start=1):
        words = run, checkpoint, version, *(server.address for server in servers)
        folder = tmp_path / str(version)  # the ranks of each job meet in a folder of their own
        folder.mkdir()
        (folder / "arguments").write_text(" ".join(map(str, words)))
        ranks.run(sharded_trainer, folder, 2, COLLECTIVE_TIMEOUT_S)
        for server in servers:
            assert_serves(server, checkpoint, version)


@pytest.mark.guarantee("several-engines", fault="NaN in an update of two servers")
def test_none_serves_what_none_could_commit(
    servers: list[Server], policies: Policies, run: str
) -> None:
    tensors = dict(models.named_tensors(policies("qwen3")[1]))
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * float("nan")
    engines = [server.address for server in servers]
    with pytest.raises(EngineError, match="NaN"):
        trainer_bridge.update(tensors, engines, version=1, run=run)
    for server in servers:
        assert_quarantined(server, "NaN")


@pytest.mark.guarantee("several-engines", fault="a trainer is killed while it commits")
def test_a_trainer_that_dies_while_it_commits(servers: list[Server], policies: Policies) -> None:
    """The server that was not told generates nothing; the next trainer heals it."""
    first, second = servers
    dying = [DIES_WHILE_IT_COMMITS, str(policies("qwen3")[1]), first.address, second.address]
    trainer = subprocess.run(
        [sys.executable, "-c", *dying], cwd=ROOT, timeout=TRAINER_S, capture_output=True, text=True
    )
    assert trainer.returncode == 9, trainer.stderr
    first.control({"op": "end"})
    second.control({"op": "end"})
    assert_serves(first, policies("qwen3")[1], 0)
    assert_quarantined(second, "trainer is gone")
    assert_holds(second, policies("qwen3")[1])  # it voted, so it has all of it
    send(servers, policies("qwen3")[2], 1, "the next one")
    for server in servers:
        assert_serves(server, policies("qwen3")[2], 1)


@pytest.mark.guarantee("several-engines", fault="a server is killed after its vote")
def test_a_server_that_dies_and_one_that_takes_its_place(
    policies: Policies,
    started: list[Server],
    run: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last test of these servers: one of them ends here."""
    survivor, dying = started
    commit = Participant.commit

    def kill_first(self: Participant, policy: Any) -> None:
        if self.name == dying.address:
            end_group(dying.process.pid)
            dying.process.wait()
        commit(self, policy)

    with monkeypatch.context() as patch:
        patch.setattr(Participant, "commit", kill_first)
        with pytest.raises(EngineError, match=f"committed on 1 of 2 .*{dying.address}"):
            send(started, policies("qwen3")[3], 7, run)
    assert_serves(survivor, policies("qwen3")[3], 7)
    result = send(started, policies("qwen3")[4], 8, run, require=1)
    assert list(result.failed) == [dying.address]
    assert_serves(survivor, policies("qwen3")[4], 8)
    with Server(tmp_path / "log", FORKED, policies("qwen3")[0], environment=ENVIRONMENT) as late:
        result = send([survivor, late], policies("qwen3")[4], 8, run)
        assert (result.failed, result.bytes > 0) == ({}, True)
        for server in (survivor, late):
            assert_serves(server, policies("qwen3")[4], 8)
