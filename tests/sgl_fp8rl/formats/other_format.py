"""A weight format that only tests know: whatever else would have to learn of it fails with it."""

from collections.abc import Sequence

import pytest
import torch

from sgl_fp8rl import formats
from sgl_fp8rl.formats import FORMATS
from sgl_fp8rl.formats.weight_format import NOT_FINITE, Encoded, TensorSpec, WeightFormat
from sgl_fp8rl.ops.regions import Region
from sgl_fp8rl.protocol import manifest


class Stepped(WeightFormat):
    """INT8 codes, and one FP16 scale for each block of 32x64."""

    name = "stepped"
    dtypes = (torch.int8,)
    headers = ("I8",)
    suffixes = ("_step",)
    block = (32, 64)
    checkpoint = {"quant_method": "int8"}  # noqa: RUF012  (never changed)

    def companions(self, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        if len(shape) < 2:
            raise ValueError(f"INT8 with shape {shape}")
        grid = (-(-n // side) for n, side in zip(shape[-2:], self.block, strict=True))
        return {"_step": TensorSpec(torch.float16, (*shape[:-2], *grid))}

    def companion_region(self, suffix: str, region: Region) -> Region:
        boxes = zip(region[-2:], self.block, strict=True)
        return (*region[:-2], *((start // side, -(-stop // side)) for (start, stop), side in boxes))

    def refusal(self, rows: Sequence[int], cols: int) -> str | None:
        fits = not any(r % 32 for r in rows) and cols % 64 == 0
        return None if fits else f"size {'+'.join(map(str, rows))} x {cols} is not whole blocks"

    def encode(self, weight: torch.Tensor) -> Encoded:
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(NOT_FINITE)
        steps = torch.ones(self.companions(tuple(weight.shape))["_step"].shape)
        for i, j in ((i, j) for i in range(steps.shape[-2]) for j in range(steps.shape[-1])):
            block = weight[..., 32 * i : 32 * i + 32, 64 * j : 64 * j + 64]
            steps[..., i, j] = block.float().abs().amax((-2, -1)).clamp_min(1e-4) / 127
        steps = steps.half()
        codes = (weight.float() / self._spread(steps, weight.shape)).round().clamp(-127, 127)
        return {"": codes.to(torch.int8), "_step": steps}

    def decode(self, encoded: Encoded) -> torch.Tensor:
        codes = encoded[""]
        return codes.float() * self._spread(encoded["_step"], codes.shape)

    def check_values(self, suffix: str, values: torch.Tensor) -> None:
        if not bool(torch.isfinite(values).all()):
            raise ValueError(NOT_FINITE)

    def _spread(self, steps: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        rows, cols = self.block
        spread = steps.float().repeat_interleave(rows, -2).repeat_interleave(cols, -1)
        return spread[..., : shape[-2], : shape[-1]]


OTHER = Stepped()

every_format = pytest.mark.parametrize("fmt", [*FORMATS.values(), OTHER], ids=lambda f: f.name)


def register(monkeypatch: pytest.MonkeyPatch) -> WeightFormat:
    """Add it to the tables that ``formats/__init__.py`` makes from its lines."""
    monkeypatch.setitem(FORMATS, OTHER.name, OTHER)
    for module in (formats, manifest):
        monkeypatch.setattr(module, "SUFFIXES", (*formats.SUFFIXES, *OTHER.suffixes))
    monkeypatch.setitem(formats._BY_DTYPE, torch.int8, OTHER)
    monkeypatch.setitem(formats.DTYPES, "int8", torch.int8)
    monkeypatch.setitem(formats.HEADERS, "I8", torch.int8)
    monkeypatch.setitem(manifest._NAMES, torch.int8, "int8")
    return OTHER
