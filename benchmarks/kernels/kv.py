"""Between the QKV projection and attention: norm, rotary embedding, FP8 KV store.

Shape suffixes: T tokens, C channels of q, k and v together, H KV heads, D head dim, P positions.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.pair import (
    DECODE,
    LAYERS,
    SHAPE,
    TOKENS,
    Pair,
    assert_close,
    assert_same,
    sets_of,
)
from benchmarks.measuring import Call
from sgl_fp8rl.ops import kv_triton, qk_rope_triton
from sgl_fp8rl.ops.kv import STATS, Cache
from sgl_fp8rl.ops.qk_rope import Norms
from sgl_fp8rl.ops.reference import FP8_DTYPE

DEVICE = "cuda"
N, H, D = SHAPE.heads, SHAPE.kv_heads, SHAPE.head_dim
SLOTS = 32768
POSITIONS = 8192
ROPE_BASE = 1e6
Tensor = torch.Tensor


def qk_rope() -> Iterator[Pair]:
    """QK-norm, rotary embedding and store of a decode step, as each side prepares XQA."""
    caches = [_cache() for _ in range(LAYERS)]
    weights = (1 + torch.randn(LAYERS, 2, D, device=DEVICE) / 4).bfloat16()
    norms = [Norms(q, k, 1e-6) for q, k in weights]
    inverse = ROPE_BASE ** -(torch.arange(0, D, 2, device=DEVICE) / D)
    angle = torch.arange(POSITIONS, device=DEVICE)[:, None] * inverse
    cos_sin_PD = torch.cat([angle.cos(), angle.sin()], -1)
    for tokens in DECODE:
        # one projection for all layers: it was just written, and lies in L2
        shared = _qkv(tokens), torch.randint(POSITIONS, (tokens,), device=DEVICE), cos_sin_PD
        slots = _slots(tokens)

        def calls(action: Any, shared: Any = shared, slots: Tensor = slots) -> list[Call]:
            return [
                partial(action, *shared, norms[layer], slots, caches[layer])
                for layer in range(LAYERS)
            ]

        def check(shared: Any = shared, slots: Tensor = slots) -> None:
            mine, other = _cache(), _cache()
            qkv, positions, table = shared
            q = qk_rope_triton.norm_rope_store(qkv, positions, table, norms[0], slots, mine)
            want = stock_qk_rope(qkv.clone(), positions, table, norms[0], slots, other)
            assert_close("q", q, want)
            assert_close("K", _at(mine.k_SHD, slots), _at(other.k_SHD, slots))
            assert_same("V", _at(mine.v_SHD, slots), _at(other.v_SHD, slots))

        yield Pair(
            "QK-norm + RoPE + KV store",
            str(tokens),
            tokens * (2 * (N + 2 * H) * D + 2 * N * D + 2 * H * D + 4 * D + 16),
            check,
            calls(stock_qk_rope),
            calls(qk_rope_triton.norm_rope_store),
        )


def stock_qk_rope(
    qkv_TC: Tensor,
    positions_T: Tensor,
    cos_sin_PD: Tensor,
    norms: Norms,
    slots_T: Tensor,
    cache: Cache,
) -> Tensor:
    """What Qwen3's attention and the backend with XQA launch: q, whole as XQA needs it."""
    from sglang.kernels.ops.attention.rope import apply_rope_with_cos_sin_cache_inplace
    from sglang.kernels.ops.layernorm.norm import fused_inplace_qknorm

    q, k, v = qkv_TC.unflatten(1, (-1, D)).split([N, H, H], 1)
    fused_inplace_qknorm(q, k, norms.q_D, norms.k_D, norms.eps, head_dim=D)
    apply_rope_with_cos_sin_cache_inplace(
        positions=positions_T, q=q, k=k, cos_sin_cache=cos_sin_PD, is_neox=True
    )
    stock_store_xqa(k, v, slots_T, cache)
    whole: Tensor = q.contiguous()
    return whole.flatten(1)


