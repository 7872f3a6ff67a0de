"""Three ranks of a trainer send to engines on other hosts, each a part of the chunks.

Real processes of one job over gloo, and TCP to the engines' relays; the engines are in this one.
"""

import logging
import socket
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor

from sgl_fp8rl.formats import BLOCK_FP8
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import SLOTS
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.sgl_fp8rl.receiver.fake_gpu import FakeDeviceMemory
from tests.trainer_bridge import ranks
from tests.trainer_bridge.calls import before
from tests.trainer_bridge.served import left, served
from tests.trainer_bridge.test_fsdp import gathered, toy_trainer
from tests.trainer_bridge.test_killed import AFTER, Watched
from tests.trainer_bridge.test_packer import without_triton
from tests.trainer_bridge.test_remote_engine import (
    SMALL,
    SNAPSHOT_BYTES,
    failing_in_chunk,
    remote_engine,
    step,
)
from tests.trainer_bridge.test_sender import layout
from tests.trainer_bridge.test_update import engine_of, holds
from trainer_bridge import update
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.session.kept import KEPT
from trainer_bridge.sources.parameters import Named, sources
from trainer_bridge.transfer.packer import HostPacker
from trainer_bridge.transfer.transfer_plan import TransferPlan
from trainer_bridge.transport.relay_client import RelayClient
from trainer_bridge.updates import shared_sending
from trainer_bridge.updates.shared_sending import Offer, Part, SendResult, is_on_all
from trainer_bridge.ways import carriers, remote
from trainer_bridge.ways.sender import Sender

pytestmark = pytest.mark.timeout(180)

WORLD = 3
COLLECTIVE_TIMEOUT_S = 30
CHUNK = SMALL // 2
LAST = 4
"""Version of what only changes."""
BUCKET = CHUNK * SLOTS * WORLD
GIVE_UP_S = 5.0
"""In the place of 240 s that the first rank waits for what another one sent."""


def an_engine(tp: int, snapshot_bytes: int = 0, kind: type[FakeEngine] = FakeEngine) -> FakeEngine:
    return remote_engine(tp, BUCKET, snapshot_bytes, kind)


def sent_by(patch: pytest.MonkeyPatch) -> list[int]:
    """The chunks that this rank sends from now on."""
    sent: list[int] = []
    before(patch, RelayClient, "send_chunk", lambda _, message, *__: sent.append(message["index"]))
    return sent


def step_of(version: int) -> toy.Tensors:
    return step(toy.checkpoint(0), version) if version else toy.checkpoint(0)


def in_turn(engines: list[str]) -> None:
    """Each its own, to each engine."""
    with pytest.MonkeyPatch.context() as patch:
        sent = sent_by(patch)
        for version in range(3):
            sent.clear()
            result = update(toy_trainer(toy.checkpoint(version)), engines, version=version)
            of_ranks = gathered(sorted(set(sent)))
            numbers = {chunk for of_rank in of_ranks for chunk in of_rank}
            assert numbers == set(range(len(numbers))) and len(numbers) > 2 * WORLD
            assert of_ranks == [sorted(c for c in numbers if c % WORLD == r) for r in range(WORLD)]
            assert result.network_bytes >= len(engines) * result.bytes
            assert gathered(result.network_bytes) == [result.network_bytes] * WORLD


def only_what_changed(rank: int, engine: str, alone: bool = False) -> None:
    for version in range(LAST + 1):
        if version == 3 and rank == 2:  # as after a restart
            KEPT.bases.forget()
        result = update(toy_trainer(step_of(version)), engine, version=version)
        part = result.network_bytes / result.bytes
        after_restart = (0.0, 0.1) if alone else (0.1, 0.9)
        low, high = [(0.9, 2.0), (0, 0.1), (0, 0.1), after_restart, (0, 0.1)][version]
        assert low < part < high, part


def a_connection_fails(rank: int, engine: str, how: str, below: int = 1) -> None:
    """Every rank hears the one failure: were one not told, the next collective would hang."""
    update(toy_trainer(toy.checkpoint(0)), engine, version=0)
    model = toy_trainer(toy.checkpoint(1))
    failing = failing_in_chunk(2 - below, how) if rank == below else nullcontext()
    with failing, pytest.raises(EngineError) as error:
        update(model, engine, version=1)
    assert gathered(str(error.value)) == [str(error.value)] * WORLD
    update(toy_trainer(toy.checkpoint(AFTER)), engine, version=AFTER)


def breaking(patch: pytest.MonkeyPatch) -> None:
    """The connection that this rank sends to first breaks: that of the first engine."""
    first: list[RelayClient] = []

    def break_once(self: RelayClient, *_: Any) -> None:
        if not first:
            first.append(self)
            self._sockets[0].shutdown(socket.SHUT_RDWR)

    before(patch, RelayClient, "send_chunk", break_once)


def one_of_two_is_lost(rank: int, engines: list[str]) -> None:
    update(toy_trainer(toy.checkpoint(0)), engines, version=0)
    model = toy_trainer(toy.checkpoint(1))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            breaking(patch)
        result = update(model, engines, version=1, require=1)
    assert gathered([*result.failed]) == [[engines[0]]] * WORLD


