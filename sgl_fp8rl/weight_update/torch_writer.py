"""Apply one tensor, or some rows of it, through its routes: quantize, write codes and scales.

In plain torch: what the CPU platform runs, and the reference for ``triton_writer.py``.
"""

import torch

from sgl_fp8rl.ops.reference import FP8_DTYPE, quantize_weight
from sgl_fp8rl.protocol.chunks import RowRange
from sgl_fp8rl.protocol.manifest import SCALE_SUFFIX
from sgl_fp8rl.weight_update.routes import Region, Route, RouteTable, to_blocks, view


def write_tensor(
    table: RouteTable, routes: list[Route], tensor: torch.Tensor, rows: RowRange, dtype: torch.dtype
) -> None:
    """Write ``tensor``, the given rows of its source, wherever its routes lead.

    Weights bound for FP8 storage are first cast to the model's dtype, so that a BF16 checkpoint
    and an FP32 master copy of the same weights make the same codes.

    Args:
        tensor: BF16, FP16 or FP32 weights, FP8 codes, or FP32 scales.
        rows: what part of the source's first dimension ``tensor`` holds.
        dtype: the model's dtype.

    Raises:
        ValueError: a value is NaN or Inf, or a scale is not positive.
    """
    for route in routes:
        clipped = clip_route(route, rows)
        if clipped is None:
            continue
        src, dst = clipped
        target = table.parameters[route.parameter]
        values = view(tensor, src)
        if target.dtype != FP8_DTYPE or values.dtype == FP8_DTYPE:
            # before the check: a narrower dtype can overflow to Inf
            values = values.to(target.dtype)
            _check_finite(values, route)
            _copy(view(target, dst), values)
        else:
            try:
                codes, scale_inv = quantize_weight(values.to(target.device, dtype))
            except ValueError as error:
                raise ValueError(f"{route.source}: {error}") from error
            scales = table.parameters[route.parameter + SCALE_SUFFIX]
            _copy(view(target, dst), codes)
            _copy(view(scales, to_blocks(dst)), scale_inv)


def clip_route(route: Route, rows: RowRange) -> tuple[Region, Region] | None:
    """The route's boxes where its source box meets the rows; the source box relative to them."""
    if not route.src:
        return route.src, route.dst  # a scalar
    (start, stop), *rest = route.src
    low, high = max(start, rows[0]), min(stop, rows[1])
    if low >= high:
        return None
    src = ((low - rows[0], high - rows[0]), *rest)
    if (low, high) == (start, stop):
        return src, route.dst
    # The rows are split, so the first dimension is longer than 1 and has its partner in the target.
    axis = next(i for i, (a, b) in enumerate(route.dst) if b - a == stop - start)
    base = route.dst[axis][0]
    dst = list(route.dst)
    dst[axis] = (base + low - start, base + high - start)
    return src, tuple(dst)


def _copy(target: torch.Tensor, values: torch.Tensor) -> None:
    target.copy_(values.reshape(target.shape))


def _check_finite(values: torch.Tensor, route: Route) -> None:
    # e4m3fn has no Inf, and isfinite does not know it: NaN is the code 0x7f of either sign.
    if values.dtype == FP8_DTYPE:
        bad = bool(((values.view(torch.uint8) & 0x7F) == 0x7F).any())
    else:
        bad = not bool(torch.isfinite(values).all())
        if route.parameter.endswith(SCALE_SUFFIX) and not bad and bool((values <= 0).any()):
            raise ValueError(
                f"{route.source} holds a scale that is not positive; send amax / 448, and a "
                f"positive number for a block of zeros"
            )
    if bad:
        raise ValueError(
            f"{route.source} holds NaN or Inf; check the trainer's weights before the update"
        )
