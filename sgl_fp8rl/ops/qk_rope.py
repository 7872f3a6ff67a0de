"""A decode step between the QKV projection and attention, in plain torch: the reference for
``qk_rope_triton.py``.

RMSNorm over each head of q and k, rotary embedding, and the store of K and V (``kv.py``). Each step
rounds to BF16 where SGLang's kernel for it does.

Shape suffixes: T tokens, C channels of q, k and v concatenated, N query heads, H KV heads of this
rank, D head dim, P positions, S slots; other suffixes as in ``kv.py``.
"""

from dataclasses import dataclass

import torch

from sgl_fp8rl.ops.expect import expect
from sgl_fp8rl.ops.kv import Cache, check_store, store_kv
from sgl_fp8rl.ops.kv_int8 import rotate_queries

HEAD_DIMS = (32, 64, 128, 256)


@dataclass(frozen=True)
class Norms:
    """RMSNorm over the head dim of q and of k."""

    q_D: torch.Tensor
    """BF16 weight, contiguous."""
    k_D: torch.Tensor
    eps: float


def norm_rope_store(
    qkv_TC: torch.Tensor,
    positions_T: torch.Tensor,
    cos_sin_PD: torch.Tensor,
    norms: Norms | None,
    slots_T: torch.Tensor,
    cache: Cache,
) -> torch.Tensor:
    """Norm and rotate q and k, store K and V at ``slots_T``, and update statistics.

    A head x becomes ``x * rsqrt(mean(x ** 2) + eps) * weight``, rounded to BF16 once. Its halves
    (low, high) then become ``(low * cos - high * sin, high * cos + low * sin)`` in FP32, the first
    product of each unrounded (a fused multiply-add), and are rounded to BF16. K's codes are those
    of the BF16 values, as from ``kv.store_kv``.

    Args:
        qkv_TC: BF16 ``[T, (N + 2 H) * D]``, heads concatenated, any stride over tokens; not
            modified.
        positions_T: int64, each below P; not checked.
        cos_sin_PD: FP32 or BF16 ``[P, D]``: for each position D/2 cosines, then D/2 sines.
        norms: None for models without QK-norm.
        slots_T: int64; only ``kv.PADDING_SLOT`` may be repeated.

    Returns:
        q, ``[T, N * D]``, contiguous: BF16, or over INT8 ``kv_int8.rotate_queries`` of it, FP16.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    N, H, D = check(qkv_TC, positions_T, cos_sin_PD, norms, slots_T, cache)
    q_THD, k_THD, v_THD = qkv_TC.unflatten(1, (-1, D)).split([N, H, H], 1)
    if norms is not None:
        q_THD = _normed(q_THD, norms.q_D, norms.eps)
        k_THD = _normed(k_THD, norms.k_D, norms.eps)
    cos_sin_T1D = cos_sin_PD[positions_T].float().unsqueeze(1)
    q_THD, k_THD = _rotated(q_THD, cos_sin_T1D), _rotated(k_THD, cos_sin_T1D)
    store_kv(k_THD, v_THD, slots_T, cache, read_back=False)
    if cache.token_scales_HS is not None:
        q_THD = rotate_queries(q_THD)
    return q_THD.flatten(1)


def check(
    qkv_TC: torch.Tensor,
    positions_T: torch.Tensor,
    cos_sin_PD: torch.Tensor,
    norms: Norms | None,
    slots_T: torch.Tensor,
    cache: Cache,
) -> tuple[int, int, int]:
    """Query heads, KV heads and head dim; ValueError if these arguments do not match."""
    H, D = cache.k_SHD.shape[-2:]
    if D not in HEAD_DIMS:
        raise ValueError(
            f"the head dim is {D}; norm_rope_store takes {', '.join(map(str, HEAD_DIMS))}"
        )
    heads, rest = divmod(qkv_TC.shape[-1], D)
    N = heads - 2 * H
    if rest or N <= 0 or N % H:
        raise ValueError(
            f"the projection has the shape {list(qkv_TC.shape)}; pass [tokens, (query heads + 2 * "
            f"{H}) * {D}], query heads a multiple of {H} KV heads"
        )
    expect("the projection", qkv_TC, torch.bfloat16, ("tokens", "channels"))
    expect("the positions", positions_T, torch.int64, (len(qkv_TC),), dense=False)
    rotary = torch.float32, torch.bfloat16
    expect("cosines and sines", cos_sin_PD, rotary, ("positions", D))
    for weight_D in () if norms is None else (norms.q_D, norms.k_D):
        expect("a norm's weight", weight_D, torch.bfloat16, (D,))
    _, k_THD, v_THD = qkv_TC.unflatten(1, (-1, D)).split([N, H, H], 1)
    check_store(k_THD, v_THD, slots_T, cache)
    return N, H, D


def _normed(x_THD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    x = x_THD.float()
    return (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight_D).to(torch.bfloat16)


def _rotated(x_THD: torch.Tensor, cos_sin_T1D: torch.Tensor) -> torch.Tensor:
    low, high = x_THD.float().chunk(2, -1)
    cos, sin = cos_sin_T1D.chunk(2, -1)
    halves = _fused(low, cos, -(high * sin)), _fused(high, cos, low * sin)
    return torch.cat(halves, -1).to(torch.bfloat16)


def _fused(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    # a BF16 times FP32 product is exact in FP64; rounding the sum twice does not change its BF16
    return (x.double() * y.double() + z.double()).float()
