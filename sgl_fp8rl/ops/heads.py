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
        x: BF16 or FP16 ``[T, C]`` or ``[T, heads, head dim]``, any strides. The
            channels of a token are H groups of ``C / H``: the query heads of a KV head.
        factor_H: FP32, any stride, read on the device.
        out: the destination, with x's shape and dtype; may be x. None for a new contiguous tensor.

    Returns:
        ``out``.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    groups = len(factor_H), x.shape[1:].numel() // len(factor_H)
    x_THC, out_THC = x.reshape(len(x), *groups), out.view(len(x), *groups)
    torch.mul(x_THC, factor_H.unsqueeze(1), out=out_THC)
    return out
