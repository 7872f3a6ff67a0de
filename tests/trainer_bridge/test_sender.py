"""Plans and memory for the engines of one layout."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor

from sgl_fp8rl.protocol.cuda_memory import CudaMemoryError, Handle
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.place import here
from tests.trainer_bridge.fake_rank import TOKEN, Rank
from trainer_bridge.shards.placed_shards import Shards
from trainer_bridge.sources.parameters import Named, sources
from trainer_bridge.transfer.packer import HostPacker
from trainer_bridge.transfer.transfer_plan import TransferPlan
from trainer_bridge.transport.cuda_ipc import Placement
from trainer_bridge.transport.rank_client import RankClients
from trainer_bridge.ways import carriers, in_place
from trainer_bridge.ways import sender as sender_module
from trainer_bridge.ways.carriers import Bucket
from trainer_bridge.ways.sender import Sender

pytestmark = pytest.mark.timeout(60)

BF16 = torch.bfloat16
BUCKET_BYTES = 8192
HOST = torch.device("cpu")
CUDA = [torch.device("cuda", index) for index in range(2)]
GPU = "GPU-00000000-0000-0000-0000-000000000000"


def layout(gpus: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    return {
        "dtype": "bfloat16",
        "bucket_bytes": BUCKET_BYTES,
        "fp32": [],
        "skipped": [],
        "tied": None,
        "formats": {},
        "gpus": list(gpus),
        "visible_gpus": list(gpus),
        "place": here(),
        "through_host": False,
        "is_remote": False,
        **more,
    }


def weights(**shapes: tuple[int, ...]) -> Named:
    return [(name, torch.ones(shape, dtype=BF16)) for name, shape in shapes.items()]


def plan_for(sender: Sender, named: Named, device: torch.device | None = None) -> TransferPlan:
    """The plan of one update, as ``update`` asks for it."""
    return sender.plan(named, None, device)


# -- plans


CHANGED: dict[str, Named] = {
    "name": weights(a=(4, 4), c=(3,)),
    "shape": weights(a=(4, 4), b=(5,)),
    "dtype": [*weights(a=(4, 4)), ("b", torch.ones(3))],
    "order": weights(b=(3,), a=(4, 4)),
    "fewer": weights(a=(4, 4)),
    "more": weights(a=(4, 4), b=(3,), c=(1,)),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_plan_is_kept_until_anything_but_values_changes(change: str) -> None:
    sender = Sender(layout())
    plan = plan_for(sender, weights(a=(4, 4), b=(3,)))
    assert plan_for(sender, weights(a=(4, 4), b=(3,))) is plan
    changed = plan_for(sender, CHANGED[change])
    assert changed is not plan
    is_same = changed.manifest.fingerprint == plan.manifest.fingerprint
    assert is_same == (change == "dtype")  # it is sent in the engine's
    assert list(changed.manifest.tensors) == [name for name, _ in CHANGED[change]]
    again = plan_for(sender, weights(a=(4, 4), b=(3,)))
    assert again is not plan
    assert again.manifest.fingerprint == plan.manifest.fingerprint


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_plan_is_made_anew_for_another_family_gpu_or_sharding(one_process: DeviceMesh) -> None:
    """Names of a transformers module may be those of a mapping that cuts nothing; what the engine
    keeps in FP8 is quantized on a GPU; and what is sharded is gathered in the engine's dtype, so a
    fill must not take it for what the trainer has."""
    experts, whole = "l.mlp.experts.gate_up_proj", torch.ones(4, 4)
    split = [f"l.mlp.experts.{e}.{x}_proj.weight" for e in range(2) for x in ("gate", "up")]
    kept, codes = weights(a=(4, 4)), {"a": torch.float8_e4m3fn, "a_scale_inv": torch.float32}

    def sharded() -> Named:
        return [("a", distribute_tensor(whole, one_process))]

    sender = Sender(layout((GPU,), formats={"block-fp8": ["a"]}))
    plans: list[TransferPlan] = []
    for named, family, device, dtypes, held_as in (
        ([(experts, torch.ones(2, 4, 3))], None, None, {experts: BF16}, torch.float32),
        ([(experts, torch.ones(2, 4, 3))], "qwen3_moe", None, dict.fromkeys(split, BF16), None),
        (kept, None, None, {"a": BF16}, BF16),
        (kept, None, CUDA[0], codes, BF16),
        (kept, None, CUDA[1], codes, BF16),
        ([("a", whole)], None, None, {"a": BF16}, torch.float32),
        (sharded(), None, None, {"a": BF16}, BF16),
    ):
        plan = sender.plan(named, family, device)
        assert all(plan is not other for other in plans)
        assert {n: spec.dtype for n, spec in plan.manifest.tensors.items()} == dtypes
        assert held_as in (None, plan.sources[0].held_as)
        plans.append(plan)
        assert sender.plan(named, family, device) is plan
    assert sender.plan(sharded(), None, None) is plans[-1]


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
    monkeypatch.setattr(in_place, "placement_of", gpu.place)
    monkeypatch.setattr(sender_module, "can_be_mapped", gpu.can_be_mapped)
    return gpu


def mapped(sender: Sender, named: Named) -> list[bool]:
    """Which of the tensors one update reads in place; host memory stands in for the GPU's."""
    plan = plan_for(sender, named, HOST if sender.layout["gpus"] else None)
    assert plan.offsets.keys() == {n for (n, _), m in zip(named, plan.mapped, strict=True) if m}
    return plan.mapped


