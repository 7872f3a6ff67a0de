"""Query heads times a factor of their KV head: the exact product, rounded once."""

import pytest
import torch

from sgl_fp8rl.ops import heads

Tensor = torch.Tensor
BF16, FP16 = torch.bfloat16, torch.float16
CANARY = 7.0


def bits(x: Tensor) -> Tensor:
    """The bytes, with one NaN."""
    return torch.where(x.isnan(), torch.full_like(x, torch.nan), x).view(torch.int16)


def buffer(tokens: int, channels: int, gap: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """``[T, channels + gap]``, the gap full of canaries; x is a slice of it."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.full((tokens, channels + gap), CANARY, dtype=dtype)
    made[:, :channels] = 3 * torch.randn(tokens, channels, generator=generator)
    return made


def factors(count: int, stride: int = 1, seed: int = 1) -> Tensor:
    """FP32 of full mantissas, ``stride`` apart; what lies between is NaN. From an odd place."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.full((1 + count * max(stride, 1),), torch.nan)
    made[1:][:: max(stride, 1)] = 0.1 + torch.rand(count, generator=generator)
    return made[1:].as_strided((count,), (stride,))


def check(x: Tensor, factor_H: Tensor) -> Tensor:
    """New and in place: the exact product of 8 or 11 and 24 bits, rounded once."""
    width = x.shape[1:].numel() // len(factor_H)
    factor_C = factor_H.double().repeat_interleave(width).view(x.shape[1:])
    wanted = (x.double() * factor_C).float().to(x.dtype)
    before = x.clone()
    got = heads.scale_heads(x, factor_H)
    assert got.shape == x.shape and got.dtype == x.dtype and got.is_contiguous()
    assert torch.equal(bits(got), bits(wanted))
    assert torch.equal(bits(x), bits(before)), "x was written to"
    assert heads.scale_heads(x, factor_H, out=x) is x
    assert torch.equal(bits(x), bits(wanted))
    return got


def test_heads_that_lie_before_tokens() -> None:
    """As Gemma 3's queries do in SGLang 0.5.17."""
    x = torch.randn(8, 5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = heads.scale_heads(x.transpose(0, 1), factors(2))
    assert torch.equal(got, heads.scale_heads(x.transpose(0, 1).contiguous(), factors(2)))


@pytest.mark.parametrize("gap", [0, 3, 256])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("T", "H", "group", "D"), [(0, 2, 4, 64), (1, 1, 1, 64), (3, 2, 4, 128), (7, 2, 7, 64)]
)
def test_the_product(T: int, H: int, group: int, D: int, dtype: torch.dtype, gap: int) -> None:
    channels = H * group * D
    whole = buffer(T, channels, gap, dtype)
    check(whole[:, :channels], factors(H))
    assert (whole[:, channels:] == CANARY).all(), "written beyond the channels"


def test_heads_may_be_a_dimension_and_factors_lie_apart() -> None:
    x = buffer(5, 8 * 64, 64, BF16)[:, : 8 * 64].unflatten(1, (8, 64))
    assert check(x, factors(2)).shape == (5, 8, 64)
    for stride in (0, 1, 3):
        assert not check(buffer(9, 512, 0, BF16), factors(4, stride)).isnan().any()


@pytest.mark.parametrize("factor", [0.7, -1.5e-3, 2.0**120, torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_16_bits(dtype: torch.dtype, factor: float) -> None:
    # denormals, both zeros, both Infs and all NaNs among them
    every = torch.arange(2**16).to(torch.uint16).view(dtype).view(16, 4096)
    count = int(every.isnan().sum())
    assert check(every, torch.tensor([factor, 0.3])).isnan().sum() >= count > 0


@pytest.mark.parametrize(
    "change", [{"factor_H": torch.ones(3)}, {"out": torch.zeros(2, 512, dtype=BF16)}]
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor]) -> None:
    fits = {"x": torch.zeros(3, 512, dtype=BF16), "factor_H": torch.ones(2)}
    with pytest.raises(RuntimeError):
        heads.scale_heads(**fits | change)