def store() -> Iterator[Pair]:
    """The FP8 KV store, beside that of SGLang's FlashInfer backend and of the one with XQA."""
    caches = [_cache() for _ in range(LAYERS)]
    for tokens in TOKENS:
        # in-place norms leave k and v where the projection wrote them
        kvs = [
            _qkv(tokens).unflatten(1, (-1, D)).split([N, H, H], 1)[1:]
            for _ in range(sets_of(2 * tokens * (N + 2 * H) * D))
        ]
        slots = _slots(tokens)

        def calls(action: Any, kvs: Any = kvs, slots: Tensor = slots) -> list[Call]:
            return [
                partial(action, *kvs[layer % len(kvs)], slots, caches[layer])
                for layer in range(LAYERS)
            ]

        for backend, stock in (("FlashInfer", stock_store), ("XQA", stock_store_xqa)):

            def check(stock: Any = stock, kvs: Any = kvs, slots: Tensor = slots) -> None:
                mine, other = _cache(), _cache()
                k, v = kvs[0]
                our_store(k, v, slots, mine)
                stock(k, v, slots, other)
                assert_same("K", _at(mine.k_SHD, slots), _at(other.k_SHD, slots))
                assert_same("V", _at(mine.v_SHD, slots), _at(other.v_SHD, slots))

            yield Pair(
                f"KV store ({backend})",
                str(tokens),
                tokens * (2 * H * D * (2 + 1) + 8),
                check,
                calls(stock),
                calls(our_store),
            )


def our_store(k_THD: Tensor, v_THD: Tensor, slots_T: Tensor, cache: Cache) -> None:
    """One launch, which counts what it clips."""
    kv_triton.store_kv(k_THD, v_THD, slots_T, cache, read_back=False)


def stock_store(k_THD: Tensor, v_THD: Tensor, slots_T: Tensor, cache: Cache) -> None:
    """``MHATokenToKVPool.set_kv_buffer`` with the scales of 1 that a block-FP8 model has."""
    from sglang.kernels.ops.kvcache.kvcache import store_cache

    codes = [
        x.div_(scale_H[0]).to(FP8_DTYPE).view(torch.uint8).view(-1, H * D)
        for x, scale_H in zip((k_THD, v_THD), _scales(cache), strict=True)
    ]
    buffers = [x.view(torch.uint8).view(-1, H * D) for x in (cache.k_SHD, cache.v_SHD)]
    store_cache(*codes, *buffers, slots_T, row_bytes=H * D, v_row_bytes=H * D)


def stock_store_xqa(k_THD: Tensor, v_THD: Tensor, slots_T: Tensor, cache: Cache) -> None:
    """What SGLang's backend with XQA launches."""
    from sglang.kernels.ops.kvcache.fused_fp8_qkv_kv_cache import fused_fp8_qkv_kv_cache

    scales = [scale_H[:1] for scale_H in _scales(cache)]
    fused_fp8_qkv_kv_cache(None, k_THD, v_THD, cache.k_SHD, cache.v_SHD, slots_T, *scales)


def _qkv(tokens: int) -> Tensor:
    return torch.randn(tokens, (N + 2 * H) * D, device=DEVICE, dtype=torch.bfloat16)


def _slots(tokens: int) -> Tensor:
    return torch.randperm(SLOTS - 1, device=DEVICE)[:tokens] + 1


def _at(codes_SHD: Tensor, slots_T: Tensor) -> Tensor:
    # not every torch can index FP8
    return codes_SHD.view(torch.uint8)[slots_T].view(FP8_DTYPE)


def _scales(cache: Cache) -> tuple[Tensor, Tensor]:
    assert cache.k_scale_H is not None and cache.v_scale_H is not None
    return cache.k_scale_H, cache.v_scale_H


def _cache() -> Cache:
    """An empty cache under scales of 1, which all stores take the same way."""
    codes = torch.zeros(2, SLOTS, H, D, dtype=torch.uint8, device=DEVICE).view(FP8_DTYPE)
    one_H = torch.ones(H, device=DEVICE)
    stats_C = torch.zeros(STATS, dtype=torch.int64, device=DEVICE)
    return Cache(codes[0], codes[1], one_H, one_H, stats_C=stats_C)