@pytest.mark.parametrize(
    ("updates", "unable", "reads", "places"),
    [
        pytest.param("111", "", "--- +++ +++", 1, id="it stays"),
        pytest.param("1122", "", "--- +++ --- +++", 2, id="it moves: it is looked for anew"),
        pytest.param("1233", "", "--- --- --- +++", 3, id="one that moves is enough"),
        pytest.param("145", "", "--- --- ---", 3, id="it is made anew each time"),
        pytest.param("111", "b", "--- +-+ +-+", 1, id="one cannot be mapped"),
        pytest.param("111", "abc", "--- --- ---", 0, id="none can be mapped"),
        pytest.param("66", "", "--- +-+", 1, id="one is on another GPU, which is not awaited"),
        pytest.param("1f1", "", "--- ---", 2, id="it was freed, and given out again"),
        pytest.param("n11y11", "", "--- --- --- +++", 3, id="it cannot be shared at first"),
    ],
)
def test_what_lay_there_at_the_last_update_is_read_in_place(
    updates: str, unable: str, reads: str, places: int, gpu: FakeGpu
) -> None:
    """Each digit is one update with the tensors a, b and c of that number; before it memory may be
    freed, and be shareable or not."""
    sender = Sender(layout((GPU,)))
    sets = {number: weights(a=(4, 4), b=(3,), c=(2, 2)) for number in "1245"}
    sets["3"] = [*sets["2"][:2], *weights(c=(2, 2))]
    sets["6"] = [sets["1"][0], ("b", torch.ones(3, dtype=BF16, device="meta")), sets["1"][2]]
    gpu.unable = {tensor.data_ptr() for name, tensor in sets["1"] if name in unable}
    found = []
    for step in updates:
        if step in sets:
            found.append(mapped(sender, sets[step]))
        elif step == "f":
            gpu.freed = {sets["1"][0][1].data_ptr()}
        else:
            gpu.shareable = step == "y"
    assert " ".join("".join("-+"[is_read] for is_read in each) for each in found) == reads
    assert len(gpu.placed) == places
    readable = {len(reads.split()[-1].replace("-", ""))} if "+" in reads else {3}
    assert {len(addresses) for addresses in gpu.placed} <= readable


