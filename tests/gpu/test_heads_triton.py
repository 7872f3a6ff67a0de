"""Query heads times a factor of their KV head: the kernel against its reference, byte for byte."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_fp8rl.ops import heads, heads_triton
from tests.gpu.conftest import INTERPRETED

Tensor = torch.Tensor
BF16, FP16 = torch.bfloat16, torch.float16
CANARY = 7.0


def bits(x: Tensor) -> Tensor:
    """The bytes on the host, with one NaN: CPUs and GPUs have different ones."""
    x = x.cpu()
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


def on(x: Tensor, device: str) -> Tensor:
    """A copy with all that lies around it, and its strides."""
    whole = x.new_empty(0).set_(x.untyped_storage())
    copy = whole.to(device, copy=True)
    return copy.as_strided(x.shape, x.stride(), x.storage_offset())


def check(x: Tensor, factor_H: Tensor, device: str) -> Tensor:
    """New and in place, kernel and reference leave the same; the new one is returned."""
    want = heads.scale_heads(x, factor_H)
    mine, factor = on(x, device), on(factor_H, device)
    got = heads_triton.scale_heads(mine, factor)
    assert got.shape == x.shape and got.dtype == x.dtype and got.is_contiguous()
    assert torch.equal(bits(got), bits(want))
    assert torch.equal(bits(mine), bits(x)), "x was written to"

    assert heads_triton.scale_heads(mine, factor, out=mine) is mine
    reference = on(x, "cpu")
    assert heads.scale_heads(reference, factor_H, out=reference) is reference
    assert torch.equal(bits(mine), bits(want)) and torch.equal(bits(reference), bits(want))
    if mine.untyped_storage().nbytes() > mine.nbytes:
        around = mine.as_strided((mine.untyped_storage().nbytes() // 2,), (1,), 0)
        references = reference.as_strided(around.shape, (1,), 0)
        assert torch.equal(bits(around), bits(references)), "written beyond the channels"
    return got.cpu()


@pytest.mark.parametrize("gap", [0, 3, 16, 256], ids=["whole", "odd-gaps", "gaps", "wide-gaps"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("T", "H", "group", "D"),
    [(1, 1, 1, 64), (3, 2, 4, 128), (5, 8, 4, 64), (17, 8, 1, 256), (7, 2, 7, 64), (3, 1, 40, 128)],
)
def test_every_byte_is_the_twins(
    device: str, T: int, H: int, group: int, D: int, dtype: torch.dtype, gap: int
) -> None:
    channels = H * group * D
    x = buffer(T, channels, gap, dtype)[:, :channels]
    factor = factors(H)
    got = check(x, factor, device)
    # and it is the product: each rounded once, from an exact one of 8 or 11 and 24 bits
    exact = x.double() * factor.double().repeat_interleave(group * D)
    assert torch.equal(bits(got), bits(exact.float().to(dtype)))


@pytest.mark.parametrize("gap", [0, 64])
def test_heads_may_be_a_dimension(device: str, gap: int) -> None:
    x = buffer(5, 8 * 64, gap, BF16)[:, : 8 * 64].unflatten(1, (8, 64))
    assert check(x, factors(2), device).shape == (5, 8, 64)


@pytest.mark.parametrize("stride", [0, 1, 3])
def test_factors_may_lie_apart(device: str, stride: int) -> None:
    got = check(buffer(9, 512, 0, BF16), factors(4, stride), device)
    assert not got.isnan().any()


@pytest.mark.parametrize("factor", [1.0, 0.7, -1.5e-3, 2.0**120, torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_16_bits(device: str, dtype: torch.dtype, factor: float) -> None:
    # denormals, both zeros, both Infs and all NaNs among them
    every = torch.arange(2**16).to(torch.uint16).view(dtype).view(16, 4096)
    got = check(every, torch.tensor([factor, 0.3]), device)
    assert got.isnan().sum() >= every.isnan().sum() > 0


@given(
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(1, 16).map(lambda sixteenths: 16 * sixteenths),
    st.sampled_from([BF16, FP16]),
    st.sampled_from([0, 1, 8, 16]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=10 if INTERPRETED else 60)
def test_any_heads(
    device: str, T: int, H: int, group: int, D: int, dtype: torch.dtype, gap: int, seed: int
) -> None:
    channels = H * group * D
    x = buffer(T, channels, gap, dtype, seed)[:, :channels]
    check(x, factors(H, seed=seed), device)


def test_no_tokens(device: str) -> None:
    for shape in ((0, 512), (0, 4, 128)):
        assert check(torch.empty(shape, dtype=BF16), factors(2), device).shape == shape


@pytest.mark.skipif(INTERPRETED, reason="4 GiB")
def test_tokens_may_lie_beyond_2_to_the_31(device: str) -> None:
    x, apart = buffer(2100, 128, 0, BF16), 2**20
    far = torch.empty(len(x) * apart, dtype=BF16, device=device).view(-1, apart)[:, :128]
    want = heads.scale_heads(x, factors(2))
    far.copy_(x)
    heads_triton.scale_heads(far, factors(2).to(device), out=far)
    assert torch.equal(bits(far), bits(want))


def test_control_a_factor_of_another_head_is_seen(device: str) -> None:
    x, factor = buffer(3, 512, 0, BF16), factors(2)
    got = heads_triton.scale_heads(on(x, device), on(factor.flip(0), device))
    assert not torch.equal(bits(got), bits(heads.scale_heads(x, factor)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": torch.zeros(3, 512)}, r"heads are torch\.float32"),
        ({"factor_H": torch.ones(2, dtype=BF16)}, r"their factors torch\.bfloat16"),
        (
            {"factor_H": torch.ones(3)},
            r"512 channels do not divide .* factors of shape \(3,",
        ),
        ({"factor_H": torch.ones(2, 1)}, r"do not divide into heads for factors of shape \(2, 1\)"),
        ({"out": torch.zeros(2, 512, dtype=BF16)}, r"out is torch\.bfloat16 \(2, 512\), x is"),
        ({"out": torch.zeros(3, 512, dtype=FP16)}, r"out is torch\.float16"),
        ({"x": torch.zeros(512, 3, dtype=BF16).T}, "channels of x have stride 3, those of out 1"),
        ({"out": torch.zeros(512, 3, dtype=BF16).T}, "of x have stride 1, those of out 3"),
    ],
)
def test_what_does_not_fit_is_a_sentence(change: dict[str, Tensor], sentence: str) -> None:
    fits = {"x": torch.zeros(3, 512, dtype=BF16), "factor_H": torch.ones(2)}
    for function in (heads.scale_heads, heads_triton.scale_heads):
        with pytest.raises(ValueError, match=sentence):
            function(**fits | change)


@pytest.mark.skipif(INTERPRETED, reason="no graph")
def test_a_graph_reads_factors_when_it_is_replayed(device: str) -> None:
    x, factor = buffer(128, 4096, 0, BF16).to(device), factors(8).to(device)
    heads_triton.scale_heads(x, factor)  # compiled before it is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = heads_triton.scale_heads(x, factor)
    for seed in (2, 3):
        factor.copy_(factors(8, seed=seed))
        graph.replay()
        assert torch.equal(bits(got), bits(heads.scale_heads(x.cpu(), factor.cpu())))


def compiled() -> list[object]:
    """The kernels of this process so far."""
    caches = heads_triton._scale_heads.device_caches.values()
    return [kernel for cache in caches for kernel in cache[0].values()]


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
def test_one_kernel_serves_all_batches_and_layers(device: str) -> None:
    qkv = buffer(4097, 4096, 2048, BF16).to(device)[:, :4096]
    heads_triton.scale_heads(qkv[:2], factors(8).to(device))
    before = len(compiled())
    for T in (1, 3, 16, 128, 4097):
        for start in range(4):  # where in a buffer the factors of a layer begin
            buffer_of_layers = torch.rand(16, device=device)
            heads_triton.scale_heads(qkv[:T], buffer_of_layers[start : start + 8])
    assert len(compiled()) == before


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
def test_a_program_spills_no_registers_and_reads_16_bytes(device: str) -> None:
    heads_triton._scale_heads.device_caches.clear()  # of other tests' odd shapes
    heads_triton.scale_heads(buffer(3, 4096, 0, BF16).to(device), factors(8).to(device))
    kernels = compiled()
    assert kernels and not any(kernel.n_spills for kernel in kernels)  # type: ignore[attr-defined]
    assert any("ld.global.v4.b32" in kernel.asm["ptx"] for kernel in kernels)  # type: ignore[attr-defined]
