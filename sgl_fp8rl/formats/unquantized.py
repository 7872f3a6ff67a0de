"""Weights as they are: BF16, FP16 or FP32."""

from collections.abc import Sequence

import torch

from sgl_fp8rl.formats.weight_format import (
    NOT_FINITE,
    WEIGHT_DTYPES,
    Encoded,
    TensorSpec,
    WeightFormat,
)
from sgl_fp8rl.ops.regions import Region


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