def test_an_engine_on_a_cpu_reads_nothing_in_place(gpu: FakeGpu) -> None:
    sender, named = Sender(layout()), weights(a=(4, 4))
    assert [mapped(sender, named) for _ in range(2)] == [[False]] * 2
    assert gpu.placed == []


def test_the_plans_of_both_ways_are_kept(gpu: FakeGpu) -> None:
    """Where parameters move to and fro, neither side works its plan out again."""
    sender, here, there = Sender(layout((GPU,))), weights(a=(4, 4)), weights(a=(4, 4))
    copied, in_place = plan_for(sender, here, HOST), plan_for(sender, here, HOST)
    assert copied is not in_place
    assert plan_for(sender, there, HOST) is copied
    assert plan_for(sender, there, HOST) is in_place


# -- KV scales: new at each step, and no reason to copy the weights

KV_CACHE = {"layers": 2, "kv_heads": 4}


def kv_layout() -> dict[str, Any]:
    return layout((GPU,), kv_cache=KV_CACHE)


def scaled(sender: Sender, named: Named, value: float) -> Named:
    """What one update sends that brings scales, as ``update`` puts it together."""
    return sender.settled([*named, (KV_SCALES, torch.full((2, 2, 4), value))], HOST)


def test_updates_with_and_without_scales_may_alternate(gpu: FakeGpu) -> None:
    sender, named = Sender(kv_layout()), weights(a=(4, 4))
    assert mapped(sender, named) == [False]
    assert mapped(sender, named) == [True]
    # a new place
    assert plan_for(sender, scaled(sender, named, 1.0), HOST).mapped == [False, False]
    plans = []
    for step in range(4):
        sent = named if step % 2 else scaled(sender, named, step + 2.0)
        plans.append(plan_for(sender, sent, HOST))
        assert plans[-1].mapped == [True] * len(sent)
    assert plans[0] is plans[2] and plans[1] is plans[3]
    assert plans[0].offsets[KV_SCALES] == (1, 0)
    assert len(gpu.placed) == 2


@pytest.mark.parametrize(
    ("unable", "reads"), [("b", [True, False, True, True]), ("abc", [False] * 4)]
)
def test_scales_beside_weights_that_are_copied(
    unable: str, reads: list[bool], gpu: FakeGpu
) -> None:
    """They keep their spot; where all weights pass through the bucket, it takes them along."""
    sender, named = Sender(kv_layout()), weights(a=(4, 4), b=(3,), c=(2, 2))
    gpu.unable = {tensor.data_ptr() for name, tensor in named if name in unable}
    for way in ([False] * 4, reads):
        both = scaled(sender, named, 1.0)
        assert plan_for(sender, both, HOST).mapped == way
    assert gpu.placed == [[t.data_ptr() for n, t in both if n not in unable]] * any(reads)


def test_scales_are_sent_in_fp32_whoever_sends_them() -> None:
    sender = Sender(kv_layout())
    for family in (None, "qwen3"):
        both = scaled(sender, weights(a=(4, 4)), 1.0)
        spec = sender.plan(both, family, None).manifest.tensors[KV_SCALES]
        assert (spec.dtype, spec.shape) == (torch.float32, (2, 2, 4))
    # what is kept of them must not grow by each step's graph
    ((_, kept),) = sender.settled([(KV_SCALES, torch.ones(2, 2, 4, requires_grad=True))], HOST)
    assert not kept.requires_grad


def test_scales_that_are_not_for_this_engine() -> None:
    good = torch.ones(2, 2, 4)
    bad: list[tuple[str, Any]] = [
        (r"\(3, 2, 4\).*\(2, 2, 4\)", torch.ones(3, 2, 4)),
        (r"\(2, 3, 4\).*\(2, 2, 4\).*no longer Q", torch.ones(2, 3, 4)),
        (r"\(2, 2, 2\)", torch.ones(2, 2, 2)),
        ("float64", good.double()),
        ("bfloat16", good.bfloat16()),
        ("list", good.tolist()),
        *(
            ("scales are from", good * x)
            for x in (0.0, -1.0, float("nan"), float("inf"), 1e16, 1e-40)
        ),
    ]
    sender = Sender(kv_layout())
    for sentence, scales in bad:
        with pytest.raises(ManifestError, match=sentence):
            sender.settled([(KV_SCALES, scales)], None)
        assert sender.settled([(KV_SCALES, good)], None) == [(KV_SCALES, good)]
    with pytest.raises(ManifestError, match="--kv-cache-dtype fp8_e4m3"):
        Sender(layout((GPU,))).settled([(KV_SCALES, good)], None)


