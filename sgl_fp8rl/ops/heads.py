"""Scale query heads by a factor of their KV head, in plain torch.

This folds the scales of an FP8 KV cache into q and into the output of attention. Shape suffixes: T
tokens, C channels (query heads * head dim), H KV heads of this rank.
"""

import torch


def scale_heads(
    x: torch.Tensor, factor_H: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``x * factor`` in FP32, rounded once, to nearest even.

    Args:
        x: BF16 or FP16 ``[T, C]`` or ``[T, heads, head dim]``, any stride over tokens. The
            channels of a token are H groups of ``C / H``: the query heads of a KV head.
        factor_H: FP32, any stride, read on the device.
        out: the destination, with x's shape and dtype; may be x. None for a new contiguous tensor.

    Returns:
        ``out``.

    Raises:
        ValueError: shapes, dtypes or strides do not match.
    """
    x_TC, out_TC, out = flatten_heads(x, factor_H, out)
    heads = (len(factor_H), -1)
    x_THC, out_THC = x_TC.unflatten(1, heads), out_TC.unflatten(1, heads)
    torch.mul(x_THC, factor_H.unsqueeze(1), out=out_THC)
    return out


def flatten_heads(
    x: torch.Tensor, factor_H: torch.Tensor, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x and out as ``[T, C]`` with contiguous channels, and out as the caller sees it.

    Raises:
        ValueError: as ``scale_heads``.
    """
    if x.dtype not in (torch.bfloat16, torch.float16) or factor_H.dtype != torch.float32:
        raise ValueError(
            f"heads are {x.dtype} and their factors {factor_H.dtype}; pass BF16 or FP16, and FP32"
        )
    channels = x.shape[1:].numel()
    if factor_H.dim() != 1 or len(factor_H) == 0 or channels % len(factor_H):
        raise ValueError(
            f"{channels} channels do not divide into heads for factors of shape "
            f"{tuple(factor_H.shape)}; pass one factor for each KV head"
        )
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    elif out.shape != x.shape or out.dtype != x.dtype:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)}, x is {x.dtype} {tuple(x.shape)}; pass an out "
            f"of x's shape and dtype"
        )
    x_TC = x.reshape(len(x), channels)
    out_TC = out.view(len(x), channels)
    if channels > 1 and (x_TC.stride(1) != 1 or out_TC.stride(1) != 1):
        raise ValueError(
            f"the channels of x have stride {x_TC.stride(1)}, those of out {out_TC.stride(1)}; "
            f"pass contiguous channels"
        )
    return x_TC, out_TC, out
