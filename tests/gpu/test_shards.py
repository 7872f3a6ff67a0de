"""Two trainer ranks, each on a GPU of its own where there are two, whose shards an engine of two
ranks, or two engines, read where they lie: as they are, or as codes that the ranks make."""

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import trainer_bridge
from tests.engine.harness import Server
from tests.engine.serving import version_of
from tests.gpu.engines import (
    TP,
    TP_FLAGS,
    digests_of,
    sha256,
    start_server,
    together,
)
from tests.gpu.policies import (
    DENSE,
    MOE,
    Shape,
    draw,
    reference_digests,
    shared_folder,
    write_checkpoint,
)
from tests.gpu.trainers import answer, trainer_process
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.sources.parameters import sources

pytestmark = pytest.mark.gpu

WORLD = 2
BAD = "model.layers.1.self_attn.q_proj.weight"
COLLECTIVES = timedelta(seconds=300)


def join(rank: int, store: str, backend: str) -> None:
    """Make this process a rank of the trainer, on a GPU of its own where there are two."""
    # a multicast object needs all GPUs of a host, which others may use
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    if torch.cuda.device_count() < WORLD:
        os.environ["NCCL_HOSTID"] = str(rank)  # as in one_gpu.py
    torch.cuda.set_device(rank % torch.cuda.device_count())
    options = {"init_method": f"file://{store}", "rank": rank, "world_size": WORLD}
    dist.init_process_group(backend, timeout=COLLECTIVES, **options)


def hold_shards(
    connection: Connection, rank: int, store: str, addresses: list[str], shape: Shape, fp32: bool
) -> None:
    """One rank: (policy, version, whether its shards move before, whether the last rank's hold NaN)
    -> bytes read in place, or an error."""
    join(rank, store, "cpu:gloo,cuda:nccl")
    mesh = init_device_mesh("cuda", (WORLD,))
    shards: dict[str, DTensor] = {}
    while True:
        policy, version, moves, is_bad = connection.recv()
        old = shards if moves else {}
        for name, tensor in draw(shape, policy).items():
            mine = tensor.float() if fp32 else tensor
            mine = mine.chunk(WORLD)[rank] if len(mine) >= WORLD else mine[rank:]
            if name in shards and not moves:
                shards[name].to_local().copy_(mine)
                continue
            shards[name] = DTensor.from_local(
                mine.clone(), mesh, (Shard(0),), shape=tensor.shape, stride=tensor.stride()
            )
        del old
        if is_bad and rank == WORLD - 1:
            shards[BAD].to_local()[-1, -1] = torch.nan
        engines = addresses if rank == 0 else None
        try:
            result = trainer_bridge.update(dict(shards), engines, version=version)
        except EngineError as error:
            connection.send(str(error))
        else:
            connection.send(result.mapped_bytes)