# -- memory that the engine opens


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path, sessions=5)
    yield rank


def share(
    sender: Sender,
    rank: Rank,
    plan: TransferPlan,
    known: tuple[str, ...] = (),
    users: tuple[object, ...] = (),
) -> Any:
    """What fills the bucket of one session; ``known`` has the rank say that it has more open."""
    opened = (*rank.memory.known(), *known)
    rank.answer = lambda message: {"ok": True, "known": opened}
    ranks = RankClients([rank.path], TOKEN)
    try:
        return sender.share(ranks, plan, None, users)
    finally:
        ranks.close()


def test_a_bucket_is_kept_while_its_size_stays(rank: Rank) -> None:
    sender = Sender(layout())
    plan = plan_for(sender, weights(a=(4, 4)))
    packer = share(sender, rank, plan)
    assert isinstance(packer, HostPacker)
    bucket = sender._bucket
    assert isinstance(bucket, Bucket)
    assert bucket.content.numel() == BUCKET_BYTES
    assert share(sender, rank, plan) is packer
    assert share(sender, rank, plan_for(sender, weights(b=(7, 4)))) is not packer
    assert sender._bucket is bucket
    assert rank.ops() == ["hello", "bucket", "hello", "hello"]


def test_whole_parameters_are_not_read_in_place_by_several_engines(gpu: FakeGpu) -> None:
    """They are quantized once for all of them, also where one of two is updated alone."""
    sender, named = Sender(layout((GPU,))), weights(a=(4, 4))
    for engine in ("one", "two"):
        sender.join(engine)
    sender.share_with(["one"])
    assert [mapped(sender, named) for _ in range(2)] == [[False]] * 2
    sender.leave("two")
    sender.share_with(["one"])
    assert [mapped(sender, named) for _ in range(2)] == [[False], [True]]
    assert len(gpu.placed) == 1


class GpuBucket:
    """A bucket that claims to lie on a GPU."""

    made: list["GpuBucket"]

    def __init__(self, nbytes: int, device: torch.device, is_opened: bool) -> None:
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
    monkeypatch.setattr(sender_module, "Bucket", GpuBucket)
    monkeypatch.setattr(sender_module, "QuantizePacker", lambda *_: object())
    sender = Sender(layout())
    plan = plan_for(sender, weights(a=(4, 4)))
    for device in (CUDA[0], CUDA[0], CUDA[1], CUDA[0]):
        sender.share(cast(RankClients, None), plan, device, ())
    assert [bucket.content.device for bucket in GpuBucket.made] == [CUDA[0], CUDA[1], CUDA[0]]
    assert [bucket.is_closed for bucket in GpuBucket.made] == [True, True, False]


IN_PLACE = Placement((16, 64), (0,), (Handle("ab" * 64, 4096, GPU),), ((0, 16), (0, 64)))
"""Two parameters of one allocation, 16 and 64 bytes from its start."""


