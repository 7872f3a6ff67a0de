"""Quantized activations in plain torch: the reference for ``activation_triton.py``.

Codes and scales equal, byte for byte, those of SGLang 0.5.17's ``sglang_per_token_group_quant_fp8``
for the returned BF16 values: one FP32 scale for each token and 128 channels, in DeepGEMM's layout.
That kernel uses fast math, so its bytes are not those of a division: ``quantize_tokens`` below
defines them. NaN does not count towards a scale and becomes 448, as there.

Shape suffixes: M tokens, K channels, I channels of each half of gate_up; k = K in groups of 128.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from sgl_fp8rl.ops.expect import expect
from sgl_fp8rl.ops.reference import AMAX_FLOOR, BLOCK, FP8_DTYPE, FP8_MAX, scale_of

INVERSE_MAX = float(torch.tensor(1 / FP8_MAX, dtype=torch.float32, device="cpu"))
"""1 / 448 in FP32: SGLang multiplies by it where the definition of a scale divides."""
LARGEST_DIVISOR = 2.0**126
"""Larger numbers have a denormal reciprocal, which the GPU's instruction flushes to 0."""
ALIGNMENT = 4
"""A column of scales is padded to a multiple of this many tokens: 16 bytes, for TMA."""


class Channels(NamedTuple):
    """Where channels lie among zeros, as the columns of a padded weight do."""

    lead: int
    """Zeros in front."""
    size: int
    """Channels with zeros, a multiple of 128."""


class Quantized(NamedTuple):
    """Codes and scales; a value is its code times its group's scale."""

    codes_MK: torch.Tensor
    """float8_e4m3fn, contiguous."""
    scales_Mk: torch.Tensor
    """FP32 with strides (1, M rounded up to 4), DeepGEMM's layout, or by row, with (k, 1): experts
    gather single tokens, whose scales are then contiguous."""

    @property
    def is_by_row(self) -> bool:
        """Whether the scales of a token are contiguous."""
        return self.scales_Mk.stride() == (self.scales_Mk.shape[1], 1)


