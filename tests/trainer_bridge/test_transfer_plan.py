"""Plans of what is sent: replayed, they fill chunks with the bytes that the manifest promises."""

import math
import random
from collections.abc import Iterable
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, reject

from sgl_fp8rl.formats import BLOCK_FP8
from sgl_fp8rl.protocol.manifest import ManifestError
from trainer_bridge.sources.parameters import Named, Source, sources
from trainer_bridge.transfer.packer import HostPacker
from trainer_bridge.transfer.transfer_plan import TransferPlan, can_be_mapped
from trainer_bridge.ways.carriers import Bucket

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
FUSED = "l.mlp.experts.gate_up_proj"


def plan_of(
    named: Named, chunk_bytes: int, mapped: Iterable[str] = (), family: str | None = "qwen3_moe"
) -> TransferPlan:
    """The plan of a trainer whose engine is BF16."""
    mapped = set(mapped)
    is_mapped = [name in mapped for name, _ in named]
    return TransferPlan(sources(named, family, BF16), is_mapped, chunk_bytes)


def runs_of(plan: TransferPlan) -> list[list[tuple[int, int, int, int]]]:
    """(Chunk, first element, elements, offset in bytes) of each copy, by source."""
    return [[(s.chunk, s.start, s.length, s.offset) for s in spans] for spans in plan.spans]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def filled(plan: TransferPlan, named: Named) -> list[bytes]:
    """The bucket as it is when each chunk is sent: turns are replayed as an update replays them."""
    bucket = Bucket(plan.manifest.bucket_bytes)
    packer = HostPacker(plan, bucket.content)
    sent: list[bytes] = []
    for chunk, source in plan.turns:
        while len(sent) < chunk:
            sent.append(raw(bucket.content))
        packer.put(source, plan.sources[source].read(named[source][1]), chunk)
    while len(sent) < len(plan.chunks):
        sent.append(raw(bucket.content))
    return sent


def check(plan: TransferPlan, named: Named) -> None:
    """Hold every chunk, and every place of a mapped tensor, against the HF tensors themselves."""
    tensors, held = {}, {}
    for source, (_, tensor) in zip(plan.sources, named, strict=True):
        for name, cut in source.cuts:
            held[name] = cut(tensor)
            tensors[name] = held[name].to(source.sent_as)
    assert plan.manifest.tensors.keys() == tensors.keys()

    seen = dict.fromkeys(tensors, b"")
    for chunk, bucket in zip(plan.chunks, filled(plan, named), strict=True):
        for chunk_slice in chunk:
            if chunk_slice.offset < 0:
                assert chunk_slice.name in plan.offsets
                continue
            tensor = tensors[chunk_slice.name]
            wanted = raw(tensor[slice(*chunk_slice.rows)] if tensor.dim() else tensor)
            assert bucket[chunk_slice.offset : chunk_slice.offset + len(wanted)] == wanted
            seen[chunk_slice.name] += wanted
    for name, (index, start) in plan.offsets.items():
        whole = raw(named[index][1])
        seen[name] = whole[start : start + plan.manifest.tensors[name].nbytes]
        assert plan.manifest.tensors[name].dtype == held[name].dtype
        assert seen[name] == raw(held[name])
    for name in tensors.keys() - plan.offsets.keys():
        assert plan.manifest.tensors[name].dtype == tensors[name].dtype
        assert seen[name] == raw(tensors[name])
    assert plan.manifest.mapped == plan.offsets.keys()
    assert plan.mapped_bytes == sum(held[name].nbytes for name in plan.offsets)
    for source, spans in zip(plan.sources, plan.spans, strict=True):
        assert not (spans and source.cuts[0][0] in plan.offsets), "it is copied too"


# -- any trainer

DTYPES = st.sampled_from([BF16, torch.float16, torch.float32])
SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(1, 700)),
    st.tuples(st.integers(1, 400), st.integers(1, 9)),
)
EXPERTS = st.tuples(st.integers(1, 5), st.integers(1, 70), st.sampled_from([1, 3, 16, 32]))


@st.composite
def trainers(draw: st.DrawFn) -> tuple[Named, list[str]]:
    """Parameters, fused experts and FP8 codes among them, and which of them are mapped."""
    named: Named = []
    for number in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["plain", "gate_up", "down", "codes"]))
        if kind == "codes":
            rows, cols = draw(st.integers(1, 300)), draw(st.integers(1, 140))
            scales = torch.rand(math.ceil(rows / 128), math.ceil(cols / 128))
            named += [
                (f"c{number}", values((rows, cols)).to(FP8)),
                (f"c{number}_scale_inv", scales),
            ]
        elif kind == "plain":
            named.append((f"p{number}", values(draw(SHAPES)).to(draw(DTYPES))))
        else:
            experts, rows, cols = draw(EXPERTS)
            rows *= 2 if kind == "gate_up" else 1
            name = f"l{number}.mlp.experts.{kind}_proj"
            named.append((name, values((experts, rows, cols)).to(draw(DTYPES))))
    return named, draw(st.lists(st.sampled_from([name for name, _ in named]), unique=True))


