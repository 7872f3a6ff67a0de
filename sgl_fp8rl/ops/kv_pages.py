"""Pages of an 8-bit KV cache as 16-bit values side by side, in plain torch: the reference for
``kv_pages_triton.py``.

Shape suffixes: P pages, W tokens of the workspace, H KV heads of this rank, D head dim.
"""

import torch

from sgl_fp8rl.ops.expect import SIXTEEN_BITS, expect
from sgl_fp8rl.ops.kv_int8 import FP16_MAX
from sgl_fp8rl.ops.paged_decode import Codes


def dequantize_pages(
    codes: Codes,
    pages_P: torch.Tensor,
    size: int,
    k_WHD: torch.Tensor,
    v_WHD: torch.Tensor,
) -> None:
    """Write the values of page ``pages_P[p]`` to tokens ``p * size`` and on of the workspace.

    Codes times their scales in FP32, rounded once. Exact in FP16 for INT8, in BF16 for E4M3 where
    scales are powers of two.

    A V that is NaN, or over INT8 beyond FP16, becomes 0: attention multiplies a token that it masks
    by 0, and so a request, or memory that nobody has written yet, would make NaN of another's. Over
    INT8 its K becomes NaN where V's scale is, and with it the scores of its own request.

    Args:
        codes: of a layer's cache, heads contiguous.
        pages_P: int32, contiguous.
        size: tokens of a page.
        k_WHD: FP16 or BF16, contiguous, of at least ``P * size`` tokens; the others stay.
        v_WHD: the same, of V's head dim.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    check_pages(codes, pages_P, size, k_WHD, v_WHD)
    at_size = torch.arange(size, device=pages_P.device)
    slots_T = (pages_P.long()[:, None] * size + at_size).flatten()
    k_THD, v_THD = codes.values(slots_T)
    if codes.token_scales_HS is not None:
        k_THD = k_THD.masked_fill(v_THD.isnan().any(-1, keepdim=True), torch.nan)
        v_THD = v_THD.masked_fill(v_THD.abs() > FP16_MAX, 0)
    k_WHD[: len(slots_T)] = k_THD
    v_WHD[: len(slots_T)] = v_THD.nan_to_num(0)


def check_pages(
    codes: Codes, pages_P: torch.Tensor, size: int, k_WHD: torch.Tensor, v_WHD: torch.Tensor
) -> None:
    """Raise ValueError if the arguments of ``dequantize_pages`` do not match."""
    expect("the pages", pages_P, torch.int32, ("pages",))
    for name, cache_SHD, workspace_WHD in (("K", codes.k_SHD, k_WHD), ("V", codes.v_SHD, v_WHD)):
        tokens, shape = max(len(pages_P) * size, len(workspace_WHD)), cache_SHD.shape[1:]
        expect(f"the workspace of {name}", workspace_WHD, SIXTEEN_BITS, (tokens, *shape))
        expect(f"the {name} cache", cache_SHD, cache_SHD.dtype, ("slots", *shape))
        if not workspace_WHD.is_contiguous():
            raise ValueError(
                f"the workspace of {name} has strides {workspace_WHD.stride()}; pass a contiguous "
                f"one"
            )