def empty_quantized(M: int, K: int, device: torch.device, *, by_row: bool = False) -> Quantized:
    """Uninitialized codes and scales; the padding of the scales is never read."""
    codes_MK = torch.empty((M, K), dtype=FP8_DTYPE, device=device)
    if by_row:
        return Quantized(codes_MK, torch.empty((M, K // BLOCK), device=device))
    padded = -(-M // ALIGNMENT) * ALIGNMENT
    return Quantized(codes_MK, torch.empty((K // BLOCK, padded), device=device).t()[:M])


def attach(y_MK: torch.Tensor, quantized: Quantized, within: Channels | None = None) -> None:
    """Attach codes to this tensor, for a layer that gets it or an equal view of it.

    They are attached to y's storage, since SGLang's MoE blocks pass on views. A tensor of
    ``torch.inference_mode`` does not count changes: nothing is attached, and its consumer quantizes
    it as usual.

    Args:
        within: where the codes lie among zeros; there a layer must want them.
    """
    if not y_MK.is_inference():
        state = within, *_state(y_MK)
        y_MK.untyped_storage().fp8rl_quantized = quantized, state  # type: ignore[attr-defined]


def attached(x_MK: torch.Tensor, within: Channels | None = None) -> Quantized | None:
    """What a producer attached, or None if there is nothing or x has been written to since."""
    found = getattr(x_MK.untyped_storage(), "fp8rl_quantized", None)
    if found is None or x_MK.is_inference() or found[1] != (within, *_state(x_MK)):
        return None
    quantized: Quantized = found[0]
    return quantized


def detach(x_MK: torch.Tensor) -> None:
    """Drop what was attached, before a write to x that torch does not see."""
    vars(x_MK.untyped_storage()).pop("fp8rl_quantized", None)


def _state(x: torch.Tensor) -> tuple[Any, ...]:
    # a view shares the version counter of its base
    return x.data_ptr(), x.shape, x.stride(), x._version


def quantize_tokens(
    x_MK: torch.Tensor,
    *,
    by_row: bool = False,
    within: Channels | None = None,
    power_of_two: bool = False,
) -> Quantized:
    """Quantize to one scale for each token and 128 channels.

    Args:
        x_MK: BF16 with contiguous rows.
        by_row: layout of the scales (``Quantized``).
        within: where K lie among zeros; without it there are none.
        power_of_two: round scales up to powers of two; then a division is exact, and the bytes are
            those of ``reference.quantize_activation``, but for NaN and Inf.

    Raises:
        ValueError: another dtype or layout, or K with its zeros is not a multiple of 128.
    """
    check(x_MK, within=within)
    if within is not None:
        x_MK = F.pad(x_MK, (within.lead, within.size - within.lead - x_MK.shape[1]))
    M, K = x_MK.shape
    x_MkB = x_MK.float().unflatten(-1, (-1, BLOCK))
    amax_Mk = x_MkB.abs().nan_to_num(0.0, torch.inf).amax(-1).clamp(min=AMAX_FLOOR)
    if power_of_two:
        scales_Mk = scale_of(amax_Mk, power_of_two=True)
        quotient = x_MkB * (1 / scales_Mk).unsqueeze(-1)
    else:
        scales_Mk = amax_Mk * INVERSE_MAX
        quotient = x_MkB * (FP8_MAX * _reciprocal(amax_Mk)).unsqueeze(-1)
    quotient = torch.where(quotient < FP8_MAX, quotient, FP8_MAX)  # NaN too
    quantized = empty_quantized(M, K, x_MK.device, by_row=by_row)
    quantized.codes_MK.copy_(quotient.clamp(min=-FP8_MAX).flatten(-2).to(FP8_DTYPE))
    quantized.scales_Mk.copy_(scales_Mk)
    return quantized


def rms_norm_quantize(
    x_MK: torch.Tensor,
    weight_K: torch.Tensor,
    eps: float,
    residual_MK: torch.Tensor | None = None,
    *,
    by_row: bool = False,
    within: Channels | None = None,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, Quantized]:
    """RMSNorm of ``x`` or of ``x + residual``, and its codes.

    As SGLang's ``rmsnorm`` and ``fused_add_rmsnorm``: all in FP32, ``h * rstd * weight`` from left
    to right, and h is not rounded before it is normalized. Only the order of the sum of squares may
    differ, so y may be one BF16 ulp from SGLang's.

    Args:
        residual_MK: BF16; it becomes ``x + residual``, and x becomes y.
        by_row, within, power_of_two: as of ``quantize_tokens``.

    Returns:
        y_MK BF16 (x itself if there is a residual), and its quantization.

    Raises:
        ValueError: another dtype or layout, shapes that differ, or K with its zeros is not a
            multiple of 128.
    """
    check_norm(x_MK, weight_K, residual_MK, within)
    h_MK = x_MK.float()
    if residual_MK is not None:
        h_MK = h_MK + residual_MK.float()
        residual_MK.copy_(h_MK)
    mean_M1 = (h_MK * h_MK).sum(-1, keepdim=True) / x_MK.shape[-1]
    y_MK = (h_MK * torch.rsqrt(mean_M1 + eps) * weight_K.float()).to(x_MK.dtype)
    if residual_MK is not None:
        y_MK = x_MK.copy_(y_MK)
    options = {"by_row": by_row, "power_of_two": power_of_two}
    return y_MK, quantize_tokens(y_MK, within=within, **options)


def silu_mul_quantize(
    gate_up_M2I: torch.Tensor, *, within: Channels | None = None, power_of_two: bool = False
) -> tuple[torch.Tensor, Quantized]:
    """``silu(gate) * up``, and its codes.

    As SGLang's ``silu_and_mul``: in FP32, ``gate / (1 + exp(-gate)) * up``, rounded once. The
    division multiplies by the reciprocal, which is 0 where exp(-gate) exceeds 2**126. What it takes
    besides, and raises, is as of ``quantize_tokens``, of each half.

    Returns:
        y_MI BF16, and its quantization.
    """
    check(gate_up_M2I, halves=2, within=within)
    gate, up = gate_up_M2I.float().chunk(2, dim=-1)
    y_MI = (gate * _reciprocal(1 + torch.exp(-gate)) * up).to(gate_up_M2I.dtype)
    return y_MI, quantize_tokens(y_MI, within=within, power_of_two=power_of_two)


def silu_mul_codes(
    gate_up_M2I: torch.Tensor, *, by_row: bool = False, power_of_two: bool = False
) -> Quantized:
    """``silu_mul_quantize`` without y; options are those of ``quantize_tokens``."""
    y_MI, _ = silu_mul_quantize(gate_up_M2I)
    return quantize_tokens(y_MI, by_row=by_row, power_of_two=power_of_two)


def check(x_MK: torch.Tensor, *, halves: int = 1, within: Channels | None = None) -> None:
    """Raise ValueError unless x can be quantized along its last dimension.

    Args:
        halves: parts of that dimension, which are quantized separately.
        within: where each part lies among zeros.
    """
    expect("the activations", x_MK, torch.bfloat16, ("tokens", "channels"))
    channels, rest = divmod(x_MK.shape[1], halves)
    if rest or (channels if within is None else within.size) % BLOCK:
        raise ValueError(
            f"activations have {channels} channels, not a multiple of {BLOCK}; keep the layer that "
            f"takes them in BF16"
        )


def check_norm(
    x_MK: torch.Tensor,
    weight_K: torch.Tensor,
    residual_MK: torch.Tensor | None,
    within: Channels | None,
) -> None:
    """Raise ValueError unless x can be normalized and quantized."""
    check(x_MK, within=within)
    expect("the norm's weight", weight_K, weight_K.dtype, tuple(x_MK.shape[1:]))
    if residual_MK is not None:
        expect("the residual", residual_MK, torch.bfloat16, tuple(x_MK.shape))


def _reciprocal(x: torch.Tensor) -> torch.Tensor:
    """1 / x like a GPU's ``rcp.approx.ftz``, except for its last bit; x is positive."""
    return torch.where(x > LARGEST_DIVISOR, 0.0, 1 / x)
