"""What a trainer keeps of an engine between updates, and when it lets go of it."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor

from sgl_fp8rl.protocol.cuda_memory import Handle
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.policy import Policy
from tests.trainer_bridge.fake_rank import TOKEN, Rank
from trainer_bridge import connections
from trainer_bridge import engine_connection as connection_module
from trainer_bridge.connections import connection_to
from trainer_bridge.engine_client import EngineError
from trainer_bridge.engine_connection import EngineConnection
from trainer_bridge.fsdp import Named, sources
from trainer_bridge.layout import gpu_of
from trainer_bridge.packer import CopyPacker
from trainer_bridge.transfer_plan import TransferPlan
from trainer_bridge.transport.cuda_ipc import Placement
from trainer_bridge.transport.host_memory import HostBucket
from trainer_bridge.transport.rank_client import RankClients

pytestmark = pytest.mark.timeout(60)

BF16 = torch.bfloat16
BUCKET_BYTES = 8192
HOST = torch.device("cpu")
CUDA = [torch.device("cuda", index) for index in range(2)]
GPU = "GPU-00000000-0000-0000-0000-000000000000"


class Client:
    """An engine that only tells its layout."""

    def __init__(self, gpus: tuple[str, ...] = (), **layout: Any) -> None:
        self.asked = 0
        self.layout = {
            "dtype": "bfloat16",
            "bucket_bytes": BUCKET_BYTES,
            "state": "serving",
            "fp32": [],
            "formats": {},
            "gpus": list(gpus),
            **layout,
        }

    def control(self, message: dict[str, Any]) -> dict[str, Any]:
        assert message == {"op": "layout"}
        self.asked += 1
        return dict(self.layout)

    def close(self) -> None:
        pass


def weights(**shapes: tuple[int, ...]) -> Named:
    return [(name, torch.ones(shape, dtype=BF16)) for name, shape in shapes.items()]


def plan_for(
    connection: EngineConnection, named: Named, device: torch.device | None = None
) -> TransferPlan:
    """The plan of one update, as ``update`` asks for it."""
    return connection.plan(named, None, device)


# -- the layout


def test_the_layout_is_asked_once() -> None:
    client = Client()
    connection = EngineConnection(client)
    for _ in range(3):
        plan_for(connection, weights(a=(4, 4)))
    assert client.asked == 1
    assert connection.layout() == client.layout


def test_the_layout_is_asked_again_after_a_failure() -> None:
    client = Client()
    connection = EngineConnection(client)
    plan = plan_for(connection, weights(a=(4, 4)))
    client.layout["bucket_bytes"] = 2 * BUCKET_BYTES
    connection.forget()
    assert (
        plan_for(connection, weights(a=(4, 4))).manifest.chunk_bytes
        == 2 * plan.manifest.chunk_bytes
    )
    assert client.asked == 2


def test_the_layout_is_asked_again_where_the_bucket_was_too_small() -> None:
    client = Client(bucket_bytes=512)
    connection = EngineConnection(client)
    with pytest.raises(ManifestError, match="--fp8rl-bucket-bytes"):
        plan_for(connection, weights(a=(128, 4)))
    client.layout["bucket_bytes"] = BUCKET_BYTES
    assert plan_for(connection, weights(a=(128, 4))).manifest.chunk_bytes == BUCKET_BYTES // 2
    assert client.asked == 2


def test_an_engine_that_did_not_serve_is_asked_again_after_its_first_update() -> None:
    """One with dummy weights learns from that what it keeps in FP32."""
    client = Client(state="quarantined")
    connection = EngineConnection(client)
    first = plan_for(connection, weights(a=(4, 4)))
    client.layout.update(state="serving", fp32=["a"])
    connection.committed(Policy("a run", 0))
    assert connection.layout()["fp32"] == ["a"]
    second = plan_for(connection, weights(a=(4, 4)))
    assert second is not first
    connection.committed(Policy("a run", 0))
    assert plan_for(connection, weights(a=(4, 4))) is second
    assert client.asked == 2


# -- plans


def test_a_plan_is_kept_while_nothing_but_values_changes() -> None:
    connection = EngineConnection(Client())
    plan = plan_for(connection, weights(a=(4, 4), b=(3,)))
    assert plan_for(connection, weights(a=(4, 4), b=(3,))) is plan


CHANGED: dict[str, Named] = {
    "name": weights(a=(4, 4), c=(3,)),
    "shape": weights(a=(4, 4), b=(5,)),
    "dtype": [*weights(a=(4, 4)), ("b", torch.ones(3))],
    "order": weights(b=(3,), a=(4, 4)),
    "fewer": weights(a=(4, 4)),
    "more": weights(a=(4, 4), b=(3,), c=(1,)),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_plan_is_made_anew_where_something_changed(change: str) -> None:
    connection = EngineConnection(Client())
    plan = plan_for(connection, weights(a=(4, 4), b=(3,)))
    changed = plan_for(connection, CHANGED[change])
    assert changed.manifest.fingerprint != plan.manifest.fingerprint
    assert list(changed.manifest.tensors) == [name for name, _ in CHANGED[change]]
    again = plan_for(connection, weights(a=(4, 4), b=(3,)))
    assert again is not plan
    assert again.manifest.fingerprint == plan.manifest.fingerprint


def test_a_plan_is_made_anew_for_another_family() -> None:
    """The names of a transformers module may be those of a mapping that cuts nothing."""
    connection, named = (
        EngineConnection(Client()),
        [("l.mlp.experts.gate_up_proj", torch.ones(2, 4, 3))],
    )
    as_they_are = connection.plan(named, None, None)
    assert list(as_they_are.manifest.tensors) == [named[0][0]]
    split = connection.plan(named, "qwen3_moe", None)
    assert set(split.manifest.tensors) == {
        f"l.mlp.experts.{expert}.{part}_proj.weight"
        for expert in range(2)
        for part in ("gate", "up")
    }
    assert connection.plan(named, "qwen3_moe", None) is split


def test_a_plan_is_made_anew_for_another_gpu() -> None:
    """Without one, nothing is quantized on the way."""
    connection, named = EngineConnection(Client((GPU,), formats={"fp8": ["a"]})), weights(a=(4, 4))
    plans = [plan_for(connection, named, device) for device in (None, CUDA[0], CUDA[1])]
    assert ["a_scale_inv" in plan.manifest.tensors for plan in plans] == [False, True, True]
    assert plans[1] is not plans[2]
    assert plan_for(connection, named, CUDA[1]) is plans[2]


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_plan_is_made_anew_for_what_is_sharded_now(one_process: DeviceMesh) -> None:
    """It is gathered in the engine's dtype, so a fill must not take it for what the trainer has."""
    connection, whole = EngineConnection(Client()), torch.ones(4, 4)
    plain = plan_for(connection, [("a", whole)])
    sharded = plan_for(connection, [("a", distribute_tensor(whole, one_process))])
    assert [plan.sources[0].held_as for plan in (plain, sharded)] == [torch.float32, BF16]
    assert plan_for(connection, [("a", distribute_tensor(whole, one_process))]) is sharded


