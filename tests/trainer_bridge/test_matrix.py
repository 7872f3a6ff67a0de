"""Every source of weights by every way to an engine: one oracle for all of them.

Placements of several trainer ranks have their own matrix, in ``test_placements.py``.
"""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver.relay.memory import RelayMemory
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.sgl_fp8rl.receiver.fake_gpu import FakeDeviceMemory
from tests.trainer_bridge.test_packer import without_triton
from tests.trainer_bridge.test_remote_engine import SNAPSHOT_BYTES, hang_up, remote_engine, step
from tests.trainer_bridge.test_update import SMALL, engine_of, holds
from trainer_bridge.session import transaction
from trainer_bridge.session.kept import KEPT
from trainer_bridge.transfer.packer import HostPacker, QuantizePacker
from trainer_bridge.transport import rank_client
from trainer_bridge.updates.update import update
from trainer_bridge.ways import carriers

pytestmark = pytest.mark.timeout(120)

LARGE = 1 << 20
Pairs = list[tuple[str, torch.Tensor]]
Patch = pytest.MonkeyPatch


class Memory(FakeDeviceMemory):
    """Of the driver; a ``weakref.finalize`` closes it."""

    made: list["Memory"] = []  # noqa: RUF012  (of one test)

    def __init__(self, nbytes: int, device: int | None) -> None:
        super().__init__(nbytes, device)
        self.made.append(self)


def on_gpu(patch: Patch) -> None:
    """Host memory stands for the trainer's GPU, and NumPy for its kernels: ``tests/gpu`` has them.

    Engines on other hosts read codes, which are compared with the last ones on the GPU.
    """
    patch.setattr(Memory, "made", [])
    patch.setattr(carriers, "DeviceMemory", Memory)
    patch.setattr(transaction, "gpu_of", lambda named, layout: torch.device("cpu"))
    patch.setattr(torch.cuda, "synchronize", lambda device: None)
    without_triton(patch)


def with_one_slot(patch: Patch) -> None:
    """As where trainer and engine share a GPU."""
    patch.setattr(carriers.Carrier, "slots", 1)


class Way(NamedTuple):
    """How weights get to an engine."""

    bucket_bytes: int
    snapshot_bytes: int = 0
    is_far: bool = True
    install: Callable[[Patch], None] = lambda patch: None
    network: str = "tcp"
    packer: type = HostPacker

    def engine(self, tp: int) -> FakeEngine:
        if not self.is_far:
            return engine_of(tp, self.bucket_bytes)
        engine = remote_engine(tp, self.bucket_bytes, self.snapshot_bytes)
        engine.memories = RelayMemory(self.bucket_bytes, self.snapshot_bytes, network=self.network)
        return engine


WAYS = {
    "host": Way(LARGE, is_far=False),
    "host, several chunks": Way(SMALL, is_far=False),
    "host, one slot": Way(SMALL, is_far=False, install=with_one_slot),
    "tcp": Way(LARGE),
    "tcp, several chunks": Way(SMALL),
    "tcp, changes": Way(SMALL, SNAPSHOT_BYTES),
    "gpu, tcp": Way(SMALL, install=on_gpu, packer=QuantizePacker),
    "gpu, changes": Way(SMALL, SNAPSHOT_BYTES, install=on_gpu, packer=QuantizePacker),
    "nixl": Way(LARGE, network="nixl"),
    "nixl, several chunks": Way(SMALL, network="nixl"),
    "nixl, changes": Way(SMALL, SNAPSHOT_BYTES, network="nixl"),
}


def shuffled(tensors: toy.Tensors, seed: int) -> Pairs:
    pairs = list(tensors.items())
    random.Random(seed).shuffle(pairs)
    return pairs


