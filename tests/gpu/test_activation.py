"""The activation kernels: byte for byte the reference, and against SGLang's own kernels."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_fp8rl.ops import activation, activation_triton, reference
from sgl_fp8rl.ops.activation import Channels, Quantized
from tests import activation_oracle as exact
from tests.activation_oracle import apart, planted, rows
from tests.gpu.conftest import INTERPRETED

Tensor = torch.Tensor
BF16 = torch.bfloat16
CANARY = 0xA5
MAX_APART = 1
"""BF16 values between y here and there, by the order of a sum or the exponential."""
LEAST_EQUAL = 0.99

needs_sglang = pytest.mark.skipif(
    INTERPRETED or find_spec("sglang") is None, reason="SGLang's kernels run on a GPU"
)


@triton.jit
def _reciprocals(x: tl.tensor, out: tl.tensor, size: tl.tensor) -> None:
    index = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    values = tl.load(x + index, mask=index < size, other=1.0)
    reciprocals = activation_triton._reciprocal(values)
    tl.store(out + index, reciprocals, mask=index < size)


def reciprocals(x: Tensor, device: str) -> Tensor:
    """As the device's instruction has them: the reference's, but for the last bit."""
    source = x.to(device).contiguous()
    out = torch.empty_like(source)
    _reciprocals[(-(-x.numel() // 1024),)](source, out, x.numel())
    return out.to(x.device)


@pytest.fixture(autouse=True)
def reference_of_this_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference takes its reciprocals from the device: then all bytes are the kernels'."""
    monkeypatch.setattr(
        activation, "_reciprocal", lambda x: reciprocals(x, device) if x.numel() else x
    )


@pytest.fixture(autouse=True)
def canaries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outputs lie among canaries, which must be as they were at the end."""
    checks: list[Callable[[], None]] = []

    def empty(M: int, K: int, where: torch.device, *, by_row: bool = False) -> Quantized:
        padded = M if by_row else -(-M // 4) * 4
        sizes = M * K, K // 128 * padded * 4
        buffers = [torch.full((s + 128,), CANARY, dtype=torch.uint8, device=where) for s in sizes]
        codes, scales = (b[64 : 64 + s] for b, s in zip(buffers, sizes, strict=True))

        def check() -> None:
            for buffer in buffers:
                assert bool((buffer[:64] == CANARY).all() and (buffer[-64:] == CANARY).all())
            padding = scales.view(-1, padded * 4)[:, M * 4 :] if padded else scales
            assert bool((padding == CANARY).all()), "padding rows of the scales were written"

        checks.append(check)
        values = scales.view(torch.float32)
        return Quantized(
            codes.view(torch.float8_e4m3fn).view(M, K),
            values.view(M, K // 128) if by_row else values.view(K // 128, padded).t()[:M],
        )

    monkeypatch.setattr(activation_triton, "empty_quantized", empty)
    yield
    for check in checks:
        check()


def bytes_of(tensor: Tensor) -> Tensor:
    # A column alone has any stride and is contiguous all the same, which a view as bytes denies.
    return tensor.cpu().clone(memory_format=torch.contiguous_format).view(torch.uint8).flatten()


def assert_same(got: Quantized, want: Quantized) -> None:
    for mine, other in zip(got, want, strict=True):
        assert mine.shape == other.shape and mine.dtype == other.dtype
        if len(mine):
            assert mine.stride() == other.stride()
        a, b = (bytes_of(t) for t in (mine, other))
        assert torch.equal(a, b), f"{int((a != b).sum())} bytes differ of {len(a)}"


def assert_close(y: Tensor, other: Tensor) -> None:
    """The same but for what FP32's last bits leave open."""
    steps, equal = apart(y, other)
    assert steps <= MAX_APART and equal >= LEAST_EQUAL, f"{steps} apart, {equal:.4f} equal"


