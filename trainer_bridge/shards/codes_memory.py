"""Memory for the FP8 codes and scales of some weights, and what quantizes them into it.

Shape suffixes: N output features, K input features; n, k = N, K in blocks of 128. Weights of
experts have a dimension of experts before them.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count
from typing import Any, NamedTuple

import torch

from sgl_fp8rl.formats import QUANTIZED
from sgl_fp8rl.formats.copies import Placed, Scales, describe_copy
from sgl_fp8rl.formats.weight_format import TensorSpec, WeightFormat
from sgl_fp8rl.ops.copy_descriptors import CopyDescriptor
from sgl_fp8rl.ops.regions import strides_of, whole

(SUFFIX,) = QUANTIZED.suffixes
_ALIGNMENT = 256
"""Bytes, as the device's allocations are aligned."""


class Codes(NamedTuple):
    """A quantized weight."""

    codes_NK: torch.Tensor
    scale_inv_nk: torch.Tensor


class CodesMemory:
    """Codes and scales of some weights at addresses that stay: engines read them in place.

    Args:
        weights: on one device; their values are not read.
        dtype: the engine's, to which weights are rounded before they are quantized.
        allocate: makes the memory, uint8, by default torch's.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        dtype: torch.dtype,
        allocate: Callable[[int, torch.device], torch.Tensor] | None = None,
        format_: WeightFormat = QUANTIZED,
    ) -> None:
        self._dtype, self._of, self._format = dtype, _kinds(weights), format_
        self._launches: list[Any] = []
        self._status: Any = None
        self._bases: Any = None
        specs = [
            [TensorSpec(QUANTIZED.dtypes[0], tuple(weight.shape)), *companions.values()]
            for weight in weights
            for companions in (QUANTIZED.companions(tuple(weight.shape)),)
        ]
        sizes = [-(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT for each in specs for spec in each]
        with torch.inference_mode(False):  # it is read inside and outside of inference mode
            device = weights[0].device
            if allocate is None:
                memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
            else:
                memory = allocate(sum(sizes), device)
            parts = iter(memory.split(sizes))
            self.codes = [
                Codes(*(next(parts)[: s.nbytes].view(s.dtype).view(s.shape) for s in each))
                for each in specs
            ]

    def fits(self, weights: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
        """Whether it is the memory for such weights."""
        return (self._of, self._dtype) == (_kinds(weights), dtype)

    @torch.no_grad()
    def write(self, weights: Sequence[torch.Tensor]) -> None:
        """Quantize weights into it.

        Raises:
            ValueError: one holds NaN or Inf; on a GPU, ``bad`` tells it.
        """
        if weights[0].is_cuda:
            self.launch([weight.contiguous() for weight in weights])
            return
        for weight, codes in zip(weights, self.codes, strict=True):
            encoded = self._format.encode(weight.to(self._dtype))
            codes.codes_NK.copy_(encoded[""])
            codes.scale_inv_nk.copy_(encoded[SUFFIX])

    def launch(self, weights: Sequence[torch.Tensor] | None = None) -> None:
        """The same on a GPU, behind what is on its current stream: a few launches for all.

        Args:
            weights: contiguous, at multiples of 16 bytes; by default what lies where those of the
                last call lay.
        """
        from sgl_fp8rl.ops.weight_quant_triton import Status, bases_at, compile_descriptors

        if weights is not None:
            device = weights[0].device
            if self._status is None:
                copies = chain.from_iterable(map(self._copies, count(), weights, self.codes))
                self._launches = compile_descriptors(copies, device, self._dtype)
                with torch.inference_mode(False):  # as above
                    self._status = Status(device)
            self._bases = bases_at([weight.data_ptr() for weight in weights], device)
        for launch in self._launches:
            launch.run(self._bases, self._status)

    def restart(self) -> None:
        """Forget what ``bad`` would tell of launches before."""
        if self._status is not None:
            self._status.reset()

    def bad(self) -> int | None:
        """The first weight that held NaN or Inf, once the launches have ended."""
        bad, tiles = self._status.read()
        if bad is None and tiles != self._status.started:
            raise RuntimeError(
                f"{tiles} of {self._status.started} blocks were quantized; report this"
            )
        return bad  # type: ignore[no-any-return]

    def _copies(self, number: int, weight: torch.Tensor, codes: Codes) -> Iterator[CopyDescriptor]:
        source, target, scales = (
            Placed(address, tensor.dtype, strides_of(tuple(tensor.shape)))
            for address, tensor in ((0, weight), *((part.data_ptr(), part) for part in codes))
        )
        box, scales_box = whole(tuple(weight.shape)), whole(tuple(codes.scale_inv_nk.shape))
        to = Scales(scales, scales_box)
        power_of_two = self._format.power_of_two_scales
        return describe_copy(
            *(source, box, target, box, to), segment=number, tag=number, power_of_two=power_of_two
        )


def _kinds(weights: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(weight.shape, weight.dtype, weight.device) for weight in weights]
