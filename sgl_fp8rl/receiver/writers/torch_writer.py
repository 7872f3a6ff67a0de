"""Write one tensor, or some rows of it, through its routes, in the format of the storage; or read
it back from there.

In plain torch: what the CPU platform runs, and the reference for ``triton_writer.py``.
"""

import torch

from sgl_fp8rl.formats import UNQUANTIZED
from sgl_fp8rl.ops.regions import Region, inside, view
from sgl_fp8rl.protocol.chunks import RowRange
from sgl_fp8rl.receiver.routes.routes import Route, RouteTable


def write_tensor(
    table: RouteTable, routes: list[Route], tensor: torch.Tensor, rows: RowRange, dtype: torch.dtype
) -> None:
    """Write ``tensor``, the given rows of its source, wherever its routes lead.

    Weights that are quantized are first cast to the model's dtype, so that a BF16 checkpoint
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
        format_ = table.format_of(route)
        try:
            if format_ is UNQUANTIZED or values.dtype == target.dtype:
                # before the check: a narrower dtype can overflow to Inf
                values = values.to(target.dtype)
                stored, suffix = table.storage_of(route.parameter)
                stored.check_values(suffix, values)
                _copy(view(target, dst), values)
                continue
            around, blocks = format_.cover_copy(src, dst, tuple(tensor.shape))
            encoded = format_.encode(view(tensor, around).to(target.device, dtype))
        except ValueError as error:
            raise ValueError(f"{route.source} {error}") from error
        _copy(view(target, dst), view(encoded.pop(""), inside(src, around)))
        for suffix, companion in encoded.items():
            region = format_.companion_region(suffix, blocks)
            _copy(view(table.parameters[route.parameter + suffix], region), companion)


def read_tensor(
    table: RouteTable, routes: list[Route], tensor: torch.Tensor, rows: RowRange
) -> None:
    """Fill ``tensor``, the given rows of a source, with what its routes lead to; elsewhere it stays
    as it is.

    Args:
        tensor: of the dtype that was sent, whose bytes storage holds.
    """
    for route in routes:
        if (clipped := clip_route(route, rows)) is not None:
            src, dst = clipped
            _copy(view(tensor, src), view(table.parameters[route.parameter], dst))


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