def producers(
    x_MK: Tensor,
    weight_K: Tensor,
    residual_MK: Tensor,
    gate_up: Tensor,
    *,
    by_row: bool = False,
    within: Channels | None = None,
    power_of_two: bool = False,
) -> Iterator[tuple[Tensor, Quantized]]:
    """What each kernel quantizes, and what it makes of it; all of it near the reference."""
    options: Any = {"within": within, "power_of_two": power_of_two}
    yield x_MK, activation_triton.quantize_tokens(x_MK, by_row=by_row, **options)
    for residual in (None, residual_MK):
        yield normed(x_MK, weight_K, residual, by_row=by_row, **options)
    y, got = activation_triton.silu_mul_quantize(gate_up, **options)
    assert_close(y, activation.silu_mul_quantize(gate_up, within=within)[0])
    if not by_row:
        yield y, got
    if within is None:
        codes = partial(activation_triton.silu_mul_codes, by_row=by_row, power_of_two=power_of_two)
        yield y, codes(gate_up)


def normed(
    x_MK: Tensor,
    weight_K: Tensor,
    residual_MK: Tensor | None = None,
    eps: float = 1e-6,
    **options: Any,
) -> tuple[Tensor, Quantized]:
    """The kernel's y, its codes and scales; x and the residual are left as they were."""
    copies = [None if t is None else t.clone() for t in (x_MK, residual_MK)]
    # rows that lie apart, where they are only read
    x, residual = (x_MK, None) if residual_MK is None else (x_MK.clone(), residual_MK.clone())
    y, got = activation_triton.rms_norm_quantize(x, weight_K, eps, residual, **options)
    if residual is None:
        assert torch.equal(bytes_of(x), bytes_of(copies[0]))
    want, _ = activation.rms_norm_quantize(copies[0], weight_K, eps, copies[1], **options)
    assert_close(y, want)
    assert (y is x) == (residual is not None)
    assert residual is None or torch.equal(bytes_of(residual), bytes_of(copies[1]))
    return y, got


def quantized(x_MK: Tensor) -> Quantized:
    """The kernel's codes and scales, which must be the reference's, powers of two as well."""
    found = [activation_triton.quantize_tokens(x_MK, power_of_two=two) for two in (False, True)]
    for got, two in zip(found, (False, True), strict=True):
        assert_same(got, activation.quantize_tokens(x_MK, power_of_two=two))
    return found[0]


def gated(gate_up: Tensor) -> tuple[Tensor, Quantized]:
    """The kernel's y, its codes and scales."""
    y, got = activation_triton.silu_mul_quantize(gate_up)
    assert_close(y, activation.silu_mul_quantize(gate_up)[0])
    assert_same(activation_triton.silu_mul_codes(gate_up), got)
    assert_same(got, activation.quantize_tokens(y))
    return y, got


# ---- against the reference


PADDED = [
    ((5, 576), Channels(0, 640)),
    ((5, 448), Channels(64, 512)),
    ((5, 192), Channels(64, 256)),
    ((5, 1), Channels(127, 128)),
    ((5, 1500), Channels(96, 1664)),
    ((5, 64), Channels(0, 256)),
]


@pytest.mark.parametrize(
    ("shape", "within", "power_of_two"),
    [
        *((shape, None, two) for shape in ((1, 128), (3, 384), (5, 1152)) for two in (False, True)),
        *((*padded, False) for padded in PADDED),
    ],
    ids=str,
)
@pytest.mark.parametrize("by_row", [False, True], ids=["", "by-row"])
def test_producers(
    device: str,
    shape: tuple[int, int],
    within: Channels | None,
    by_row: bool,
    power_of_two: bool,
) -> None:
    """The reference's bytes of what each makes, those of the padded tensor where it is ``within``;
    what lies beside x in memory is not read."""
    M, K = shape
    wide = rows(M, K + 256).to(device)
    wide[:, :128], wide[:, 128 + K :] = torch.nan, torch.nan
    weight = rows(1, K, seed=2, spread=1)[0]
    given = (t.to(device) for t in (weight, rows(M, K, seed=1), rows(M, 2 * K, spread=3)))
    options: Any = {"by_row": by_row, "power_of_two": power_of_two}
    for y, got in producers(wide[:, 128 : 128 + K], *given, within=within, **options):
        assert got.is_by_row == by_row or M == 1
        assert_same(got, activation.quantize_tokens(y, within=within, **options))
        lead, size = within or (0, K)
        padded = torch.nn.functional.pad(y, (lead, size - lead - K))
        assert_same(got, activation.quantize_tokens(padded, **options))
        if power_of_two:  # a trainer and the CPU platform have them, too
            codes, scales = reference.quantize_activation(padded, power_of_two=True)
            assert torch.equal(bytes_of(codes), bytes_of(got.codes_MK))
            assert torch.equal(scales, got.scales_Mk)
            assert not torch.equal(reference.quantize_activation(padded)[1], scales)  # the control
        columns = activation.quantize_tokens(padded, power_of_two=power_of_two)
        assert torch.equal(bytes_of(got.codes_MK), bytes_of(columns.codes_MK))
        assert torch.equal(got.scales_Mk, columns.scales_Mk)


