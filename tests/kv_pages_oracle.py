"""Copies out of a paged 8-bit cache in float64, page by page; no code of ``sgl_fp8rl.ops``.

Shape suffixes as in ``sgl_fp8rl.ops.kv_pages``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sgl_fp8rl.ops.paged_decode import Codes
from tests import oracle

Tensor = torch.Tensor
Copy = Callable[[Codes, Tensor, int, Tensor, Tensor], None]
FORMATS = ["int8", "e4m3"]
SHAPES = [(5, 8, 2, 64, 64), (4, 16, 3, 96, 96), (9, 1, 2, 192, 128), (3, 16, 1, 256, 256)]
"""Pages that are wanted, tokens of a page, KV heads, head dims of K and of V."""
SPARE = 3
"""Pages that nobody wants, and tokens of the workspace behind the last page."""
UNTOUCHED = -7.0


@dataclass
class Case:
    """A cache, and pages of it."""

    codes: Codes
    pages_P: Tensor
    size: int
    dtype: torch.dtype = torch.float16

    def on(self, device: str) -> "Case":
        """The same there."""
        moved = {k: v.to(device) for k, v in vars(self.codes).items() if v is not None}
        for name in ("k_SHD", "v_SHD"):  # tokens of the cache lie apart
            x_SHD = moved[name].view(torch.uint8)
            wide = x_SHD.new_zeros(*x_SHD.shape[:2], x_SHD.shape[2] + 16)
            wide[..., :-16] = x_SHD
            moved[name] = wide[..., :-16].view(moved[name].dtype)
        return replace(self, codes=Codes(**moved), pages_P=self.pages_P.to(device))

    def run(self, copy: Copy) -> tuple[Tensor, Tensor]:
        """The workspaces of K and V."""
        tokens = len(self.pages_P) * self.size + SPARE
        k_WHD, v_WHD = (
            torch.full((tokens, *x_SHD.shape[1:]), UNTOUCHED, dtype=self.dtype, device=x_SHD.device)
            for x_SHD in (self.codes.k_SHD, self.codes.v_SHD)
        )
        copy(self.codes, self.pages_P, self.size, k_WHD, v_WHD)
        return k_WHD, v_WHD


def draw(shape: tuple[int, ...], kind: str, seed: int = 0) -> Case:
    """Any codes, E4M3's NaN among them; powers of two as scales of E4M3; NaN among INT8's, and a
    scale of V that nobody would store."""
    pages, size, heads, k_dim, v_dim = shape
    random = torch.Generator().manual_seed(seed)
    slots = (pages + SPARE) * size
    k, v = (
        torch.randint(-127, 128, (slots, heads, dim), generator=random).to(torch.int8)
        for dim in (k_dim, v_dim)
    )
    if kind == "int8":
        eighths = torch.randint(8, 16, (2, slots, heads), generator=random)
        scales = eighths / 8 * torch.exp2(torch.randint(-20, 9, eighths.shape, generator=random))
        scales[0, 2, 0] = scales[1, 3, 0] = torch.nan
        scales[1, 4, 0] = 2.0**30
        bits = scales.view(torch.int32)
        packed = (bits[0] >> 16 & 0xFFFF) | (bits[1] & -65536)
        codes = Codes(k, v, token_scales_HS=packed.t().contiguous())
    else:
        fp8 = k.view(torch.float8_e4m3fn), v.view(torch.float8_e4m3fn)
        scale_2H = torch.exp2(torch.randint(-6, 6, (2, heads), generator=random).float())
        codes = Codes(*fp8, scale_2H[0], scale_2H[1])
    order = torch.randperm(pages + SPARE, generator=random)[:pages].int()
    return Case(codes, order, size)


def want(made: Case, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """What a copy must leave, rounded once to ``dtype``: the case's if None."""
    codes, sides = made.codes, []
    for side, x_SHD in enumerate((codes.k_SHD, codes.v_SHD)):
        tokens = len(made.pages_P) * made.size + SPARE
        out = torch.full((tokens, *x_SHD.shape[1:]), UNTOUCHED, dtype=torch.float64)
        for p, page in enumerate(made.pages_P.tolist()):
            for t in range(made.size):
                for h in range(x_SHD.shape[1]):
                    code_D, slot = x_SHD[page * made.size + t, h], page * made.size + t
                    out[p * made.size + t, h] = _value(codes, code_D, side, slot, h)
        sides.append(out.to(dtype or made.dtype))
    return sides[0], sides[1]


def _value(codes: Codes, code_D: Tensor, side: int, slot: int, head: int) -> Tensor:
    if codes.token_scales_HS is None:
        scale_H = (codes.k_scale_H, codes.v_scale_H)[side]
        assert scale_H is not None
        value_D = torch.from_numpy(oracle.decode(code_D.view(torch.uint8).numpy())) * scale_H[head]
        return value_D.masked_fill(value_D.isnan(), 0) if side else value_D
    k_scale, v_scale = codes.token_scales_HS[head].view(torch.bfloat16)[2 * slot :][:2].double()
    if side == 0:
        return code_D.double() * (torch.nan if v_scale.isnan() else k_scale)
    value_D = code_D.double() * (0 if v_scale.isnan() else v_scale)
    return value_D.where(value_D.abs() <= 65504, 0)


def assert_same(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """The same values; NaN is NaN."""
    for name, mine, other in zip("KV", got, wanted, strict=True):
        mine = mine.cpu()
        assert mine.dtype == other.dtype
        same = (mine == other) | (mine.isnan() & other.isnan())
        assert bool(same.all()), f"{int((~same).sum())} values of {name} differ"
