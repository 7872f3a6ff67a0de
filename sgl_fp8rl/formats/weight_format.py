"""What a weight format is: how an engine stores a weight, and what travels with an update; and that
of weights that stay as they are."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from sgl_fp8rl.ops.regions import Region

NOT_FINITE = (
    "holds NaN or Inf, or numbers too large for FP8 with a scale up to 2**48; check the trainer's "
    "weights before the update"
)
NOT_POSITIVE = (
    "holds a scale that is not a positive number up to 2**48; check the trainer's quantization, "
    "and send a positive number for a block of zeros"
)
NOT_POWERS = (
    "holds a scale that is not a power of two up to 2**48; round amax / 448 up to one before the "
    "weight is divided by it, or send it unquantized"
)
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What a trainer holds weights in; each can be encoded in any format."""
FP8_CAPABILITY = (8, 9)
"""From Ada on there are FP8 tensor cores."""
Encoded = dict[str, torch.Tensor]
"""A weight in a format: its codes under the suffix ``""``, its companions under theirs."""


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightFormat(ABC):
    """A weight is stored as codes under its own name. Companions, such as scales, lie beside it
    under that name and a suffix; codes and companions are cut at the same rows.

    ``tests/sgl_fp8rl/formats/test_conformance.py`` is what every format must pass.
    """

    name: ClassVar[str]
    dtypes: ClassVar[tuple[torch.dtype, ...]]
    """Dtypes that codes can have, and those of no other format but a variant's. Those of companions
    are among those of all formats."""
    headers: ClassVar[tuple[str, ...]]
    """Names of ``dtypes`` in the headers of safetensors files."""
    suffixes: ClassVar[tuple[str, ...]] = ()
    """Suffixes of the companions: one of a quantized format, for which a copy descriptor has its
    fields, and none of ``UNQUANTIZED``."""
    block: ClassVar[tuple[int, int]] = (1, 1)
    """Rows and columns that share an element of a companion: a matrix may be cut at multiples."""
    capability: ClassVar[tuple[int, int]] = (0, 0)
    """The least compute capability of GPUs whose kernels take it."""
    power_of_two_scales: ClassVar[bool] = False
    """Whether scales of weights and activations are rounded up to powers of two. Codes of such a
    variant are told by ``mark``, not by their dtype, which is that of another format."""
    checkpoint: ClassVar[Mapping[str, Any]] = {}
    """What readers of a checkpoint in the format look for in its ``quantization_config``, but for
    the list of layers that are not in it."""

    def why_not_on(self, capability: tuple[int, int]) -> str | None:
        """Why a GPU of this compute capability has no kernels for it."""
        if capability >= self.capability:
            return None
        return f"{self.name} needs SM {self.capability[0]}.{self.capability[1]} or newer"

    @abstractmethod
    def companions(self, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        """The companions of codes of this shape, by suffix.

        Raises:
            ValueError: a tensor of this shape cannot be in the format.
        """

    @abstractmethod
    def companion_region(self, suffix: str, region: Region) -> Region:
        """The box of a companion that belongs to a box of the codes."""

    @abstractmethod
    def refusal(self, rows: Sequence[int], cols: int) -> str | None:
        """Why a layer is not whole blocks, or None if it is.

        Args:
            rows: of each matrix that is stacked into the layer, on this rank.
        """

    def cover(self, region: Region, shape: tuple[int, ...]) -> Region:
        """The whole blocks of a tensor that a box has elements of: it is encoded with them."""
        around = list(region)
        for i, side in zip((-1, -2)[: len(region)], self.block[::-1], strict=False):
            start, stop = region[i]
            around[i] = start // side * side, min(-(-stop // side) * side, shape[i])
        return tuple(around)

    def cover_copy(self, src: Region, dst: Region, shape: tuple[int, ...]) -> tuple[Region, Region]:
        """``cover`` of a box of a tensor of this shape, and where that goes with a copy to ``dst``;
        the last two dimensions of both are those of blocks."""
        cover, target = self.cover(src, shape), list(dst)
        for i in range(-min(len(src), 2), 0):
            if cover[i] != src[i]:
                target[i] = dst[i][0] + cover[i][0] - src[i][0], dst[i][1] + cover[i][1] - src[i][1]
        return cover, tuple(target)

    def stored_blocks(
        self, src: Region, dst: Region, source: tuple[int, ...], stored: tuple[int, ...]
    ) -> Region | None:
        """The blocks of storage that a copy writes to, or None where they are not its source's.

        Args:
            source, stored: shapes of the whole tensor and of the storage.
        """
        _, target = self.cover_copy(src, dst, source)
        blocks = self.cover(target, stored)
        starts_apart = any(a[0] != b[0] for a, b in zip(target, blocks, strict=True))
        ends_outside = any(stop > size for (_, stop), size in zip(target, stored, strict=True))
        return None if starts_apart or ends_outside else blocks

    def check_cut(self, name: str, region: Region, shape: tuple[int, ...]) -> None:
        """Raise ValueError if a box of a tensor cuts what shares a companion's element."""
        whole = self.cover(region, shape)
        if whole != region:
            (start, stop), size = next(
                (a, n) for a, b, n in zip(region, whole, shape, strict=True) if a != b
            )
            rows, cols = self.block
            raise ValueError(
                f"a piece of {name} cuts a {rows}x{cols} block at {start}:{stop} of {size}; cut it "
                f"where blocks end"
            )

    @abstractmethod
    def encode(self, weight: torch.Tensor) -> Encoded:
        """The reference implementation of the kernel: the weight's codes and companions.

        Args:
            weight: in one of ``WEIGHT_DTYPES``, ``[..., N, K]``.

        Raises:
            ValueError: it holds NaN or Inf, or numbers that are too large.
        """

    @abstractmethod
    def decode(self, encoded: Encoded) -> torch.Tensor:
        """The weight that an engine computes with, FP32."""

    @abstractmethod
    def check_values(self, suffix: str, values: torch.Tensor) -> None:
        """Check codes (suffix ``""``) or a companion that a trainer sent.

        Raises:
            ValueError: a value that none of ``encode``'s results has.
        """


class Unquantized(WeightFormat):
    """A layer that stays in the model's dtype, and every tensor that is not a layer's weight."""

    name = "bf16"
    dtypes = WEIGHT_DTYPES
    headers = ("BF16", "F16", "F32")

    def companions(self, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        return {}

    def companion_region(self, suffix: str, region: Region) -> Region:
        raise ValueError(f"an unquantized weight has no companion {suffix}")

    def refusal(self, rows: Sequence[int], cols: int) -> str | None:
        return None

    def encode(self, weight: torch.Tensor) -> Encoded:
        self.check_values("", weight)
        return {"": weight}

    def decode(self, encoded: Encoded) -> torch.Tensor:
        return encoded[""].float()

    def check_values(self, suffix: str, values: torch.Tensor) -> None:
        if not bool(torch.isfinite(values).all()):
            raise ValueError(NOT_FINITE)
