"""Scale query heads by a factor of their KV head on the GPU: one launch, 16 bytes at a time.

The bytes are those of ``heads.py``. torch's own product of BF16 and a broadcast FP32 reads element
by element. Only the result is allocated and nothing is synchronized, so a CUDA graph can capture
it; factors are read at replay.
"""
# Triton comes without types.
# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

from sgl_fp8rl.ops.heads import flatten_heads

# Elements per program: four loads of 16 bytes in flight per thread. Neither depends on the batch:
# serving compiles nothing after the first decode and the first prefill.
_ELEMENTS, _WARPS = 4096, 4


def scale_heads(
    x: torch.Tensor, factor_H: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``heads.scale_heads`` on the current stream; there is what it takes, returns and raises."""
    x_TC, out_TC, out = flatten_heads(x, factor_H, out)
    T, C = x_TC.shape
    H = len(factor_H)
    width = C // H
    cols = min(triton.next_power_of_2(width), _ELEMENTS) if width else 0
    if T * cols:
        size = _ELEMENTS // cols
        with torch.cuda.device_of(x):  # a kernel starts on the current device
            _scale_heads[(triton.cdiv(T * H, size), triton.cdiv(width, cols))](
                x_TC,
                factor_H,
                out_TC,
                T * H,
                x_TC.stride(0),
                out_TC.stride(0),
                factor_H.stride(0),
                HEADS=H,
                WIDTH=width,
                COLS=cols,
                ROWS=size,
                num_warps=_WARPS,
            )
    return out


# Factors are read one by one, so layers with different strides share one compiled kernel.
@triton.jit(do_not_specialize=["rows", "factor_stride"], do_not_specialize_on_alignment=["factors"])
def _scale_heads(
    x: tl.tensor,
    factors: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    factor_stride: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One program scales ``ROWS`` KV heads, ordered by token, then head, with one factor each."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
    inside = row < rows
    box = inside[:, None] & (col < WIDTH)
    token = (row // HEADS).to(tl.int64)  # a long prefill of wide rows exceeds 2**31 elements
    head = row % HEADS
    factor = tl.load(factors + head * factor_stride, mask=inside, other=1.0)[:, None]
    source = x + (token * x_stride + head * WIDTH)[:, None] + col
    values = tl.load(source, mask=box, other=0.0).to(tl.float32)
    target = out + (token * out_stride + head * WIDTH)[:, None] + col
    tl.store(target, (values * factor).to(out.dtype.element_ty), mask=box)