def test_what_the_engine_keeps_in_fp8_is_quantized_where_there_is_a_gpu() -> None:
    named = weights(a=(4, 4), b=(4, 4))
    for device, dtype in ((None, BF16), (torch.device("cuda", 0), torch.float8_e4m3fn)):
        plan = plan_for(EngineConnection(Client((GPU,), formats={"fp8": ["a"]})), named, device)
        specs = plan.manifest.tensors
        assert (specs["a"].dtype, specs["b"].dtype) == (dtype, BF16)
        assert ("a_scale_inv" in specs) is (device is not None)


def test_a_failure_forgets_plans() -> None:
    connection = EngineConnection(Client())
    plan = plan_for(connection, weights(a=(4, 4)))
    connection.forget()
    assert plan_for(connection, weights(a=(4, 4))) is not plan


# -- read in place: only where it lay at the last update


@dataclass
class FakeGpu:
    """Memory where any tensor can be shared, unless told otherwise; stands in for the driver."""

    placed: list[list[int]] = field(default_factory=list)
    """Addresses, at each ``place``."""
    shareable: bool = True
    unable: set[int] = field(default_factory=set)
    """Addresses that cannot be mapped."""
    freed: set[int] = field(default_factory=set)
    """Addresses that were freed and given out again."""

    def place(self, tensors: list[torch.Tensor]) -> "FakePlacement | None":
        addresses = [tensor.data_ptr() for tensor in tensors]
        self.placed.append(addresses)
        return FakePlacement(addresses, self) if self.shareable else None

    def can_be_mapped(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() not in self.unable


@dataclass
class FakePlacement:
    addresses: list[int]
    gpu: FakeGpu

    def holds(self, tensors: list[torch.Tensor]) -> bool:
        there = [tensor.data_ptr() for tensor in tensors]
        return self.addresses == there and not self.gpu.freed & set(there)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    monkeypatch.setattr(connection_module, "place", gpu.place)
    monkeypatch.setattr(connection_module, "can_be_mapped", gpu.can_be_mapped)
    return gpu


def mapped(connection: EngineConnection, named: Named) -> list[bool]:
    """Which of the tensors one update reads in place; host memory stands in for the GPU's."""
    plan = plan_for(connection, named, HOST if connection.layout()["gpus"] else None)
    assert plan.offsets.keys() == {n for (n, _), m in zip(named, plan.mapped, strict=True) if m}
    return plan.mapped


def test_the_second_update_reads_in_place_what_stayed(gpu: FakeGpu) -> None:
    connection, named = EngineConnection(Client((GPU,))), weights(a=(4, 4), b=(3,))
    assert mapped(connection, named) == [False, False]
    assert mapped(connection, named) == [True, True]
    assert mapped(connection, named) == [True, True]
    assert len(gpu.placed) == 1


def test_what_moved_is_copied_once(gpu: FakeGpu) -> None:
    """One that moved is enough: then all are copied, and looked for anew."""
    connection, named = EngineConnection(Client((GPU,))), weights(a=(4, 4), b=(3,))
    moved = [named[0], *weights(b=(3,))]
    assert [mapped(connection, n)[0] for n in (named, named, moved, moved)] == [
        False,
        True,
        False,
        True,
    ]
    assert len(gpu.placed) == 2


def test_memory_that_was_freed_meanwhile_is_not_read(gpu: FakeGpu) -> None:
    """Also where other memory has its address now."""
    connection, named = EngineConnection(Client((GPU,))), weights(a=(4, 4))
    mapped(connection, named)
    gpu.freed = {named[0][1].data_ptr()}
    assert mapped(connection, named) == [False]


def test_tensors_that_are_made_anew_each_time_are_never_read_in_place(gpu: FakeGpu) -> None:
    connection = EngineConnection(Client((GPU,)))
    alive = [weights(a=(4, 4)) for _ in range(4)]
    assert [mapped(connection, named) for named in alive] == [[False]] * 4


def test_what_cannot_be_mapped_is_copied(gpu: FakeGpu) -> None:
    connection, named = EngineConnection(Client((GPU,))), weights(a=(4, 4), b=(3,), c=(2, 2))
    gpu.unable = {named[1][1].data_ptr()}
    assert mapped(connection, named) == [False, False, False]
    assert mapped(connection, named) == [True, False, True]
    assert gpu.placed == [[named[0][1].data_ptr(), named[2][1].data_ptr()]]


def test_what_lies_on_another_gpu_is_copied(gpu: FakeGpu) -> None:
    """Only one GPU is synchronised before the engine reads, so only its parameters are final."""
    connection = EngineConnection(Client((GPU,)))
    named = [*weights(a=(4, 4)), ("b", torch.ones(3, dtype=BF16, device="meta"))]
    assert mapped(connection, named) == [False, False]
    assert mapped(connection, named) == [True, False]
    assert gpu.placed == [[named[0][1].data_ptr()]]


def test_memory_that_cannot_be_shared_is_looked_for_each_time(gpu: FakeGpu) -> None:
    gpu.shareable = False
    connection, named = EngineConnection(Client((GPU,))), weights(a=(4, 4))
    assert [mapped(connection, named) for _ in range(3)] == [[False]] * 3
    gpu.shareable = True
    assert [mapped(connection, named) for _ in range(2)] == [[False], [True]]


def test_an_engine_on_a_cpu_reads_nothing_in_place(gpu: FakeGpu) -> None:
    connection, named = EngineConnection(Client()), weights(a=(4, 4))
    assert [mapped(connection, named) for _ in range(2)] == [[False]] * 2
    assert gpu.placed == []


def test_after_a_failure_everything_is_copied_once(gpu: FakeGpu) -> None:
    connection, named = EngineConnection(Client((GPU,))), weights(a=(4, 4))
    mapped(connection, named)
    assert mapped(connection, named) == [True]
    connection.forget()
    assert [mapped(connection, named) for _ in range(2)] == [[False], [True]]


def test_the_plans_of_both_ways_are_kept(gpu: FakeGpu) -> None:
    """Where parameters move to and fro, neither side works its plan out again."""
    connection, here, there = EngineConnection(Client((GPU,))), weights(a=(4, 4)), weights(a=(4, 4))
    copied, in_place = plan_for(connection, here, HOST), plan_for(connection, here, HOST)
    assert copied is not in_place
    assert plan_for(connection, there, HOST) is copied
    assert plan_for(connection, there, HOST) is in_place


# -- KV scales: new at each step, and no reason to copy the weights

KV_CACHE = {"dtype": "fp8_e4m3", "scheme": "engine", "layers": 2, "kv_heads": 4}


def kv_client() -> Client:
    return Client((GPU,), kv_cache=KV_CACHE)


def scaled(connection: EngineConnection, named: Named, value: float) -> Named:
    """What one update sends that brings scales, as ``update`` puts it together."""
    return [*named, (KV_SCALES, connection.kv_scales(torch.full((2, 3, 4), value), HOST))]


def test_scales_that_are_new_each_time_are_read_in_place(gpu: FakeGpu) -> None:
    connection, named = EngineConnection(kv_client()), weights(a=(4, 4), b=(3,))
    ways, plans = [], []
    for step in range(4):
        both = scaled(connection, named, step + 1.0)
        plans.append(plan_for(connection, both, HOST))
        ways.append(plans[-1].mapped)
        assert torch.equal(both[-1][1], torch.full((2, 3, 4), step + 1.0))
    assert ways == [[False] * 3, *[[True] * 3] * 3]
    assert plans[1] is plans[2] is plans[3]
    assert len(gpu.placed) == 1
    assert plans[1].offsets[KV_SCALES] == (2, 0)
    # the control: sent from where they were made, nothing would stay
    connection, alive = EngineConnection(kv_client()), []
    for _ in range(3):
        alive.append([*named, (KV_SCALES, torch.ones(2, 3, 4))])
        assert plan_for(connection, alive[-1], HOST).mapped == [False] * 3


def test_updates_with_and_without_scales_may_alternate(gpu: FakeGpu) -> None:
    connection, named = EngineConnection(kv_client()), weights(a=(4, 4))
    assert mapped(connection, named) == [False]
    assert mapped(connection, named) == [True]
    # a new place
    assert plan_for(connection, scaled(connection, named, 1.0), HOST).mapped == [False, False]
    plans = []
    for step in range(4):
        sent = named if step % 2 else scaled(connection, named, step + 2.0)
        plans.append(plan_for(connection, sent, HOST))
        assert plans[-1].mapped == [True] * len(sent)
    assert plans[0] is plans[2] and plans[1] is plans[3]
    assert len(gpu.placed) == 2


def test_scales_alone_are_not_mapped(gpu: FakeGpu) -> None:
    """Where the weights pass through the bucket, it takes them along."""
    connection, named = EngineConnection(kv_client()), weights(a=(4, 4))
    gpu.unable = {named[0][1].data_ptr()}
    for _ in range(3):
        assert plan_for(connection, scaled(connection, named, 1.0), HOST).mapped == [False, False]
    assert gpu.placed == []


def test_scales_keep_their_spot_beside_weights_that_are_copied(gpu: FakeGpu) -> None:
    connection, named = EngineConnection(kv_client()), weights(a=(4, 4), b=(3,), c=(2, 2))
    gpu.unable = {named[1][1].data_ptr()}
    for way in ([False] * 4, [True, False, True, True]):
        both = scaled(connection, named, 1.0)
        assert plan_for(connection, both, HOST).mapped == way
    assert gpu.placed == [[t.data_ptr() for n, t in both if n != "b"]]


def test_scales_are_sent_in_fp32_whoever_sends_them() -> None:
    connection = EngineConnection(kv_client())
    for family in (None, "qwen3"):
        both = scaled(connection, weights(a=(4, 4)), 1.0)
        spec = connection.plan(both, family, None).manifest.tensors[KV_SCALES]
        assert (spec.dtype, spec.shape) == (torch.float32, (2, 3, 4))


def test_scales_come_without_their_gradient() -> None:
    connection = EngineConnection(kv_client())
    for value in (1.0, 2.0):
        given = torch.full((2, 3, 4), value, requires_grad=True)
        assert not connection.kv_scales(given, HOST).requires_grad


def test_scales_that_are_not_for_this_engine() -> None:
    """A new engine at the address may be what they are for, so it is asked again."""
    good = torch.ones(2, 3, 4)
    bad: list[tuple[str, Any]] = [
        (r"\(3, 3, 4\).*\(2, 3, 4\)", torch.ones(3, 3, 4)),
        (r"\(2, 2, 4\)", torch.ones(2, 2, 4)),
        (r"\(2, 3, 2\)", torch.ones(2, 3, 2)),
        ("float64", good.double()),
        ("bfloat16", good.bfloat16()),
        ("list", good.tolist()),
        *(("positive", good * x) for x in (0.0, -1.0, float("nan"), float("inf"))),
    ]
    client = kv_client()
    connection = EngineConnection(client)
    for sentence, scales in bad:
        asked = client.asked
        with pytest.raises(ManifestError, match=sentence):
            connection.kv_scales(scales, None)
        assert torch.equal(connection.kv_scales(good, None), good)
        assert client.asked <= asked + 2
    for layout in ({}, {"kv_cache": None}):
        client = Client((GPU,), **layout)
        connection = EngineConnection(client)
        with pytest.raises(ManifestError, match="--kv-cache-dtype fp8_e4m3"):
            connection.kv_scales(good, None)
        client.layout["kv_cache"] = KV_CACHE
        assert torch.equal(connection.kv_scales(good, None), good)


# -- memory that the engine opens


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    """It serves three sessions, as many as each test has."""
    rank = Rank(tmp_path, sessions=3)
    yield rank
    rank.join()


def share(
    connection: EngineConnection, rank: Rank, plan: TransferPlan, known: tuple[str, ...] = ()
) -> Any:
    """What fills the bucket of one session; ``known`` has the rank say that it has more open."""
    opened = (*rank.memory.known(), *known)
    rank.answer = lambda message: {"ok": True, "known": opened}
    ranks = RankClients([rank.path], TOKEN)
    try:
        return connection.share(ranks, plan, None)
    finally:
        ranks.close()


def test_a_bucket_is_kept_while_its_size_stays(rank: Rank) -> None:
    connection = EngineConnection(Client())
    plan = plan_for(connection, weights(a=(4, 4)))
    packer = share(connection, rank, plan)
    assert isinstance(packer, CopyPacker)
    bucket = connection._bucket
    assert isinstance(bucket, HostBucket)
    assert bucket.content.numel() == BUCKET_BYTES
    assert share(connection, rank, plan) is packer
    assert share(connection, rank, plan_for(connection, weights(b=(7, 4)))) is not packer
    assert connection._bucket is bucket
    rank.join()
    assert rank.ops() == ["hello", "bucket", "hello", "hello"]


def test_a_bucket_of_another_size_takes_its_place(rank: Rank) -> None:
    client = Client()
    connection = EngineConnection(client)
    share(connection, rank, plan_for(connection, weights(a=(4, 4))))
    first = connection._bucket
    assert first is not None
    client.layout["bucket_bytes"] = 2 * BUCKET_BYTES
    connection.forget()
    assert not first.close.alive
    plan = plan_for(connection, weights(a=(4, 4)))
    share(connection, rank, plan)
    second = connection._bucket
    assert second is not None
    assert second.content.numel() == 2 * BUCKET_BYTES
    share(connection, rank, plan)
    assert connection._bucket is second
    rank.join()
    assert rank.ops() == ["hello", "bucket", "hello", "bucket", "hello"]


class GpuBucket:
    """A bucket that claims to lie on a GPU."""

    made: list["GpuBucket"]

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.content = SimpleNamespace(device=device, numel=lambda: nbytes)
        self.is_closed = False
        self.made.append(self)

    def share(self, ranks: Any) -> None:
        """Until now ranks may have had the one before open."""
        assert not any(bucket.is_closed for bucket in self.made[-2:])

    def close(self) -> None:
        self.is_closed = True


def test_a_bucket_on_another_gpu_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old one is freed when no rank has it open any more."""
    monkeypatch.setattr(GpuBucket, "made", [], raising=False)
    monkeypatch.setattr(connection_module, "DeviceBucket", GpuBucket)
    monkeypatch.setattr(connection_module, "QuantizePacker", lambda *_: object())
    connection = EngineConnection(Client())
    plan = plan_for(connection, weights(a=(4, 4)))
    for device in (CUDA[0], CUDA[0], CUDA[1], CUDA[0]):
        connection.share(cast(RankClients, None), plan, device)
    assert [bucket.content.device for bucket in GpuBucket.made] == [CUDA[0], CUDA[1], CUDA[0]]
    assert [bucket.is_closed for bucket in GpuBucket.made] == [True, True, False]


IN_PLACE = Placement((16, 64), (0,), (Handle("ab" * 64, 4096, GPU),), ((0, 16), (0, 64)))
"""Two parameters of one allocation, 16 and 64 bytes from its start."""


def segments(rank: Rank) -> list[dict[str, Any]]:
    return [message for message in rank.messages if message.get("op") == "segments"]


def test_where_mapped_tensors_lie_is_told_once(rank: Rank) -> None:
    connection = EngineConnection(Client())
    connection._placement = IN_PLACE
    named = weights(a=(8,), b=(2, 2), c=(3,))
    plan = TransferPlan(sources(named, None, BF16), [True, False, True], BUCKET_BYTES // 2)
    share(connection, rank, plan)
    (told,) = segments(rank)
    assert told["places"] == {"a": [0, 16], "c": [0, 64]}  # b lies in the bucket
    assert told["handles"] == [IN_PLACE.handles[0].to_json()]
    share(connection, rank, plan, known=(told["name"],))
    assert len(segments(rank)) == 1
    share(connection, rank, plan)  # the rank has let go of it
    rank.join()
    assert segments(rank) == [told, told]


def test_other_tensors_in_the_same_memory_are_told_under_another_name(rank: Rank) -> None:
    connection = EngineConnection(Client())
    connection._placement = IN_PLACE
    names = []
    for flags in ([True, True], [True, False]):
        named = weights(a=(8,), b=(8,))
        share(connection, rank, TransferPlan(sources(named, None, BF16), flags, BUCKET_BYTES // 2))
        names.append(segments(rank)[-1]["name"])
    plan = TransferPlan(sources(named, None, BF16), [False, False], BUCKET_BYTES // 2)
    share(connection, rank, plan)  # nothing is mapped, so nothing is told
    rank.join()
    assert len(segments(rank)) == 2
    assert names[0] != names[1]


def test_no_bucket_is_kept_where_everything_is_mapped(rank: Rank) -> None:
    connection = EngineConnection(Client())
    connection._placement = IN_PLACE
    named = weights(a=(8,), b=(8,))
    buckets = []
    for flags in ([True, True], [True, False], [True, True]):
        plan = TransferPlan(sources(named, None, BF16), flags, BUCKET_BYTES // 2)
        assert (share(connection, rank, plan) is None) is all(flags)
        buckets.append(connection._bucket)
    rank.join()
    assert rank.ops().count("bucket") == 1
    assert (buckets[0], buckets[2]) == (None, None)
    assert buckets[1] is not None and not buckets[1].close.alive


# -- which link


def test_an_address_has_one_link_for_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_connections", {})
    monkeypatch.delenv("FP8RL_KEY", raising=False)
    first = connection_to("http://a:1")
    assert connection_to("http://a:1") is first
    assert connection_to("http://a:2") is not first
    monkeypatch.setenv("FP8RL_KEY", "secret")
    with_key = connection_to("http://a:1")
    assert with_key is not first
    assert connection_to("http://a:1") is with_key


@pytest.mark.parametrize(
    ("address", "others"),
    [
        ("http://localhost:30000", ["http://localhost:30000/", "HTTP://LOCALHOST:30000"]),
        ("http://[fe80::1]:3", ["http://[FE80::1]:3//"]),
        ("http://host", ["http://host:80", "http://Host:80/"]),
        ("https://host/Path", ["https://HOST:443/Path/"]),
    ],
)
def test_an_address_is_the_same_in_every_spelling(
    address: str, others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each link would have a bucket of memory of its own."""
    monkeypatch.setattr(connections, "_connections", {})
    connection = connection_to(address)
    assert [connection_to(other) for other in others] == [connection] * len(others)
    # the controls: another path, port, scheme or name of the same host
    different = ["https://host/path", "http://host:443", "http://host:30000", "http://127.0.0.1"]
    assert connection not in [connection_to(other) for other in different]
    connections.close(others[0])
    assert connection_to(address) is not connection


def test_an_engine_has_one_link_that_ends_with_it() -> None:
    engine, other = Client(), Client()
    connection = connection_to(engine)
    assert connection_to(engine) is connection
    assert connection_to(other) is not connection
    gone = weakref.ref(connection)
    del connection
    gc.collect()
    assert gone() is not None
    del engine
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("engine", "name"), [(None, "NoneType"), (object(), "object"), ("host:1", "host:1"), (3, "int")]
)
def test_what_is_no_engine(engine: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_connections", {})
    with pytest.raises(EngineError, match=f"{name}.*http://"):
        connection_to(engine)
    assert connections._connections == {}


# -- through which GPU


def cuda_tensor(index: int) -> torch.Tensor:
    return cast(torch.Tensor, SimpleNamespace(is_cuda=True, device=torch.device("cuda", index)))


def test_the_gpu_of_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus: dict[str, Any] = {"gpus": [GPU]}
    on_cpu: dict[str, Any] = {"gpus": []}
    host, held = weights(a=(4, 4)), [*weights(a=(4, 4)), ("b", cuda_tensor(1))]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_of(host, on_gpus) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert gpu_of(host, on_gpus) == torch.device("cuda", 3)
    assert gpu_of(held, on_gpus) == torch.device("cuda", 1)
    assert gpu_of(host, on_cpu) is None
    assert gpu_of(held, on_cpu) is None