def test_quantize_what_is_no_ordinary_number(device: str) -> None:
    got = quantized(planted().to(device))
    assert set(got.codes_MK.view(torch.uint8)[2, :128].tolist()) == {0x7E}  # NaN


@given(st.integers(1, 9), st.integers(1, 20), st.floats(0, 40), st.integers(0, 2**32 - 1))
@settings(max_examples=10 if INTERPRETED else 100)
def test_quantize_any_rows(device: str, M: int, k: int, spread: float, seed: int) -> None:
    quantized(rows(M, 128 * k, spread=spread, seed=seed).to(device))


@pytest.mark.parametrize("add", [False, True], ids=["", "residual"])
def test_norms_of_zeros_nan_and_strided_rows(device: str, add: bool) -> None:
    x, residual = rows(4, 640).to(device)[:, 128:512], rows(4, 896, seed=1).to(device)[:, :384]
    x[0] = residual[0] = 0
    x[1, 7], x[2, 9] = torch.nan, torch.inf
    y, _ = normed(x, torch.ones(384, device=device), residual if add else None)
    assert not bool(y[0].any()) and bool(y[1].isnan().all())


def test_a_large_eps_is_added_to_the_mean(device: str) -> None:
    x, weight = rows(2, 256, spread=0).to(device), torch.ones(256, dtype=BF16, device=device)
    large, _ = normed(x, weight, eps=3.0)
    small, _ = normed(x, weight)
    ratio = (large.float() / small.float()).nanmean()
    assert 0.45 < float(ratio) < 0.55  # 1 / sqrt(1 + 3)


@pytest.mark.parametrize("add", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("shape", [(5, 2048), (3, 16384)], ids=str)
def test_long_rows(device: str, shape: tuple[int, int], add: bool) -> None:
    x, weight = rows(*shape).to(device), rows(1, shape[1], seed=2, spread=1)[0].to(device)
    quantized(x)
    y, got = normed(x, weight, rows(*shape, seed=1).to(device) if add else None)
    assert_same(got, activation.quantize_tokens(y))


def test_silu_of_what_is_no_ordinary_number(device: str) -> None:
    plain = torch.tensor([0.0, -0.0, 1.0, 88, -80, -120, 300, -300, 1e38, -1e38] * 13)[:128]
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])[:, None].expand(4, 128)
    gated(torch.cat([plain.expand(4, 128), odd], 1).bfloat16().to(device))
    gated(torch.cat([odd, plain.expand(4, 128)], 1).bfloat16().to(device))


def test_no_tokens(device: str) -> None:
    x, weight = rows(2, 256).to(device)[:0], torch.ones(256, dtype=BF16, device=device)
    assert quantized(x).codes_MK.shape == (0, 256)
    assert activation_triton.rms_norm_quantize(x, weight, 1e-6, x.clone())[0].shape == (0, 256)
    assert activation_triton.silu_mul_quantize(x)[0].shape == (0, 128)


def test_what_does_not_fit_is_a_sentence(device: str) -> None:
    x = rows(2, 256).to(device)
    with pytest.raises(ValueError, match=r"activations came as torch\.float32"):
        activation_triton.quantize_tokens(x.float())
    with pytest.raises(ValueError, match="have 64 channels, not a multiple"):
        activation_triton.silu_mul_quantize(x[:, :128])
    with pytest.raises(ValueError, match=r"weight.* \[128\]"):
        activation_triton.rms_norm_quantize(x, torch.ones(128, device=device), 1e-6)


