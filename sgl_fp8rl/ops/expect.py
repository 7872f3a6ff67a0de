"""Arguments of kernels: one that does not fit is an error of one sentence."""

import torch

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def expect(
    name: str,
    x: torch.Tensor,
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    shape: tuple[int | str, ...],
    *,
    dense: bool = True,
) -> None:
    """Check that a tensor is one that a kernel takes.

    Args:
        shape: a string names a dimension of any size.
        dense: the last stride must be 1.

    Raises:
        ValueError: it is not.
    """
    known = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    # most are compared whole: a call in front of each launch
    fits = x.shape == shape or (
        x.dim() == len(shape)
        and all(isinstance(n, str) or n == m for n, m in zip(shape, x.shape, strict=True))
    )
    if x.dtype not in known or not fits or (dense and x.stride(-1) != 1):
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in known)
        raise ValueError(
            f"{name} came as {x.dtype} {list(x.shape)} with strides {x.stride()}; pass {wanted} "
            f"[{', '.join(map(str, shape))}]{' with last stride 1' if dense else ''}"
        )