def gather_offloaded(connection: Connection, rank: int, store: str) -> None:
    """One rank: whether it reads the whole of a parameter that FSDP2 keeps in host memory."""
    join(rank, store, "nccl")
    whole = torch.arange(8.0).view(4, 2).bfloat16()
    model = torch.nn.Linear(2, 4, bias=False, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        model.weight.copy_(whole)
    fully_shard(model, offload_policy=CPUOffloadPolicy())
    named = [("weight", model.weight)]
    (source,) = sources(named, None, torch.bfloat16)
    found = source.read(model.weight)
    connection.send((model.weight.to_local().is_cpu, found.is_cpu, torch.equal(found, whole)))


def test_offloaded_shards_are_gathered_by_nccl(tmp_path: Path) -> None:
    with ExitStack() as stack:
        start = partial(trainer_process, gather_offloaded)
        peers = [
            stack.enter_context(start(rank, str(tmp_path / "store")))[1] for rank in range(WORLD)
        ]
        assert [answer(peer) for peer in peers] == [(True, True, True)] * WORLD


@dataclass(frozen=True)
class Case:
    """The engines, and what the trainer holds."""

    shape: Shape
    tp_size: int = TP
    ep_size: int = 1
    engines: int = 1
    fp32: bool = False
    elsewhere: bool = False
    """Whether the engine is on other GPUs than the trainer."""

    @property
    def reads_codes(self) -> bool:
        """Whether the trainer's ranks quantize."""
        return self.elsewhere or self.engines > 1

    def engine_flags(self, engine: int) -> dict[str, Any]:
        gpu = WORLD if self.elsewhere else engine % torch.cuda.device_count()
        return {
            **TP_FLAGS,
            "tp_size": self.tp_size,
            "ep_size": self.ep_size,
            "base_gpu_id": gpu,
        }


@dataclass(frozen=True)
class Run:
    """Servers after updates from two ranks."""

    held: list[list[list[dict[str, str]]]]
    """By update, server and rank."""
    wanted: list[list[dict[str, str]]]
    """By update and rank."""
    mapped: list[int]
    refused: list[str]
    """What each rank of the trainer was told of weights with NaN."""
    after: list[list[dict[str, str]]]
    """By server and rank, behind that."""


CUT = replace(DENSE, name="qwen3-8b-cut", intermediate=97 * 128)
"""Each rank has half of the 49th block of the MLP's first two matrices."""
CASES = [
    pytest.param(Case(DENSE), id=f"{DENSE.name}-tp2"),
    pytest.param(Case(DENSE, fp32=True), id=f"{DENSE.name}-tp2-fp32"),
    pytest.param(Case(MOE, ep_size=TP), id=f"{MOE.name}-ep2"),
    pytest.param(Case(CUT, tp_size=1, engines=2), id=f"{CUT.name}-two-engines"),
    pytest.param(Case(MOE, tp_size=1, engines=2), id=f"{MOE.name}-two-engines"),
    pytest.param(Case(DENSE, elsewhere=True), id=f"{DENSE.name}-tp2-other-gpus"),
    pytest.param(Case(DENSE, fp32=True, elsewhere=True), id=f"{DENSE.name}-tp2-fp32-other-gpus"),
    pytest.param(Case(MOE, ep_size=TP, elsewhere=True), id=f"{MOE.name}-ep2-other-gpus"),
]
MOVES = False, False, False, False, True, False
"""Whether shards lie elsewhere than at the update before; the first one is always new."""


@pytest.fixture(scope="module", params=CASES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    case: Case = request.param
    if case.elsewhere and torch.cuda.device_count() < WORLD + case.tp_size:
        pytest.skip(f"needs {WORLD + case.tp_size} GPUs")
    folder = tmp_path_factory.mktemp("shards")
    with shared_folder() as shared:
        checkpoint = write_checkpoint(case.shape, draw(case.shape, 0), shared / "0")
        starts = [
            partial(start_server, folder / f"{i}.log", checkpoint, **case.engine_flags(i))
            for i in range(case.engines)
        ]
        with together(*starts) as servers:
            yield _update(case, servers, folder)


def _update(case: Case, servers: list[Server], folder: Path) -> Run:
    held, mapped = [], []
    with ExitStack() as stack:
        start = partial(trainer_process, hold_shards)
        addresses = [server.address for server in servers]
        arguments = str(folder / "store"), addresses, case.shape, case.fp32
        peers = [stack.enter_context(start(rank, *arguments))[1] for rank in range(WORLD)]
        for policy, moves in enumerate(MOVES, 1):
            version = version_of(servers[0]) + 1
            found = _ask(peers, policy, version, moves, False)
            assert found[0] == found[1]
            mapped.append(found[0])
            held.append(_held(servers))
        refused = []
        if case.reads_codes:
            refused = _ask(peers, len(MOVES) + 1, version + 1, False, True)
        after = _held(servers)
    wanted = [
        [
            reference_digests(draw(case.shape, policy), rank, case.tp_size, case.ep_size)
            for rank in range(case.tp_size)
        ]
        for policy in range(1, len(MOVES) + 1)
    ]
    return Run(held, wanted, mapped, refused, after)


def _ask(peers: list[Connection], *what: Any) -> list[Any]:
    for peer in peers:
        peer.send(what)
    return [answer(peer) for peer in peers]


def _held(servers: list[Server]) -> list[list[dict[str, str]]]:
    return [[sha256(rank) for rank in digests_of(server)] for server in servers]


@pytest.mark.guarantee("all-or-none", fault="shards of two ranks, read where they lie")
def test_every_byte_of_both_ranks_is_the_reference(run: Run) -> None:
    for number, (servers, wanted) in enumerate(zip(run.held, run.wanted, strict=True)):
        assert all(held == wanted for held in servers), f"after update {number}"


def test_what_stays_is_read_in_place(run: Run) -> None:
    assert [each > 0 for each in run.mapped] == [False, True, True, True, False, True]


def test_codes_are_fewer_bytes(run: Run, request: pytest.FixtureRequest) -> None:
    """Nearly half of BF16's; more where blocks are cut, whose parameters stay BF16."""
    case: Case = request.node.callspec.params["run"]
    whole = sum(math.prod(size) for _, size in case.shape.tensors()) * (4 if case.fp32 else 2)
    assert run.mapped[1] == whole
    assert (run.mapped[2] < 0.85 * whole) == case.reads_codes
    assert run.mapped[2] == whole or case.reads_codes


@pytest.mark.guarantee("all-or-none", fault="NaN in a shard that a rank of the trainer quantizes")
def test_nan_is_refused_before_anything_is_written(
    run: Run, request: pytest.FixtureRequest
) -> None:
    case: Case = request.node.callspec.params["run"]
    if not case.reads_codes:
        pytest.skip("the engine reads them, and finds it")
    assert len(run.refused) == WORLD and len({*run.refused}) == 1
    assert f"{BAD} holds NaN" in str(run.refused[0])
    assert run.after == run.held[-1]