def reusing(pairs: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
    """As the receiving buffers of a collective: one memory for all tensors of a dtype."""
    largest = max(tensor.numel() for _, tensor in pairs)
    memory = {t.dtype: torch.empty(largest, dtype=t.dtype) for _, t in pairs}
    for name, tensor in pairs:
        view = memory[tensor.dtype][: tensor.numel()].view(tensor.shape)
        yield name, view.copy_(tensor)
        memory[tensor.dtype].view(torch.uint8).fill_(0x7F)  # NaN


def as_module(tensors: toy.Tensors, version: int) -> Any:
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    return toy.Model(copies, lambda model, weights: None).requires_grad_(True)


def as_views(tensors: toy.Tensors, version: int) -> Any:
    return {n: t.mT.contiguous().mT if t.dim() > 1 else t for n, t in tensors.items()}


def scales_at(end: int) -> Callable[[toy.Tensors, int], Any]:
    """Codes in a list whose scales come first, or last."""
    return lambda tensors, version: sorted(
        toy.quantized(tensors).items(), key=lambda pair: end * pair[0].endswith("_scale_inv")
    )


def codes_in_turn(tensors: toy.Tensors, version: int) -> Any:
    return reusing(scales_at(1)(tensors, version))


class Source(NamedTuple):
    """What a trainer passes to ``update`` for the weights of a version."""

    carry: Callable[[toy.Tensors, int], Any]
    dtype: torch.dtype = toy.BF16
    streams: bool = False
    has_codes: bool = False


SOURCES = {
    "mapping": Source(lambda tensors, version: tensors),
    "module": Source(as_module),
    "views": Source(as_views),
    "FP16": Source(lambda tensors, version: tensors, torch.float16),
    "FP32": Source(lambda tensors, version: tensors, torch.float32),
    "codes": Source(lambda tensors, version: toy.quantized(tensors), has_codes=True),
    "codes, scales first": Source(scales_at(-1), has_codes=True),
    "codes, scales last": Source(scales_at(1), has_codes=True),
    "stream": Source(lambda tensors, version: iter(shuffled(tensors, 1)), streams=True),
    "stream, other orders": Source(lambda t, version: iter(shuffled(t, version)), streams=True),
    "stream, FP16": Source(lambda t, _: iter(shuffled(t, 2)), torch.float16, streams=True),
    "stream, FP32": Source(lambda t, _: iter(shuffled(t, 3)), torch.float32, streams=True),
    "stream, reused memory": Source(lambda t, _: reusing(shuffled(t, 1)), streams=True),
    "stream, reused, other orders": Source(lambda t, v: reusing(shuffled(t, v)), streams=True),
    "stream of codes, any order": Source(
        lambda t, version: iter(shuffled(toy.quantized(t), version)), streams=True, has_codes=True
    ),
    "stream of codes, scales last": Source(codes_in_turn, streams=True, has_codes=True),
}
VERSIONS = 3
OF_ALL_WAYS = "mapping", "FP32", "stream", "stream, other orders"
CELLS = dict.fromkeys(
    [
        *(("host, several chunks", source, tp) for source in SOURCES for tp in (1, 2)),
        *((way, "mapping", tp) for way in WAYS for tp in (1, 2)),
        *((way, source, 1 + i % 2) for way in WAYS for i, source in enumerate(OF_ALL_WAYS)),
    ]
)
"""One way has all sources on one rank and on two, one source has all ways, and some have either."""


def checkpoint(version: int, dtype: torch.dtype) -> toy.Tensors:
    """Other weights at each version; the last ones differ by a small step."""
    return step(toy.checkpoint(1, dtype), 1) if version == 2 else toy.checkpoint(version, dtype)


def sent_bytes(tensors: toy.Tensors, source: Source, way: Way) -> int:
    """What the engine is sent, scales too: what it keeps in FP8 travels as codes to other hosts."""
    total = 0
    for name, tensor in tensors.items():
        if name in toy.FP8_NAMES and (way.is_far or source.has_codes):
            total += tensor.numel() + 4 * math.prod(-(-size // 128) for size in tensor.shape)
        elif name == "mlp.router.weight":  # the engine keeps it in FP32
            is_announced = source.streams and not source.has_codes
            total += tensor.numel() * (4 if is_announced else tensor.itemsize)
        else:
            total += tensor.numel() * 2
    return total


@pytest.mark.guarantee("all-or-none", fault="one and two ranks, two sizes of the bucket")
@pytest.mark.guarantee("all-or-none", fault="an engine on another host, one and two ranks")
@pytest.mark.guarantee("all-or-none", fault="a trainer on a GPU, engines on other hosts")
@pytest.mark.guarantee("all-or-none", fault="a stream in any order, on one and two ranks")
@pytest.mark.guarantee("all-or-none", fault="an iterator that reuses its memory, in any order")
@pytest.mark.parametrize(("way_name", "source_name", "tp"), CELLS)
def test_every_update_leaves_the_oracles_bytes(
    way_name: str, source_name: str, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    way, source = WAYS[way_name], SOURCES[source_name]
    if way.network == "nixl":
        pytest.importorskip("nixl._api", reason="NIXL is not installed (extra nixl)")
    way.install(monkeypatch)
    tried: list[str] = []
    connect = rank_client._connect
    monkeypatch.setattr(
        rank_client, "_connect", lambda path, *rest: tried.append(path) or connect(path, *rest)
    )
    engine = way.engine(tp)
    for version in range(VERSIONS):
        tensors = checkpoint(version, source.dtype)
        streamed = toy.quantized(tensors) if source.has_codes else tensors
        announce = [(n, t.dtype, t.shape) for n, t in streamed.items()]
        result = update(
            source.carry(tensors, version),
            engine,
            version=version,
            announce=announce if source.streams and source.has_codes else None,
        )
        assert holds(engine, tensors)
        states = {(w.state, w.policy.version) for w in engine.ranks}
        assert states == {(State.SERVING, version)}
        assert (result.version, result.failed, result.mapped_bytes) == (version, {}, 0)
        assert result.tensors == len(streamed)
        assert result.bytes == sent_bytes(tensors, source, way)
    if way.is_far:
        part = result.network_bytes / result.bytes
        sends_changes = way.snapshot_bytes and source_name in ("mapping", "FP32", "stream")
        assert part < 0.1 if sends_changes else part >= 1
    assert bool(tried) != way.is_far, "ranks of another host have no sockets here"
    sender = KEPT.connection_to(engine).sender
    assert sender is not None and sender._packer is not None
    assert type(sender._packer[2]) is way.packer
    if way.is_far:
        assert len(engine.memories.by_name) == 1, "one bucket for all ranks, kept between updates"
        assert len(engine.memories.exposed) == (way.network == "nixl")
        hang_up(engine)
        assert not engine.memories.exposed
    if way.install is on_gpu:
        assert len([memory for memory in Memory.made if not memory.closed]) == 1