def one_of_two_is_here(rank: int, engines: list[str]) -> None:
    """It is sent BF16 of the same gathered tensors, and commits without the other."""
    update(toy_trainer(toy.checkpoint(0)), engines, version=0)
    model = toy_trainer(toy.checkpoint(1))
    with failing_in_chunk(3, "breaks") if rank == 0 else nullcontext():
        result = update(model, engines, version=1, require=1)
    assert gathered([*result.failed]) == [[engines[1]]] * WORLD
    assert update(model, engines, version=1).failed == {}


def behind_a_firewall(rank: int, engine: str) -> None:
    refuse = Mock(side_effect=EngineError("the relay cannot be reached"))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Part, "__init__", refuse)
        sent = sent_by(patch)
        update(toy_trainer(toy.checkpoint(0)), engine, version=0)
        assert bool(sent) == (rank == 0)
    with pytest.MonkeyPatch.context() as patch:  # it is not tried again: engines would wait
        sent = sent_by(patch)
        update(toy_trainer(toy.checkpoint(1)), engine, version=1)
        assert bool(sent) == (rank == 0)


def what_is_the_first_ranks_own(rank: int, engine: str) -> None:
    """Tensors that are not sharded over all ranks, of which others may hold other ones."""
    with pytest.MonkeyPatch.context() as patch:
        sent = sent_by(patch)
        for version in range(2):
            tensors = toy.checkpoint(version if rank == 0 else 5)
            update(tensors, engine, version=version, group=dist.group.WORLD)
        assert bool(sent) == (rank == 0)
    mesh = init_device_mesh("cpu", (WORLD,))
    some = DeviceMesh("cpu", [0, 1])
    of_all = [("a", distribute_tensor(torch.ones(6, 2), mesh))]
    assert is_on_all(of_all, WORLD)
    if rank < 2:
        assert not is_on_all([*of_all, ("b", distribute_tensor(torch.ones(4, 2), some))], WORLD)


def nan_of_another_rank(rank: int, engines: list[str]) -> None:
    """The trainer's fault, and no engine's: none was written to, since only changes come."""
    update(toy_trainer(toy.checkpoint(0)), engines, version=0)
    tensors = toy.checkpoint(0)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(HostPacker, "put", Mock(side_effect=EngineError("a weight holds NaN")))
        with pytest.raises(EngineError, match="on rank 2 of the trainer: a weight holds NaN"):
            update(toy_trainer(step(tensors, 1)), engines, version=1, require=1)


def with_small_chunks(patch: pytest.MonkeyPatch) -> None:
    logging.disable(logging.CRITICAL)
    patch.setattr(remote, "LEAST_CHUNK_BYTES", CHUNK)