def in_place_plan(sender: Sender, named: Named, flags: list[bool]) -> TransferPlan:
    """One that maps these, as if they had lain there before."""
    found = frozenset(index for index, is_mapped in enumerate(flags) if is_mapped)
    vars(sender.parameters).update(found=found, _placement=IN_PLACE)
    return TransferPlan(sources(named, None, BF16), flags, BUCKET_BYTES // 2)


def segments(rank: Rank) -> list[dict[str, Any]]:
    return [message for message in rank.messages if message.get("op") == "segments"]


def test_where_mapped_tensors_lie_is_told_once(rank: Rank) -> None:
    """And under another name where others of the same memory are mapped; ``b`` lies in the bucket,
    and at last all do."""
    sender, named = Sender(layout()), weights(a=(8,), b=(2, 2), c=(3,))
    plan = in_place_plan(sender, named, [True, False, True])
    share(sender, rank, plan)
    (told,) = segments(rank)
    assert told["places"] == {"a": [[0, 16, 0, 8]], "c": [[0, 64, 0, 3]]}
    assert told["handles"] == [IN_PLACE.handles[0].to_json()]
    share(sender, rank, plan, known=(told["name"],))
    assert len(segments(rank)) == 1
    share(sender, rank, plan)  # the rank has let go of it
    share(sender, rank, in_place_plan(sender, named, [True, False, False]))
    share(sender, rank, in_place_plan(sender, named, [False] * 3))
    assert segments(rank)[:2] == [told, told]
    assert len(segments(rank)) == 3 and segments(rank)[2]["name"] != told["name"]


def test_a_bucket_that_another_engine_may_have_open_is_kept(rank: Rank) -> None:
    """Its begin was refused, so it did not let go."""
    sender = Sender(layout())
    named = weights(a=(8,), b=(8,))
    some, whole = (in_place_plan(sender, named, flags) for flags in ([True, False], [True, True]))
    for engine in ("one", "two"):
        sender.join(engine)
    share(sender, rank, some, users=("one", "two"))
    bucket = sender._bucket
    assert bucket is not None
    share(sender, rank, whole, users=("one",))
    assert bucket.close.alive
    assert share(sender, rank, whole, users=("one", "two")) is None
    assert not bucket.close.alive and sender._bucket is None


# -- how many slots a bucket has


@pytest.mark.parametrize(
    ("gpus", "device", "slots"),
    [
        pytest.param((GPU,), CUDA[0], 1, id="the same GPU"),
        pytest.param((GPU, GPU), CUDA[0], 1, id="two ranks on the same GPU"),
        pytest.param((GPU,), CUDA[1], 2, id="another GPU"),
        pytest.param((GPU, "another"), CUDA[0], 2, id="the same GPU and another"),
        pytest.param((GPU,), None, 2, id="host memory"),
        pytest.param((), None, 2, id="an engine on a CPU"),
        pytest.param((GPU,), torch.device("cuda", 2), 2, id="a GPU that does not tell its name"),
    ],
)
def test_a_bucket_has_one_slot_where_one_gpu_fills_and_writes_it(
    gpus: tuple[str, ...],
    device: torch.device | None,
    slots: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole of it is then one chunk."""

    def name_of(index: int) -> str:
        if index > 1:
            raise CudaMemoryError("the driver did not start")
        return (GPU, "another")[index]

    monkeypatch.setattr(carriers, "gpu_uuid", name_of)
    plan = plan_for(Sender(layout(gpus)), weights(a=(4, 4)), device)
    assert (plan.manifest.slots, plan.manifest.chunk_bytes) == (slots, BUCKET_BYTES // slots)
    assert plan.manifest.bucket_bytes == BUCKET_BYTES


def test_shards_that_were_looked_at_in_part_are_none() -> None:
    """An interrupt in between must not leave the pieces of others with their memory."""
    way, named = in_place.OfShards(layout((GPU,)), are_codes=False), weights(a=(4, 4), b=(4, 4))
    before, after = (
        cast(Shards, SimpleNamespace(gpus={GPU}, pieces=lambda *_: ["a"])) for _ in "12"
    )
    assert way.choose(named, None, before, ()) == {0, 1}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(after, "pieces", Mock(side_effect=KeyboardInterrupt))
        way.choose(named, None, after, ())
    assert way.found == frozenset()
    assert way.choose(named, None, after, ()) == {0, 1}
