"""Which shards engines read as codes, and where the codes and scales of an HF tensor lie then."""

from collections.abc import Sequence
from typing import Any

import torch

from sgl_fp8rl.formats import QUANTIZED
from sgl_fp8rl.formats.weight_format import WEIGHT_DTYPES
from sgl_fp8rl.protocol.chunks import Piece
from trainer_bridge.shards.codes_memory import SUFFIX
from trainer_bridge.shards.placed_shards import CodesWanted, Range, Shards
from trainer_bridge.sources.parameters import Named, Source, sources
from trainer_bridge.transfer.layout import format_of_codes, sources_for


def codes_wanted(
    shards: Shards, named: Named, family: str | None, readers: list[tuple[dict[str, Any], int]]
) -> CodesWanted | None:
    """What all ranks should quantize for these engines; None where that would not be faster.

    Args:
        family: see ``sources.sources``.
        readers: layouts, and how many engines have each.
    """
    layouts = [layout for layout, engines in readers if _gains(shards, layout, engines)]
    if not layouts:
        return None
    first = layouts[0]
    format_ = format_of_codes(first).name
    kept = {
        name
        for layout in layouts
        if layout["dtype"] == first["dtype"]
        for name in layout["formats"].get(format_, ())
    }
    planned = enumerate(sources_for(named, family, first))
    found = tuple(
        index
        for index, source in planned
        if source.dtype in WEIGHT_DTYPES
        and all(name in kept for name, _ in source.cuts)
        and _is_whole_blocks(source, shards.ranges(index))
    )
    return CodesWanted(getattr(torch, first["dtype"]), found, format_) if found else None


def _gains(shards: Shards, layout: dict[str, Any], engines: int) -> bool:
    """Whether engines that can read the shards read more than each its own GPU's, once."""
    return (
        layout["fp32"] is not None
        and shards.gpus <= set(layout["visible_gpus"])
        and (engines > 1 or set(layout["gpus"]) != shards.gpus)
    )


def _is_whole_blocks(source: Source, ranges: list[Range] | None) -> bool:
    """Whether a block has elements of one rank alone, and of one HF tensor."""
    if len(source.shape) < 2 or ranges is None:
        return False
    rows, cols = source.shape[-2:]
    starts = {view.storage_offset() for _, view in source.announce(source.dtype)}
    return all(bound // cols % rows % QUANTIZED.block[0] == 0 for bound in starts.union(*ranges))


def pieces_of_codes(
    shards: Shards, named: Named, family: str | None, layout: dict[str, Any]
) -> dict[int, dict[str, list[Piece]]]:
    """Where codes and scales lie that engines of a layout can read: by parameter and HF name, and
    by the handles of the codes."""
    if shards.codes is None or layout["dtype"] != str(shards.codes[0].dtype).split(".")[-1]:
        return {}
    wanted, codes = shards.codes
    planned = sources_for(named, family, layout)
    kept = set(layout["formats"].get(wanted.format, ()))
    scales = sources(
        [
            (named[index][0] + SUFFIX, scales_of(planned[index].shape))
            for index in wanted.parameters
        ],
        family,
        wanted.dtype,
    )
    found: dict[int, dict[str, list[Piece]]] = {}
    for number, (index, scale) in enumerate(zip(wanted.parameters, scales, strict=True)):
        source = planned[index]
        if not all(name in kept for name, _ in source.cuts):
            continue
        views = [(2 * number, *each) for each in source.announce(QUANTIZED.dtypes[0])]
        views += [(2 * number + 1, *each) for each in scale.announce(scale.dtype)]
        pieces = {name: codes.pieces(part, view) for part, name, view in views}
        if all(pieces.values()):
            found[index] = {name: each for name, each in pieces.items() if each}
    return found


def scales_of(shape: Sequence[int]) -> torch.Tensor:
    """The scales of a whole parameter, as a meta tensor."""
    spec = QUANTIZED.companions(tuple(shape))[SUFFIX]
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta")


def range_of_scales(held: Range, shape: Sequence[int]) -> Range:
    """The elements of the scales that belong to those elements of a parameter."""
    *_, rows, cols = shape
    *_, block_rows, block_cols = QUANTIZED.companions((rows, cols))[SUFFIX].shape

    def at(element: int) -> int:
        matrix, row = divmod(element // cols, rows)
        return (matrix * block_rows + row // QUANTIZED.block[0]) * block_cols

    return at(held[0]), at(held[1])
