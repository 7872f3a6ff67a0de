"""What a trainer sends: planned once from names, shapes and dtypes, replayed at each update."""

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import NamedTuple

import torch

from sgl_fp8rl.formats import DTYPES
from sgl_fp8rl.formats.weight_format import WEIGHT_DTYPES, TensorSpec, WeightFormat
from sgl_fp8rl.ops.copy_descriptors import ACCESS
from sgl_fp8rl.protocol.chunks import ChunkSlice, cut_into_chunks
from sgl_fp8rl.protocol.manifest import describe
from trainer_bridge.fsdp import Source

Signature = tuple[
    str | None,
    torch.device | None,
    tuple[tuple[str, torch.dtype, torch.Size, bool, bool, bool], ...],
]
"""Family and GPU; name, dtype, shape, whether sharded, resident and mapped, of each parameter."""


class Run(NamedTuple):
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
    ) -> None:
        self.sources = sources
        self.mapped = mapped
        self.resident = frozenset(resident)
        self.offsets: dict[str, tuple[int, int]] = {}
        """(index of the source, bytes from its start) of each mapped HF tensor."""
        self.views: dict[str, tuple[int, torch.Tensor]] = {}
        """(index of the source, meta view of it) of each HF tensor."""
        announced: list[tuple[str, torch.Tensor]] = []
        for index, source in enumerate(sources):
            dtype = source.held_as if mapped[index] else source.sent_as
            for name, view in source.announce(dtype):
                assert view.is_contiguous(), f"{name} is not a contiguous part of its parameter"
                self.views[name] = index, view
                if mapped[index]:
                    self.offsets[name] = index, int(view.storage_offset()) * dtype.itemsize
                elif quantized and name in quantized and dtype in WEIGHT_DTYPES:
                    announced += _encoded(name, view, quantized[name])
                    continue
                announced.append((name, view))
        self.manifest = describe(announced, 0, chunk_bytes, self.offsets)
        self.chunks = cut_into_chunks(self.manifest)
        self.runs: list[list[Run]] = [[] for _ in sources]
        """What becomes of each source, in the order of the chunks."""
        turns: dict[tuple[int, int], None] = {}
        for number, chunk in enumerate(self.chunks):
            scales_behind = (*chunk[1:], None)
            for chunk_slice, behind in zip(chunk, scales_behind, strict=True):
                if chunk_slice.offset >= 0 and chunk_slice.name in self.views:
                    held = self.views[chunk_slice.name][1].dtype
                    made_here = held not in self.manifest.format_of(chunk_slice.name).dtypes
                    scales = behind.offset if made_here and behind is not None else -1
                    self._add_run(number, chunk_slice, scales)
                    turns[number, self.views[chunk_slice.name][0]] = None
        self.turns = list(turns)
        """(Chunk, source) in the order in which the bucket is filled: scales that are a source of
        their own are due before the rest of their codes."""
        self.last_turns = {source: turn for turn, (_, source) in enumerate(self.turns)}
        """Index of the last turn of each source."""

    @cached_property
    def mapped_bytes(self) -> int:
        """Payload that the engine reads in place."""
        return sum(self.manifest.tensors[name].nbytes for name in self.offsets)

    def _add_run(self, chunk: int, chunk_slice: ChunkSlice, scales: int) -> None:
        index, view = self.views[chunk_slice.name]
        row_numel = view.numel() // (view.shape[0] if view.dim() else 1)
        start = int(view.storage_offset()) + chunk_slice.rows[0] * row_numel
        length = (chunk_slice.rows[1] - chunk_slice.rows[0]) * row_numel
        runs, size = self.runs[index], self.sources[index].sent_as.itemsize
        if runs and scales < 0 and runs[-1].scales < 0:
            last = runs[-1]
            follows = last.start + last.length == start and last.chunk == chunk
            if follows and last.offset + last.length * size == chunk_slice.offset:
                runs[-1] = last._replace(length=last.length + length)
                return
        runs.append(Run(chunk, chunk_slice.name, start, length, chunk_slice.offset, scales))


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
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return plain and tensor.dtype in DTYPES.values() and tensor.is_cuda and tensor.is_contiguous()


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether the kernel can take its address as a base; a view into a flat buffer may not be."""
    return tensor.data_ptr() % ACCESS == 0
