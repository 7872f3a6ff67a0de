"""Chunks: trainer and engine cut alike, and every row of every tensor lies in exactly one slice."""

import json
import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_fp8rl.formats.weight_format import WEIGHT_DTYPES, TensorSpec
from sgl_fp8rl.protocol.chunks import ALIGNMENT, ChunkSlice, cut_into_chunks
from sgl_fp8rl.protocol.manifest import CHUNK_ALIGNMENT, Manifest, ManifestError
from tests.sgl_fp8rl.receiver.toy import BF16, FP8

sizes = st.integers(1, 300)
shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(1, 5000)),
    st.tuples(sizes, sizes),
    st.tuples(st.integers(1, 6), st.integers(1, 40), st.integers(1, 40)),
)
names = st.text("abc.é☃", min_size=1, max_size=3)


@st.composite
def manifests(draw: st.DrawFn, min_lines: int = 1) -> Manifest:
    """Weights, and codes with scales, some of them mapped."""
    tensors = draw(
        st.dictionaries(names, st.builds(TensorSpec, st.sampled_from(WEIGHT_DTYPES), shapes))
    )
    for name in draw(st.lists(names, unique=True, max_size=2)):
        lead, rows, cols = draw(st.sampled_from([(), (3,), (30,)])), draw(sizes), draw(sizes)
        if lead:
            rows, cols = -(-rows // 8), -(-cols // 8)  # a few experts in a chunk
        tensors[name] = TensorSpec(FP8, (*lead, rows, cols))
        blocks = (*lead, -(-rows // 128), -(-cols // 128))
        tensors[f"{name}_scale_inv"] = TensorSpec(torch.float32, blocks)
    order = draw(st.permutations(list(tensors)))
    mapped = draw(st.sets(st.sampled_from(order))) if order else set()
    lines = draw(st.integers(min_lines, 1200))
    tensors = {name: tensors[name] for name in order}
    slots = draw(st.integers(1, 2))
    return Manifest(tensors, CHUNK_ALIGNMENT * lines, frozenset(mapped), slots=slots)


def start_of(manifest: Manifest, index: int) -> int:
    """Where in the bucket the slot of a chunk begins."""
    return index % manifest.slots * manifest.chunk_bytes


LARGE = 601
"""Lines of 256 bytes: 128 rows of the widest FP32 matrix that is drawn, and more."""


def rows_of(spec: TensorSpec) -> int:
    return spec.shape[0] if spec.shape else 1


def step_of(manifest: Manifest, name: str) -> int:
    """Rows that stay together."""
    return 128 if len(manifest.tensors[name].shape) == 2 else 1


def nbytes_of(manifest: Manifest, chunk_slice: ChunkSlice) -> int:
    spec = manifest.tensors[chunk_slice.name]
    start, stop = chunk_slice.rows
    return (stop - start) * math.prod(spec.shape[1:]) * spec.dtype.itemsize


@given(manifests(LARGE))
def test_every_row_is_in_one_piece_and_blocks_stay_whole(manifest: Manifest) -> None:
    seen: Counter[tuple[str, int]] = Counter()
    for chunk in cut_into_chunks(manifest):
        assert chunk
        for name, (start, stop), _ in chunk:
            assert start < stop
            seen.update((name, row) for row in range(start, stop))
            if codes_of(manifest, name) is None:  # else they follow their codes
                step, length = step_of(manifest, name), rows_of(manifest.tensors[name])
                assert start % step == 0
                assert stop % step == 0 or stop == length
    assert seen == Counter(
        (name, row) for name, spec in manifest.tensors.items() for row in range(rows_of(spec))
    )


def in_bucket(manifest: Manifest) -> list[list[ChunkSlice]]:
    chunks = cut_into_chunks(manifest)
    return chunks[:-1] if manifest.mapped else chunks


@given(manifests(LARGE))
def test_pieces_lie_apart_in_the_slot_of_their_part(manifest: Manifest) -> None:
    for index, chunk in enumerate(in_bucket(manifest)):
        end = start_of(manifest, index)
        for chunk_slice in chunk:
            assert chunk_slice.name not in manifest.mapped
            assert chunk_slice.offset % ALIGNMENT == 0
            assert chunk_slice.offset >= end
            end = chunk_slice.offset + nbytes_of(manifest, chunk_slice)
        assert end <= start_of(manifest, index) + manifest.chunk_bytes <= manifest.bucket_bytes


def codes_of(manifest: Manifest, name: str) -> str | None:
    """The codes that these scales travel with."""
    codes = name.removesuffix("_scale_inv")
    return codes if manifest.is_companion(name) and codes not in manifest.mapped else None


def scale_rows(manifest: Manifest, codes: str, rows: tuple[int, int]) -> tuple[int, int]:
    """One for 128 rows of a matrix; an expert has its own."""
    step = step_of(manifest, codes)
    return rows[0] // step, -(-rows[1] // step)


@given(manifests(LARGE))
def test_tensors_come_in_order_with_scales_right_behind_their_codes(manifest: Manifest) -> None:
    order, keys = list(manifest.tensors), []
    for chunk in in_bucket(manifest):
        for before, chunk_slice in zip([None, *chunk], chunk, strict=False):
            codes = codes_of(manifest, chunk_slice.name)
            if codes is None:
                keys.append((order.index(chunk_slice.name), chunk_slice.rows[0]))
                continue
            assert before is not None
            assert before.name == codes
            assert chunk_slice.rows == scale_rows(manifest, codes, before.rows)
    assert keys == sorted(keys)


@given(manifests(LARGE))
def test_parts_are_full(manifest: Manifest) -> None:
    """What comes next did not fit: a row block, and its scales with their alignment."""
    chunks = in_bucket(manifest)
    for index, (chunk, following) in enumerate(pairwise(chunks)):
        end = chunk[-1].offset + nbytes_of(manifest, chunk[-1]) - start_of(manifest, index)
        free = manifest.chunk_bytes - -(-end // ALIGNMENT) * ALIGNMENT
        after = following[0]
        rows = min(step_of(manifest, after.name), after.rows[1] - after.rows[0])
        assert block_bytes(manifest, after.name, rows) > free


def block_bytes(manifest: Manifest, name: str, rows: int) -> int:
    """Bytes that the first rows of a tensor need at most."""
    size = nbytes_of(manifest, ChunkSlice(name, (0, rows), 0))
    scales = f"{name}_scale_inv"
    if manifest.tensors[name].dtype == FP8 and scales not in manifest.mapped:
        size += ALIGNMENT
        size += nbytes_of(manifest, ChunkSlice(scales, scale_rows(manifest, name, (0, rows)), 0))
    return size


@given(manifests(LARGE))
def test_what_is_mapped_is_the_last_chunk_and_whole(manifest: Manifest) -> None:
    chunks = cut_into_chunks(manifest)
    whole = [
        ChunkSlice(name, (0, rows_of(spec)), -1)
        for name, spec in manifest.tensors.items()
        if name in manifest.mapped
    ]
    assert [p for chunk in chunks for p in chunk if p.name in manifest.mapped] == whole
    if whole:
        assert chunks[-1] == whole


@given(manifests())
def test_a_bucket_is_refused_only_where_a_row_block_does_not_fit(manifest: Manifest) -> None:
    cut_alone = [
        name
        for name in manifest.tensors
        if name not in manifest.mapped and codes_of(manifest, name) is None
    ]
    needed = {}
    for name in cut_alone:
        rows = min(step_of(manifest, name), rows_of(manifest.tensors[name]))
        needed[name] = rows, block_bytes(manifest, name, rows)
    too_large = {n: need for n, need in needed.items() if need[1] > manifest.chunk_bytes}
    try:
        cut_into_chunks(manifest)
    except ManifestError as error:
        assert any(
            f"{rows} rows of {name} need {size} bytes" in str(error)
            for name, (rows, size) in too_large.items()
        )
    else:
        # a whole tensor may just fit without what its alignment costs at most
        assert all(size - ALIGNMENT <= manifest.chunk_bytes for _, size in needed.values())
        assert all(manifest.tensors[name].dtype == FP8 for name in too_large)


@given(manifests(LARGE))
def test_both_sides_cut_alike(manifest: Manifest) -> None:
    received = manifest
    if manifest.tensors:
        received = Manifest.from_json(json.loads(json.dumps(manifest.to_json())))
    assert received == manifest
    assert cut_into_chunks(received) == cut_into_chunks(manifest)
    assert received.fingerprint == manifest.fingerprint


BASE = Manifest(
    {
        "w": TensorSpec(BF16, (256, 128)),
        "v": TensorSpec(BF16, (128, 256)),
        "n": TensorSpec(torch.float32, (128,)),
    },
    1 << 16,
    frozenset({"n"}),
)
W, V, N = BASE.tensors.values()

CHANGES: dict[str, dict[str, Any]] = {
    "order": {"tensors": {"v": V, "w": W, "n": N}},
    "name": {"tensors": {"w": W, "x": V, "n": N}},
    "dtype": {"tensors": {"w": W, "v": TensorSpec(torch.float16, V.shape), "n": N}},
    "shape": {"tensors": {"w": W, "v": W, "n": N}},
    "one less": {"tensors": {"w": W, "n": N}},
    "slot of the bucket": {"chunk_bytes": 1 << 17},
    "slots of the bucket": {"slots": 1},
    "nothing mapped": {"mapped": frozenset()},
    "more mapped": {"mapped": frozenset({"n", "w"})},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_a_fingerprint(change: dict[str, Any]) -> None:
    assert replace(BASE, **change).fingerprint != BASE.fingerprint


def test_a_worked_example() -> None:
    """[300, 100] BF16: 128 rows are 25,600 bytes; 44 rows and a vector share what is left."""
    tensors = {"w": TensorSpec(BF16, (300, 100)), "n": TensorSpec(BF16, (10000,))}
    half = 25_600
    assert cut_into_chunks(Manifest(tensors, half)) == [
        [ChunkSlice("w", (0, 128), 0)],
        [ChunkSlice("w", (128, 256), half)],
        [ChunkSlice("w", (256, 300), 0), ChunkSlice("n", (0, 8384), 8832)],
        [ChunkSlice("n", (8384, 10000), half)],
    ]
    assert cut_into_chunks(Manifest(tensors, 2 * half, slots=1)) == [
        [ChunkSlice("w", (0, 256), 0)],
        [ChunkSlice("w", (256, 300), 0), ChunkSlice("n", (0, 10000), 8832)],
    ]


def test_a_worked_example_with_scales() -> None:
    """Of [300, 200] codes 128 rows are 25,600 bytes, and a row of scales 8."""
    tensors = {
        "w_scale_inv": TensorSpec(torch.float32, (3, 2)),
        "n": TensorSpec(BF16, (4,)),
        "w": TensorSpec(FP8, (300, 200)),
    }
    half = 25_600 + 256
    assert cut_into_chunks(Manifest(tensors, half)) == [
        [
            ChunkSlice("n", (0, 4), 0),
            ChunkSlice("w", (0, 128), 64),
            ChunkSlice("w_scale_inv", (0, 1), 25_664),
        ],
        [ChunkSlice("w", (128, 256), half), ChunkSlice("w_scale_inv", (1, 2), half + 25_600)],
        [ChunkSlice("w", (256, 300), 0), ChunkSlice("w_scale_inv", (2, 3), 8_832)],
    ]
