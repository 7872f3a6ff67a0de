"""Filling the bucket: parameters are copied or quantized into host memory or device memory."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch

from sgl_fp8rl.formats.copies import Placed, Scales, describe_copy
from sgl_fp8rl.formats.weight_format import NOT_FINITE
from sgl_fp8rl.ops.copy_descriptors import CopyDescriptor
from sgl_fp8rl.ops.regions import strides_of, whole
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.transfer.transfer_plan import Span, TransferPlan

if TYPE_CHECKING:
    from sgl_fp8rl.ops.weight_quant_triton import Bases, Launch

ENCODED_AT_ONCE = 1 << 24
"""Elements of a weight that plain torch encodes at once: it takes some 20 bytes for each."""


class Packer:
    """Fills a bucket with parameters, chunk by chunk."""

    def begin(self) -> None:
        """Get ready for another update."""

    def put(self, index: int, whole: torch.Tensor, chunk: int) -> None:
        """Put the elements of a contiguous parameter that one chunk carries into the bucket."""
        raise NotImplementedError

    def complete(self, chunk: int) -> None:
        """Make sure that all of a chunk is in the bucket, or queued to be written there."""

    def finish(self) -> None:
        """Check all that was put in."""


class HostPacker(Packer):
    """Copies parameters into host memory: codes and scales where the plan says so, made in plain
    torch where the parameter lies, and the others as they are, which the engine checks."""

    def __init__(self, plan: TransferPlan, content: torch.Tensor) -> None:
        self._plan, self._content = plan, content

    def put(self, index: int, whole: torch.Tensor, chunk: int) -> None:
        flat, dtype = whole.view(-1), self._plan.sources[index].sent_as
        for span in self._plan.spans[index]:
            if span.chunk == chunk:
                part = flat[span.start :][: span.length].to(dtype)
                if span.scales >= 0:
                    self._encode(span, part)
                else:
                    self._write(span.offset, part)

    def _encode(self, span: Span, weight: torch.Tensor) -> None:
        format_ = self._plan.quantized[span.name]
        row = self._plan.manifest.tensors[span.name].shape[1:]
        (suffix,) = format_.suffixes
        step = format_.block[0] if len(row) == 1 else 1
        step *= max(ENCODED_AT_ONCE // (step * math.prod(row)), 1)
        codes, scales = span.offset, span.scales
        for rows in weight.view(-1, *row).split(step):
            try:
                encoded = format_.encode(rows)
            except ValueError as error:
                raise EngineError(f"{span.name} {error}") from error
            codes = self._write(codes, encoded[""])
            scales = self._write(scales, encoded[suffix])

    def _write(self, offset: int, values: torch.Tensor) -> int:
        """Copy to there; where the next would go."""
        stop = offset + values.numel() * values.itemsize
        self._content[offset:stop].view(values.dtype).copy_(values.view(-1))
        return stop


class QuantizePacker(Packer):
    """Writes codes and scales with the engine's own kernel: half of the bytes, the same ones.

    What is resident waits until its chunk is complete, and then takes a launch for all of it. What
    is gathered or copied first has a launch of its own, so that its memory can be given back.

    Args:
        content: the bucket, uint8, on the GPU.
        dtype: the engine's, to which weights are rounded before they are quantized.

    Raises:
        EngineError: the GPU cannot quantize here.
    """

    def __init__(self, plan: TransferPlan, content: torch.Tensor, dtype: torch.dtype) -> None:
        try:
            from sgl_fp8rl.ops.weight_quant_triton import Status, bases_at, compile_descriptors
        except ImportError as error:
            raise EngineError(
                f"the trainer's GPU cannot quantize without Triton ({error}); pip install triton"
            ) from error

        self._names = list(plan.views)
        tags = {name: tag for tag, name in enumerate(self._names)}
        self._device, self._bases_at = content.device, bases_at
        self._status = Status(self._device)
        self._resident = {index: number for number, index in enumerate(sorted(plan.resident))}
        """The segment of each resident source."""
        self._addresses = [0] * len(self._resident)
        """Of the segments, in this update."""
        self._bases: Bases | None = None
        """What launches take of them, where all are known: one copy to the GPU for all chunks."""
        address = content.data_ptr()

        def descriptors(segment: int, index: int, span: Span) -> Iterator[CopyDescriptor]:
            source = plan.sources[index]
            shape: tuple[int, ...] = (span.length,)
            scales, target, power_of_two = None, source.sent_as, False
            if span.scales >= 0:
                format_ = plan.quantized[span.name]
                power_of_two = format_.power_of_two_scales
                row = plan.manifest.tensors[span.name].shape[1:]
                shape = (span.length // math.prod(row), *row)
                target = plan.manifest.tensors[span.name].dtype
                (spec,) = format_.companions(shape).values()
                placed = Placed(address + span.scales, spec.dtype, strides_of(spec.shape))
                scales = Scales(placed, whole(spec.shape))
            return describe_copy(
                Placed(span.start * source.held_as.itemsize, source.held_as, strides_of(shape)),
                whole(shape),
                Placed(address + span.offset, target, strides_of(shape)),
                whole(shape),
                scales,
                segment=segment,
                tag=tags[span.name],
                power_of_two=power_of_two,
            )

        def alone(chunk: int, index: int) -> "list[Launch]":
            spans = [span for span in plan.spans[index] if span.chunk == chunk]
            those = (each for span in spans for each in descriptors(0, index, span))
            return compile_descriptors(those, self._device, dtype)

        together: dict[int, list[CopyDescriptor]] = defaultdict(list)
        for index, number in self._resident.items():
            for span in plan.spans[index]:
                together[span.chunk] += descriptors(number, index, span)
        self._together: dict[int, list[Launch]] = {
            chunk: compile_descriptors(those, self._device, dtype)
            for chunk, those in together.items()
        }
        self._alone = cache(alone)  # when it comes first: a stream's order is not known before

    def begin(self) -> None:
        self._status.reset()
        self._bases = None

    def put(self, index: int, whole: torch.Tensor, chunk: int) -> None:
        if index in self._resident:
            self._addresses[self._resident[index]] = whole.data_ptr()
        else:
            self._run(self._alone(chunk, index), whole.data_ptr())

    def pack_in_place(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take all that is resident from these, of which one is each source."""
        self._addresses = [tensors[index].data_ptr() for index in self._resident]
        self._bases = self._bases_at(self._addresses, self._device)

    def complete(self, chunk: int) -> None:
        if chunk in self._together:
            bases = self._bases
            if bases is None:
                bases = self._bases_at(self._addresses, self._device)
            self._run(self._together[chunk], bases)

    def finish(self) -> None:
        bad, tiles = self._status.read()
        if bad is not None:
            raise EngineError(f"{self._names[bad]} {NOT_FINITE}")
        if tiles != self._status.started:
            raise EngineError(f"{tiles} of {self._status.started} blocks were written; report this")

    def _run(self, launches: "list[Launch]", bases: "Bases") -> None:
        for launch in launches:
            launch.run(bases, self._status)
