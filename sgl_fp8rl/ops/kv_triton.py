"""FP8 keys and values on the GPU: one launch stores K and V of a layer, with statistics.

The bytes and the statistics are those of ``kv.py``. Only results are allocated and nothing is
synchronized, so a CUDA graph can capture it; scales and slots are read at replay.
"""
# Triton comes without types.
# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

from sgl_fp8rl.ops.kv import PADDING_SLOT, check_scales, check_store
from sgl_fp8rl.ops.reference import FP8_MAX

# Elements per program. Small programs spread a decode batch over the SMs; large ones keep more
# loads in flight. Nothing else depends on the batch: serving compiles nothing after the first
# decode and the first prefill.
_SMALL, _LARGE = 1024, 4096
_MANY = 2**20
"""Elements of K from which programs are large: eight programs per SM of an H200."""


def store_kv(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    slots_T: torch.Tensor,
    k_cache_SHD: torch.Tensor,
    v_cache_SHD: torch.Tensor,
    k_scale_H: torch.Tensor,
    v_scale_H: torch.Tensor,
    stats_C: torch.Tensor,
    *,
    read_back: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """``kv.store_kv`` on the current stream; there is what it takes, returns and raises."""
    check_store(k_THD, v_THD, slots_T, k_cache_SHD, v_cache_SHD, stats_C)
    check_scales(k_scale_H, v_scale_H, k_THD.shape[1])
    T, H, D_K = k_THD.shape
    D_V = v_THD.shape[2]
    # Without read_back these are never written to.
    k_back, v_back = (
        (x_THD.new_empty(x_THD.shape) if read_back else x_THD) for x_THD in (k_THD, v_THD)
    )
    width = triton.next_power_of_2(max(D_K, D_V))
    rows = rows_of(T * H, width)
    if T * H:
        with torch.cuda.device_of(stats_C):  # a kernel starts on the current device
            _store_rows[(triton.cdiv(T * H, rows), 2)](
                k_THD,
                v_THD,
                slots_T,
                k_cache_SHD,
                v_cache_SHD,
                k_scale_H,
                v_scale_H,
                stats_C,
                k_back,
                v_back,
                T * H,
                *k_THD.stride()[:2],
                *v_THD.stride()[:2],
                *k_cache_SHD.stride()[:2],
                *v_cache_SHD.stride()[:2],
                k_scale_H.stride(0),
                v_scale_H.stride(0),
                HEADS=H,
                D_K=D_K,
                D_V=D_V,
                COLS=width,
                ROWS=rows,
                READ_BACK=read_back,
                num_warps=4,
            )
    return (k_back, v_back) if read_back else None


def rows_of(heads: int, width: int) -> int:
    """How many of so many heads, padded to a width, a program takes."""
    return max((_LARGE if heads * width >= _MANY else _SMALL) // width, 1)


_LARGEST = tl.constexpr(FP8_MAX)
PADDING = tl.constexpr(PADDING_SLOT)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INF = tl.constexpr(0x7F800000)


@triton.jit
def saturate(quotient: tl.tensor) -> tl.tensor:
    """Clamped to the range of E4M3; NaN becomes the one whose code is 0x7F."""
    clamped = tl.minimum(tl.maximum(quotient, -_LARGEST), _LARGEST)
    return tl.where(quotient == quotient, clamped, float("nan"))


@triton.jit
def clipped(quotient: tl.tensor, real: tl.tensor) -> tl.tensor:
    """1 where an unpadded element exceeds E4M3, int32."""
    return (real & (tl.abs(quotient) > _LARGEST)).to(tl.int32)


@triton.jit
def bits_of(x: tl.tensor) -> tl.tensor:
    """The FP32 bits of ``|x|``: integers in the order of magnitudes, Inf and NaN on top."""
    return x.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def magnitude(values: tl.tensor, real: tl.tensor) -> tl.tensor:
    """``bits_of``; 0 where an element is padding or not finite."""
    bits = bits_of(values)
    return tl.where(real & (bits < _INF), bits, 0)


@triton.jit
def count(
    beyond: tl.tensor,
    bits: tl.tensor,
    largest: tl.tensor,
    stats: tl.tensor,
    SIDE: tl.constexpr,
) -> None:
    """Add a tile of ``clipped`` and of ``magnitude`` to the statistics of K (side 0) or V (1).

    ``largest`` was read from the statistics before: an outdated value is too small, which costs one
    atomic more.
    """
    total = tl.sum(beyond)
    if total > 0:
        tl.atomic_add(stats + 1 + SIDE, total.to(tl.int64), sem="relaxed")
    top = tl.max(bits).to(tl.int64)
    if top > largest:
        tl.atomic_max(stats + 3 + SIDE, top, sem="relaxed")


@triton.jit
def _store_side(
    x: tl.tensor,
    slots: tl.tensor,
    cache: tl.tensor,
    scales: tl.tensor,
    stats: tl.tensor,
    back: tl.tensor,
    rows: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    slot_stride: tl.tensor,
    cache_head_stride: tl.tensor,
    scale_stride: tl.tensor,
    SIDE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    READ_BACK: tl.constexpr,
) -> None:
    """Store ``ROWS`` heads of K (side 0) or of V (side 1), ordered by token, then head."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)[None, :]
    inside = row < rows
    token = (row // HEADS).to(tl.int64)  # a long prefill of wide rows exceeds 2**31 elements
    head = row % HEADS
    slot = tl.load(slots + token, mask=inside, other=PADDING)
    scale = tl.load(scales + head * scale_stride, mask=inside, other=1.0)[:, None]
    real = (inside & (slot != PADDING))[:, None] & (col < D)
    box = inside[:, None] & (col < D)

    largest = tl.load(stats + 3 + SIDE)
    source = x + (token * token_stride + head * head_stride)[:, None] + col
    values = tl.load(source, mask=box, other=0.0).to(tl.float32)
    quotient = tl.div_rn(values, scale)
    codes = saturate(quotient).to(tl.float8e4nv)
    target = cache + (slot * slot_stride + head * cache_head_stride)[:, None] + col
    tl.store(target, codes, mask=box)
    if READ_BACK:
        read = codes.to(tl.float32).to(back.dtype.element_ty)
        tl.store(back + (row.to(tl.int64) * D)[:, None] + col, read, mask=box)

    count(clipped(quotient, real), magnitude(values, real), largest, stats, SIDE)
    if SIDE == 0:
        tokens = tl.sum((inside & (slot != PADDING) & (head == 0)).to(tl.int32))
        if tokens > 0:
            tl.atomic_add(stats, tokens.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def _store_rows(
    k: tl.tensor,
    v: tl.tensor,
    slots: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    stats: tl.tensor,
    k_back: tl.tensor,
    v_back: tl.tensor,
    rows: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    k_slot_stride: tl.tensor,
    k_cache_head_stride: tl.tensor,
    v_slot_stride: tl.tensor,
    v_cache_head_stride: tl.tensor,
    k_scale_stride: tl.tensor,
    v_scale_stride: tl.tensor,
    HEADS: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    READ_BACK: tl.constexpr,
) -> None:
    """One program stores ``ROWS`` heads of one side."""
    if tl.program_id(1) == 0:
        _store_side(
            k,
            slots,
            k_cache,
            k_scales,
            stats,
            k_back,
            rows,
            k_token_stride,
            k_head_stride,
            k_slot_stride,
            k_cache_head_stride,
            k_scale_stride,
            0,
            HEADS,
            D_K,
            COLS,
            ROWS,
            READ_BACK,
        )
    else:
        _store_side(
            v,
            slots,
            v_cache,
            v_scales,
            stats,
            v_back,
            rows,
            v_token_stride,
            v_head_stride,
            v_slot_stride,
            v_cache_head_stride,
            v_scale_stride,
            1,
            HEADS,
            D_V,
            COLS,
            ROWS,
            READ_BACK,
        )