def each_way(rank: int, folder: Path, engines: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        with_small_chunks(patch)
        in_turn(engines[:2])
        only_what_changed(rank, engines[2])
        a_connection_fails(rank, engines[3], "breaks")
        a_connection_fails(rank, engines[4], "stalls")
        one_of_two_is_lost(rank, engines[5:7])
        behind_a_firewall(rank, engines[7])
        what_is_the_first_ranks_own(rank, engines[8])
        nan_of_another_rank(rank, engines[9:11])
    # chunks would be too small to be shared out: the first rank sends all
    only_what_changed(rank, engines[11], alone=True)
    a_connection_fails(rank, engines[12], "breaks", below=0)
    one_of_two_is_here(rank, engines[13:])


@pytest.mark.guarantee("all-or-none", fault="the network fails below a rank that sends its part")
@pytest.mark.guarantee("quarantine", fault="the network fails below two ranks of a trainer")
def test_ranks_send_chunks_in_turn(tmp_path: Path) -> None:
    """Were a chunk not sent, the vote would miss it; were the memory of one rank's chunk given to
    another's, the bytes would not be the oracle's."""
    plain, changed = [an_engine(1), an_engine(2)], [an_engine(2, SNAPSHOT_BYTES) for _ in range(2)]
    failing = [an_engine(tp, kind=Watched) for tp in (2, 1, 2)]
    lost, alone, own = [an_engine(1), an_engine(2)], an_engine(1), an_engine(1)
    sound = [an_engine(1, SNAPSHOT_BYTES), an_engine(2, SNAPSHOT_BYTES)]
    both = [engine_of(1, SMALL), an_engine(2)]
    engines = [*plain, changed[0], *failing[:2], *lost, alone, own, *sound]
    with served([*engines, changed[1], failing[2], *both]) as addresses:
        work = partial(each_way, engines=addresses)
        ranks.run(work, tmp_path, WORLD, COLLECTIVE_TIMEOUT_S)
    assert [left(engine) for engine in plain] == ["2", "2"]
    assert all(holds(engine, step_of(LAST)) for engine in changed)
    check_healed(failing)
    assert [left(engine) for engine in lost] == ["quarantined", "1"]
    assert left(alone) == left(own) == "1"
    assert [left(engine) for engine in sound] == ["0", "0"]
    assert [left(engine) for engine in both] == ["1", "1"]


def check_healed(engines: list[FakeEngine]) -> None:
    """Each was quarantined, and has what came after that."""
    for engine in engines:
        assert isinstance(engine, Watched) and engine.before == "quarantined"
        assert left(engine) == f"{AFTER}"


class Recorder:
    """Stands for ``RelayClient``: keeps what each rank sends."""

    network_bytes, snapshot = 0, None
    sent: ClassVar[dict[int, bytes]] = {}

    def __init__(self, *_: object) -> None:
        pass

    def send_chunk(self, message: dict[str, int], content: Any) -> None:
        assert message["index"] not in self.sent
        self.sent[message["index"]] = bytes(content.data.numpy())

    def wait(self, began: float) -> list[Any]:
        return []

    def close(self) -> None:
        pass


def offered(named: Named, senders: int, device: torch.device | None) -> tuple[Offer, TransferPlan]:
    """What the first rank tells the others, and its plan."""
    formats = {BLOCK_FP8.name: [*toy.FP8_NAMES]}
    bucket_bytes = CHUNK * SLOTS * senders
    of_engine = layout(is_remote=True, bucket_bytes=bucket_bytes, formats=formats)
    plan = Sender(of_engine).plan(named, None, device, ranks=senders)
    relays = {"engine": ({}, "", 1.0)}
    return Offer(senders, relays, of_engine, plan.manifest.fingerprint, [], ("", "")), plan


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("senders", [1, 2, 5])
def test_all_chunks_together_are_those_of_one_rank(
    senders: int, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV scales too, which only the first rank of a trainer is given; it hands them on. Host memory
    stands for a GPU's, and torch for its kernel."""
    monkeypatch.setattr(shared_sending, "RelayClient", Recorder)
    monkeypatch.setattr(carriers, "DeviceMemory", FakeDeviceMemory)
    without_triton(monkeypatch)
    device = torch.device("cpu") if on_gpu else None
    monkeypatch.setattr(Recorder, "sent", {})
    scales = torch.rand(2, 2, 4)
    named = [*toy.checkpoint(0).items(), (KV_SCALES, scales)]
    monkeypatch.setattr(remote, "LEAST_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(shared_sending, "gpu_of", lambda named, layout: device)
    offer, of_all = offered(named, senders, device)
    for number in range(senders):
        part = Part(offer, number, named, None)
        for index, (_, tensor) in enumerate(named):
            part.put(index, tensor)
        assert part.finish() == SendResult(None, {}, 0)
        part.close()
    made, formats = sources(named, None, torch.bfloat16, [KV_SCALES]), of_all.quantized
    slots = len(of_all.chunks)  # for each one: nothing is overwritten
    alone = TransferPlan(made, [False] * len(named), CHUNK, formats, slots=slots)
    content = torch.zeros(alone.manifest.bucket_bytes, dtype=torch.uint8)
    packer = HostPacker(alone, content)
    for chunk, index in alone.turns:
        packer.put(index, named[index][1], chunk)
    assert Recorder.sent.keys() == set(range(len(alone.chunks))) and len(alone.chunks) > 5
    for chunk, slices in enumerate(alone.chunks):
        first, _ = alone.extent(chunk)
        for offset, name, (start, stop) in ((s.offset, s.name, s.rows) for s in slices):
            spec = alone.manifest.tensors[name]
            size = spec.nbytes // spec.shape[0] * (stop - start)
            found = Recorder.sent[chunk][offset - first :][:size]
            assert found == bytes(content[offset : offset + size].numpy()), name


def test_a_rank_keeps_nothing_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a garbage collector's help: a part of a bucket is memory that a host may lack."""
    monkeypatch.setattr(shared_sending, "RelayClient", Recorder)
    named = [("w", torch.ones(128, 128))]
    offer, _ = offered(named, 1, None)
    part = Part(offer, 0, named, None)
    gone = weakref.ref(part)
    part.close()
    del part
    assert gone() is None


def killed(rank: int, folder: Path, engines: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        with_small_chunks(patch)
        update(toy_trainer(toy.checkpoint(0)), engines, version=0)
        patch.setattr(shared_sending, "WAIT_S", GIVE_UP_S)
        if rank == 2:
            patch.setattr(RelayClient, "wait", ranks.die)
        with pytest.raises((EngineError, TimeoutError, RuntimeError)):
            update(toy_trainer(toy.checkpoint(1)), engines, version=1)
        if rank == 0:  # alone
            update(toy.checkpoint(AFTER), engines, version=AFTER)


@pytest.mark.guarantee("several-engines", fault="a rank that sends its part is killed")
def test_a_rank_that_sends_is_killed(tmp_path: Path) -> None:
    """The first rank waits no longer than it would for a bucket, and ends the update."""
    engines = [an_engine(1, kind=Watched), an_engine(2, kind=Watched)]
    with served(engines) as addresses:
        work = partial(killed, engines=addresses)
        ranks.run_and_lose(work, tmp_path, WORLD, COLLECTIVE_TIMEOUT_S, lost=2)
    check_healed(engines)