def values(shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers of which no two neighbours are equal, also in FP8."""
    count = math.prod(shape)
    return (torch.arange(count) % 251 - 125).float().view(shape)


@given(trainers(), st.integers(1, 200))
def test_parts_hold_the_bytes_that_the_manifest_promises(
    trainer: tuple[Named, list[str]], units: int
) -> None:
    """Turns come in the order of the parts, else a chunk would be sent before it is full; no two
    copies could be one."""
    named, mapped = trainer
    try:
        plan = plan_of(named, 256 * units, mapped)
    except ManifestError as refusal:
        if "larger --fp8rl-bucket-bytes" not in str(refusal):
            raise
        reject()
    check(plan, named)
    assert plan.turns == sorted(plan.turns, key=lambda turn: turn[0])
    assert set(plan.turns) == {(s.chunk, i) for i, spans in enumerate(plan.spans) for s in spans}
    assert len(plan.turns) == len(set(plan.turns))
    for index, last in plan.last_turns.items():
        assert [i for _, i in plan.turns[last:]].count(index) == 1
        assert plan.turns[last][1] == index
    for source, spans in zip(plan.sources, plan.spans, strict=True):
        for span, after in pairwise(spans):
            end = span.offset + span.length * source.sent_as.itemsize
            follows = (after.chunk, after.start) == (span.chunk, span.start + span.length)
            assert not (follows and after.offset == end)


def test_tensors_in_another_order_than_in_their_parameter_are_copied_apart() -> None:
    named = [("w", values((4, 32)).to(BF16))]
    cuts = (("late", lambda whole: whole[2:]), ("early", lambda whole: whole[:2]))
    plan = TransferPlan([Source(torch.Size((4, 32)), BF16, BF16, BF16, cuts)], [False], 4096)
    assert runs_of(plan) == [[(0, 64, 64, 0), (0, 0, 64, 128)]]
    check(plan, named)


def test_scales_have_their_turn_beside_their_codes() -> None:
    """Wherever they come in the stream; three chunks of 128 rows here."""
    codes, scales = values((300, 8)).to(FP8), torch.rand(3, 1)
    plan = plan_of([("w", codes), ("w_scale_inv", scales)], 1280)
    assert plan.turns == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    plan = plan_of([("w_scale_inv", scales), ("v", values((4,))), ("w", codes)], 1280)
    assert plan.turns == [(0, 1), (0, 2), (0, 0), (1, 2), (1, 0), (2, 2), (2, 0)]


def test_host_memory_is_not_mapped() -> None:
    assert not can_be_mapped(torch.ones(2, 2))
    assert not can_be_mapped(torch.nn.Parameter(torch.ones(2, 2)))


# -- refused


CLASH = "l.mlp.experts.0.gate_proj.weight"
"""What the fused parameter holds already."""


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ([("w", torch.ones(2, 2)), ("w", torch.ones(2, 2))], "w comes twice"),
        ([(FUSED, torch.ones(1, 2, 2)), (CLASH, torch.ones(2, 2))], f"{CLASH} comes twice"),
        ([("w", torch.ones(2, 2).long())], r"w has dtype torch\.int64"),
        (
            [("w", torch.ones(256, 64, dtype=BF16))],
            r"128 rows of w need 16384 .* --fp8rl-bucket-bytes",
        ),
    ],
)
def test_what_makes_no_plan(named: Named, why: str) -> None:
    with pytest.raises(ManifestError, match=why):
        plan_of(named, 16384 - 256)


def test_a_bucket_that_is_just_large_enough() -> None:
    named = [("w", values((256, 64)).to(BF16))]
    assert len(plan_of(named, 16384).chunks) == 2
    assert runs_of(plan_of(named, 256, ["w"])) == [[]]  # it needs none


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_stream_is_planned_as_if_its_order_had_been_known(seed: int, quantized: bool) -> None:
    """Chunks, spans and turns are those of the plan of the same tensors in the same order."""
    chosen = random.Random(seed)
    named: Named = []
    for i in range(20):
        is_matrix = chosen.random() < 0.7
        shape = (chosen.randint(1, 700), 128 * chosen.randint(1, 3)) if is_matrix else (i + 1,)
        named.append((f"{i}", torch.empty(shape, dtype=BF16 if is_matrix else torch.float32)))
    formats = {name: BLOCK_FP8 for name, t in named if quantized and t.dim() > 1}

    def planned(order: Named, streamed: bool) -> TransferPlan:
        made = sources(order, None, BF16)
        return TransferPlan(made, [False] * len(order), 1 << 18, formats, (), streamed)

    stream = planned(named, True)
    assert stream.chunks == [] and stream.turns == []
    order = chosen.sample(named, len(named))
    told = [name for each, _ in order for name in stream.add([n for n, _ in named].index(each))]
    whole = planned(order, False)
    assert len(whole.chunks) > 3
    assert told == [name for name, _ in order]
    assert stream.chunks == whole.chunks
    index = [[n for n, _ in named].index(name) for name, _ in order]
    assert stream.turns == [(chunk, index[place]) for chunk, place in whole.turns]
    assert [stream.spans[each] for each in index] == whole.spans
    assert stream.last_turns == {index[place]: turn for place, turn in whole.last_turns.items()}
    assert stream.sent[1] == whole.sent[1]
