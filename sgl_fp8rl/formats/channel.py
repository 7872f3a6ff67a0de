"""Channel formats: codes, and one FP32 scale for each row (``ops/channel.py``).

An update brings such a weight in BF16, whole rows at a time, and each rank takes the scale from the
whole row, also where it keeps a part of it. So no update carries these codes.
"""

from collections.abc import Sequence

import torch

from sgl_fp8rl.formats.weight_format import (
    FP8_CAPABILITIES,
    LEAST_ROWS,
    NOT_FINITE,
    ROW,
    Encoded,
    TensorSpec,
    WeightFormat,
)
from sgl_fp8rl.ops.channel import dequantize_rows, quantize_rows
from sgl_fp8rl.ops.reference import FP8_DTYPE, LARGEST_SCALE
from sgl_fp8rl.ops.regions import Region

SCALES = "_scale"
"""As SGLang's ``w8a8_fp8`` and ``w8a8_int8`` call them."""
MULTIPLE = 16
"""Of both sides: sgl_kernel's GEMMs read 16 bytes at once."""


class ChannelFormat(WeightFormat):
    """What the two have in common."""

    suffixes = (SCALES,)
    block = (1, ROW)

    def companions(self, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        if len(shape) < 2:
            raise ValueError(f"{self.name} with shape {shape}; only matrices can be")
        return {SCALES: TensorSpec(torch.float32, (*shape[:-1], 1))}

    def companion_region(self, suffix: str, region: Region) -> Region:
        return (*region[:-1], (0, 1))

    def stored_blocks(
        self, src: Region, dst: Region, source: tuple[int, ...], stored: tuple[int, ...]
    ) -> Region | None:
        return (*dst[:-1], (0, stored[-1]))  # a part of a row has the scale of the whole one

    def refusal(self, rows: Sequence[int], cols: int) -> str | None:
        size = f"size {'+'.join(map(str, rows))} x {cols} on this rank"
        if len(rows) == 1 and rows[0] < LEAST_ROWS:
            return f"{size} has less than {LEAST_ROWS} rows"
        if sum(rows) % MULTIPLE or cols % MULTIPLE:
            return f"{size} is not a multiple of {MULTIPLE}"
        return None

    def encode(self, weight: torch.Tensor) -> Encoded:
        codes_NK, scale_N1 = quantize_rows(weight, self.dtypes[0])
        if not bool((scale_N1 <= LARGEST_SCALE).all()):
            raise ValueError(NOT_FINITE)
        return {"": codes_NK, SCALES: scale_N1}

    def decode(self, encoded: Encoded) -> torch.Tensor:
        return dequantize_rows(encoded[""], encoded[SCALES])

    def check_values(self, suffix: str, values: torch.Tensor) -> None:
        if not bool(torch.isfinite(values.float()).all()):
            raise ValueError(NOT_FINITE)


class ChannelFP8(ChannelFormat):
    """E4M3 codes."""

    name = "channel-fp8"
    dtypes = (FP8_DTYPE,)
    capabilities = FP8_CAPABILITIES


class Int8(ChannelFormat):
    """INT8 codes from -127 to 127."""

    name = "int8"
    dtypes = (torch.int8,)
    capabilities = ((8, 0), (9, 0))  # sgl_kernel's int8_scaled_mm with BF16 results
