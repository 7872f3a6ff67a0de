"""What a trainer sends: planned once from names, shapes and dtypes, replayed at each update."""

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import NamedTuple

import torch

from sgl_fp8rl.formats import DTYPES, QUANTIZED
from sgl_fp8rl.formats.weight_format import WEIGHT_DTYPES, TensorSpec, WeightFormat
from sgl_fp8rl.ops.copy_descriptors import ACCESS
from sgl_fp8rl.protocol.chunks import ChunkSlice, Cutter, cut_into_chunks
from sgl_fp8rl.protocol.manifest import SLOTS, Manifest, describe
from trainer_bridge.sources.parameters import PLAIN, Source

_DTYPES = frozenset(DTYPES.values())


class Span(NamedTuple):
    """Contiguous elements of a parameter that go to one place in the bucket."""

    chunk: int
    name: str
    """The HF tensor, or the first of several."""
    start: int
    """First element in the parameter."""
    length: int
    """Elements."""
    offset: int
    """Bytes from the start of the bucket."""
    scales: int = -1
    """Where its scales go, in bytes from the start of the bucket; -1 where it is sent as it is."""


class TransferPlan:
    """The manifest of an update, and how its chunks are filled.

    Args:
        mapped: which sources the engine reads in place.
        quantized: HF tensors that are quantized on the way into the bucket, and their format.
        resident: sources whose ``read`` is the trainer's own memory on its GPU, aligned.
        streamed: the order is not known: each source is planned as it comes, by ``add``.
        slots: of the bucket.
        coded: mapped sources that are read as codes and scales, which the trainer's ranks made.

    Raises:
        ManifestError: a name comes twice, an update cannot carry a dtype, or the bucket is
            too small.
    """

    def __init__(
        self,
        sources: list[Source],
        mapped: list[bool],
        chunk_bytes: int,
        quantized: Mapping[str, WeightFormat] | None = None,
        resident: Collection[int] = (),
        streamed: bool = False,
        slots: int = Manifest.slots,
        coded: Collection[int] = (),
        codes: str | None = None,
    ) -> None:
        self.sources = sources
        self.quantized = quantized or {}
        self.mapped = mapped
        self.coded = frozenset(coded)
        self.resident = frozenset(resident)
        self.offsets: dict[str, tuple[int, int]] = {}
        """(index of the source, bytes from its start) of each mapped HF tensor; of codes and their
        scales, which lie elsewhere, the first alone counts."""
        self.views: dict[str, tuple[int, torch.Tensor]] = {}
        """(index of the source, meta view of it) of each HF tensor."""
        announced: list[tuple[str, torch.Tensor]] = []
        for index, source in enumerate(sources):
            dtype = source.dtype if mapped[index] else source.sent_as
            for name, view in source.announce(dtype):
                assert view.is_contiguous(), f"{name} is not a contiguous part of its parameter"
                self.views[name] = index, view
                if index in self.coded:
                    pair = _encoded(name, view, QUANTIZED)
                    self.offsets |= {part: (index, 0) for part, _ in pair}
                    announced += pair
                    continue
                if mapped[index]:
                    self.offsets[name] = index, int(view.storage_offset()) * dtype.itemsize
                elif name in self.quantized and dtype in WEIGHT_DTYPES:
                    announced += _encoded(name, view, self.quantized[name])
                    continue
                announced.append((name, view))
        self.manifest = describe(announced, chunk_bytes, self.offsets, streamed, slots, codes)
        self._cutter = Cutter(self.manifest) if streamed else None
        self.chunks = self._cutter.chunks if self._cutter else cut_into_chunks(self.manifest)
        self.spans: list[list[Span]] = [[] for _ in sources]
        """What becomes of each source, in the order of the chunks."""
        self.turns: list[tuple[int, int]] = []
        """(Chunk, source) in the order in which the bucket is filled: scales that are a source of
        their own are due before the rest of their codes."""
        self.last_turns: dict[int, int] = {}
        """Index of the last turn of each source."""
        self._added = 0
        """Sources that a stream has brought."""
        self._taken: set[tuple[int, int]] = set()
        for number in range(len(self.chunks)):
            self._take_turns(number, 0)

    @cached_property
    def is_resident(self) -> bool:
        """Whether all that passes through the bucket is resident."""
        return all(m or i in self.resident for i, m in enumerate(self.mapped))

    @property
    def senders(self) -> int:
        """How many ranks each fill chunks of their own."""
        return max(self.manifest.slots // SLOTS, 1)

    @property
    def streamed(self) -> bool:
        """Whether sources are planned as they come."""
        return self._cutter is not None

    def add(self, source: int) -> list[str]:
        """Plan the source that comes next in a stream.

        Returns:
            The HF tensors that now have their place in the bucket, in its order.
        """
        cutter, last = self._cutter, max(len(self.chunks) - 1, 0)
        assert cutter is not None
        names = [name for name, _ in self.sources[source].cuts]
        self._added += 1
        start = len(self.chunks[last]) if self.chunks else 0
        names = [name for name in names if name in cutter.due]  # scales are due with their codes
        for name in names:
            cutter.add(name)
        for number in range(last, len(self.chunks)):
            self._take_turns(number, start if number == last else 0)
        return names

    def _take_turns(self, number: int, start: int) -> None:
        """Plan the slices of a chunk from ``start`` on."""
        slices = self.chunks[number][start:]
        for chunk_slice, behind in zip(slices, [*slices[1:], None], strict=False):
            if chunk_slice.offset >= 0 and chunk_slice.name in self.views:
                index, view = self.views[chunk_slice.name]
                made_here = view.dtype not in self.manifest.format_of(chunk_slice.name).dtypes
                scales = behind.offset if made_here and behind is not None else -1
                self._add_span(number, chunk_slice, scales)
                if (number, index) not in self._taken:
                    self._taken.add((number, index))
                    self.last_turns[index] = len(self.turns)
                    self.turns.append((number, index))

    @property
    def sent(self) -> tuple[int, int]:
        """HF tensors and bytes that an update by this plan has brought."""
        if not self.streamed:
            return len(self.views), self.manifest.nbytes
        names = {chunk_slice.name for chunk in self.chunks for chunk_slice in chunk}
        return self._added, sum(self.manifest.tensors[name].nbytes for name in names)

    def extent(self, chunk: int) -> tuple[int, int]:
        """Where a chunk lies in the bucket: offset and size in bytes."""
        slices = [each for each in self.chunks[chunk] if each.offset >= 0]
        if not slices:
            return 0, 0
        first, last = slices[0], slices[-1]
        spec = self.manifest.tensors[last.name]
        rows = spec.shape[0] if spec.shape else 1
        size = spec.nbytes // max(rows, 1) * (last.rows[1] - last.rows[0])
        return first.offset, last.offset + size - first.offset

    @cached_property
    def mapped_bytes(self) -> int:
        """Payload that the engine reads in place."""
        return sum(self.manifest.tensors[name].nbytes for name in self.offsets)

    def _add_span(self, chunk: int, chunk_slice: ChunkSlice, scales: int) -> None:
        index, view = self.views[chunk_slice.name]
        row_numel = view.numel() // (view.shape[0] if view.dim() else 1)
        start = int(view.storage_offset()) + chunk_slice.rows[0] * row_numel
        length = (chunk_slice.rows[1] - chunk_slice.rows[0]) * row_numel
        spans, size = self.spans[index], self.sources[index].sent_as.itemsize
        if spans and scales < 0 and spans[-1].scales < 0:
            last = spans[-1]
            follows = last.start + last.length == start and last.chunk == chunk
            if follows and last.offset + last.length * size == chunk_slice.offset:
                spans[-1] = last._replace(length=last.length + length)
                return
        spans.append(Span(chunk, chunk_slice.name, start, length, chunk_slice.offset, scales))


def _encoded(
    name: str, view: torch.Tensor, format_: WeightFormat
) -> list[tuple[str, torch.Tensor]]:
    """The codes and companions that a weight is sent as, as meta tensors."""
    specs = {"": TensorSpec(format_.dtypes[0], tuple(view.shape))}
    specs |= format_.companions(tuple(view.shape))
    return [
        (name + suffix, torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
        for suffix, spec in specs.items()
    ]


def can_be_mapped(tensor: torch.Tensor) -> bool:
    """Whether an engine on the same host could read this tensor in place."""
    plain = type(tensor) in PLAIN
    return plain and tensor.dtype in _DTYPES and tensor.is_cuda and tensor.is_contiguous()


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether the kernel can take its address as a base; a view into a flat buffer may not be."""
    return tensor.data_ptr() % ACCESS == 0