# ---- only on a GPU


def test_reciprocals_exhaustive(device: str) -> None:
    # Of every largest magnitude that a group can have: how far a CPU's reference is from a GPU.
    amax = torch.arange(0x7F80).to(torch.int16).view(BF16).float().clamp(min=1e-10).unique()
    want = torch.where(amax > activation.LARGEST_DIVISOR, 0.0, 1 / amax)
    steps = (reciprocals(amax, device).view(torch.int32) - want.view(torch.int32)).abs()
    print(f"{int((steps > 0).sum())} of {len(steps)} reciprocals differ by an ulp")
    assert int(steps.max()) <= 1


def sglang_quantize(x: Tensor) -> Quantized:
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8

    return Quantized(
        *sglang_per_token_group_quant_fp8(
            x, 128, column_major_scales=True, scale_tma_aligned=True, scale_ue8m0=False
        )
    )


@needs_sglang
@pytest.mark.parametrize(
    "shape", [None, (1, 4096), (5, 128), (64, 12288), (129, 2048), (4099, 4096)], ids=str
)
def test_bytes_are_sglangs(device: str, shape: tuple[int, int] | None) -> None:
    """Special values too; newer kernels of SGLang keep NaN, so those rows are left out there."""
    from sgl_fp8rl.engine import compat

    x = (planted() if shape is None else rows(*shape, spread=20)).to(device)
    if shape is None and compat.sglang_version() != "0.5.17":
        x = x[(x * 0 == 0).all(1)]
    assert_same(activation_triton.quantize_tokens(x), sglang_quantize(x))


@needs_sglang
def test_bytes_are_sglangs_for_every_amax_exhaustive(device: str) -> None:
    amaxes = torch.arange(0x7F80, device=device).to(torch.int16).view(BF16).float()
    random = torch.Generator(device).manual_seed(0)
    for _ in range(8):
        x = torch.rand(len(amaxes), 128, device=device, generator=random) * 2 - 1
        x = (x * amaxes[:, None]).bfloat16()
        x[:, 77] = amaxes.bfloat16()
        got = quantized(x)
        assert_same(got, sglang_quantize(x))


@needs_sglang
@pytest.mark.parametrize("K", [2048, 4096, 5120])
@pytest.mark.parametrize("M", [1, 64, 777])
def test_norms_are_sglangs(device: str, M: int, K: int) -> None:
    from sgl_kernel import fused_add_rmsnorm, rmsnorm

    x, residual = rows(M, K, spread=1).to(device), rows(M, K, seed=1, spread=1).to(device)
    weight = rows(1, K, seed=2, spread=0).to(device)[0]
    y, got = normed(x, weight)
    assert_close(y, rmsnorm(x, weight, 1e-6))
    assert_same(got, sglang_quantize(y))
    y, got = normed(x, weight, residual)
    mine = x.clone(), residual.clone()
    fused_add_rmsnorm(*mine, weight, 1e-6)
    assert_close(y, mine[0])
    assert_same(got, sglang_quantize(y))
    kernel_residual = residual.clone()
    activation_triton.rms_norm_quantize(x.clone(), weight, 1e-6, kernel_residual)
    assert torch.equal(kernel_residual, mine[1])


@needs_sglang
@pytest.mark.parametrize("M", [1, 64, 777])
def test_silu_is_sglangs(device: str, M: int) -> None:
    from sglang.srt.layers.activation import silu_and_mul

    gate_up = rows(M, 2 * 12288, spread=3).to(device)
    y, got = gated(gate_up)
    want = torch.empty_like(y)
    silu_and_mul(gate_up, want)
    steps, equal = apart(y, want)
    print(f"SiLU: {steps} apart at most, {equal:.6f} equal")
    assert steps <= MAX_APART and equal >= LEAST_EQUAL
    assert_same(got, sglang_quantize(y))
    assert exact.ulps(want[:8], *exact.silu_mul(gate_up[:8])) < 1  # SGLang's own
