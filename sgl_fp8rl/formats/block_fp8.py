"""Block FP8: E4M3 codes, and one FP32 scale for each 128x128 block (``ops/reference.py``)."""

from collections.abc import Sequence

import torch

from sgl_fp8rl.formats.weight_format import (
    FP8_CAPABILITY,
    NOT_FINITE,
    NOT_POSITIVE,
    NOT_POWERS,
    Encoded,
    TensorSpec,
    WeightFormat,
)
from sgl_fp8rl.ops.reference import (
    BLOCK,
    EXPONENT,
    FP8_DTYPE,
    LARGEST_SCALE,
    dequantize_weight,
    num_blocks,
    quantize_weight,
)
from sgl_fp8rl.ops.regions import Region

SCALES = "_scale_inv"
"""As published block-FP8 checkpoints call them: a value is ``code * scale``."""


class BlockFP8(WeightFormat):
    """What DeepSeek-V3 and SGLang call block FP8."""

    name = "block-fp8"
    dtypes = (FP8_DTYPE,)
    headers = ("F8_E4M3",)
    suffixes = (SCALES,)
    block = (BLOCK, BLOCK)
    capability = FP8_CAPABILITY
    checkpoint = {  # noqa: RUF012  (never changed)
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }

    def companions(self, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        if len(shape) < 2:
            raise ValueError(f"FP8 with shape {shape}; only matrices can be FP8")
        *lead, rows, cols = shape
        return {SCALES: TensorSpec(torch.float32, (*lead, num_blocks(rows), num_blocks(cols)))}

    def companion_region(self, suffix: str, region: Region) -> Region:
        *lead, rows, cols = region
        return (*lead, *((start // BLOCK, num_blocks(stop)) for start, stop in (rows, cols)))

    def refusal(self, rows: Sequence[int], cols: int) -> str | None:
        if any(size % BLOCK for size in (*rows, cols)):
            stacked = "+".join(map(str, rows))
            return f"size {stacked} x {cols} on this rank is not a multiple of {BLOCK}"
        return None

    def encode(self, weight: torch.Tensor) -> Encoded:
        codes_NK, scale_inv_nk = quantize_weight(weight, power_of_two=self.power_of_two_scales)
        if not bool((scale_inv_nk <= LARGEST_SCALE).all()):
            raise ValueError(NOT_FINITE)
        return {"": codes_NK, SCALES: scale_inv_nk}

    def decode(self, encoded: Encoded) -> torch.Tensor:
        return dequantize_weight(encoded[""], encoded[SCALES])

    def check_values(self, suffix: str, values: torch.Tensor) -> None:
        if suffix == SCALES:
            if not bool(((values > 0) & (values <= LARGEST_SCALE)).all()):
                raise ValueError(NOT_POSITIVE)
        # e4m3fn has no Inf, and isfinite does not know it: NaN is the code 0x7f of either sign
        elif bool(((values.view(torch.uint8) & 0x7F) == 0x7F).any()):
            raise ValueError(NOT_FINITE)


class BlockFP8UE8M0(BlockFP8):
    """The same with scales that are powers of two, and activations with such scales."""

    name = "block-fp8-ue8m0"
    power_of_two_scales = True
    checkpoint = {**BlockFP8.checkpoint, "scale_fmt": "ue8m0"}  # noqa: RUF012  (as above)

    def check_values(self, suffix: str, values: torch.Tensor) -> None:
        super().check_values(suffix, values)
        if suffix == SCALES and bool(
            (values.float().contiguous().view(torch.int32) & ~EXPONENT).any()
        ):
            raise ValueError(NOT_POWERS)
