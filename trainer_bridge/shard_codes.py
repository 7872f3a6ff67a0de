"""Codes of the shards of all ranks: each rank makes those of its own, once for all engines.

An engine that reads shards over links would read two bytes of an element where a code has one, and
each of several engines would quantize by itself. So ranks quantize what such engines keep in FP8,
by the engines' own kernel, into memory that stays, and engines read codes and scales in its place.
What must be equal on all ranks is decided by the first one at an update, for the next one.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from sgl_fp8rl.formats import QUANTIZED
from sgl_fp8rl.formats.weight_format import WEIGHT_DTYPES
from sgl_fp8rl.protocol.attempt import attempt
from sgl_fp8rl.protocol.chunks import Piece
from trainer_bridge.engine_client import EngineError
from trainer_bridge.fp8_weights import SUFFIX, CodesMemory
from trainer_bridge.fsdp import Named, Source, sources
from trainer_bridge.layout import sources_for
from trainer_bridge.placed_shards import CodesWanted, PlacedShards, ShardBook, Shards, Told
from trainer_bridge.shards import Range
from trainer_bridge.transfer_plan import is_aligned
from trainer_bridge.transport.cuda_ipc import place

logger = logging.getLogger(__name__)


def codes_wanted(
    shards: Shards, named: Named, family: str | None, readers: list[tuple[dict[str, Any], int]]
) -> CodesWanted | None:
    """What all ranks should quantize for these engines; None where that would not be faster.

    Args:
        family: see ``fsdp.sources``.
        readers: layouts, and how many engines have each.
    """
    layouts = [layout for layout, engines in readers if _gains(shards, layout, engines)]
    if not layouts:
        return None
    first = layouts[0]
    kept = {
        name
        for layout in layouts
        if layout["dtype"] == first["dtype"]
        for name in layout["formats"].get(QUANTIZED.name, ())
    }
    planned = enumerate(sources_for(named, family, first))
    found = tuple(
        index
        for index, source in planned
        if source.dtype in WEIGHT_DTYPES
        and all(name in kept for name, _ in source.cuts)
        and _is_whole_blocks(source, shards.ranges(index))
    )
    return CodesWanted(getattr(torch, first["dtype"]), found) if found else None


def _gains(shards: Shards, layout: dict[str, Any], engines: int) -> bool:
    """Whether engines that can read the shards read more than each its own GPU's, once."""
    return (
        not layout["is_far"]
        and not layout["through_host"]
        and layout["fp32"] is not None
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
    shards: Shards,
    named: Named,
    family: str | None,
    layout: dict[str, Any],
    planned: list[Source],
) -> dict[int, dict[str, list[Piece]]]:
    """Where codes and scales lie that engines of a layout can read: by parameter and HF name.

    Args:
        planned: how each parameter is read.
    """
    if shards.codes is None or layout["dtype"] != str(shards.codes[0].dtype).split(".")[-1]:
        return {}
    wanted, codes = shards.codes
    behind = len(shards.handles) - len(codes.handles)
    kept = set(layout["formats"].get(QUANTIZED.name, ()))
    scales = sources(
        [
            (named[index][0] + SUFFIX, _scales_of(planned[index].shape))
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
            found[index] = {
                name: [piece._replace(segment=behind + piece.segment) for piece in each or ()]
                for name, each in pieces.items()
            }
    return found


def _scales_of(shape: Sequence[int]) -> torch.Tensor:
    """The scales of a whole parameter, as a meta tensor."""
    spec = QUANTIZED.companions(tuple(shape))[SUFFIX]
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta")


class ShardCodes:
    """Codes of what this rank holds of some parameters, in memory that stays.

    Args:
        named: all parameters.
        own: where the shards lie.
        shards: what this rank holds of those that are wanted, by their places among them.

    Raises:
        EngineError: engines could not read them.
        RuntimeError: there is no memory for them, or the kernel cannot be compiled.
    """

    def __init__(
        self,
        wanted: CodesWanted,
        named: Named,
        own: PlacedShards,
        shards: dict[int, torch.Tensor],
    ) -> None:
        if not shards or not all(map(is_aligned, shards.values())):
            raise EngineError("shards do not lie at multiples of 16 bytes, or there are none")
        self.wanted = wanted
        self._names = [named[index][0] for index in shards]
        self._memory = CodesMemory([*shards.values()], wanted.dtype)
        placement = place([part for codes in self._memory.codes for part in codes])
        if placement is None:
            raise EngineError("the memory of codes cannot be opened by other processes")
        ranges: list[Range | None] = []
        self.whole: Named = []
        """Codes and scales of each parameter in turn, as meta tensors."""
        for index in wanted.parameters:
            name, tensor = named[index]
            held = own.ranges[index] if index in shards else (0, 0)
            assert held is not None
            ranges += held, _range_of_scales(held, tensor.shape)
            self.whole.append((name, torch.empty(tensor.shape, device="meta")))
            self.whole.append((name + SUFFIX, _scales_of(tensor.shape)))
        numbers = {index: number for number, index in enumerate(wanted.parameters)}
        order = [2 * numbers[index] + part for index in shards for part in (0, 1)]
        spots = {index: spot for spot, index in enumerate(order)}
        self.placed = PlacedShards(own.host, tuple(ranges), spots, placement)

    def fits(self, wanted: CodesWanted, shards: dict[int, torch.Tensor]) -> bool:
        """Whether these can be quantized into it."""
        weights = [*shards.values()]
        return (
            self.wanted == wanted
            and self._memory.fits(weights, wanted.dtype)
            and self.placed.placement.is_there(weights[0].device)
            and all(map(is_aligned, weights))
        )

    def start(self, shards: dict[int, torch.Tensor]) -> None:
        """Quantize them, behind what is on the GPU's current stream."""
        self._memory.restart()
        self._memory.launch([*shards.values()])

    def check(self) -> None:
        """Wait until all are quantized.

        Raises:
            EngineError: one holds NaN or Inf.
        """
        bad = self._memory.bad()
        if bad is not None:
            raise EngineError(
                f"{self._names[bad]} holds NaN or Inf; check the trainer's weights before the "
                f"update"
            )


def _range_of_scales(held: Range, shape: Sequence[int]) -> Range:
    """The elements of the scales that belong to those elements of a parameter."""
    *_, rows, cols = shape
    *_, block_rows, block_cols = QUANTIZED.companions((rows, cols))[SUFFIX].shape

    def at(element: int) -> int:
        matrix, row = divmod(element // cols, rows)
        return (matrix * block_rows + row // QUANTIZED.block[0]) * block_cols

    return at(held[0]), at(held[1])


class CodesBook:
    """The codes of this process: on each rank its own, and on the leader where those of all lie."""

    def __init__(self) -> None:
        self._wanted: tuple[str, CodesWanted] | None = None
        """The seed of the shards that the last update was of, and what it decided of them."""
        self._codes: ShardCodes | None = None
        self._is_told = False
        self._shards: dict[int, torch.Tensor] = {}
        """What is to be quantized in this update."""
        self._of_ranks = ShardBook()
        self._with_codes: tuple[Shards, Shards, Shards] | None = None
        """Shards and codes, and both together."""
        self._decided: tuple[Any, CodesWanted | None] | None = None
        self._has_failed = False

    def ready(self, named: Named, own: PlacedShards | None) -> Told | EngineError:
        """Get ready to quantize what the last update decided, of shards that have not moved since.

        Returns:
            where the codes will be, as ``ShardBook.place`` has it; or why this rank cannot.
        """
        self._shards.clear()
        if own is None or self._wanted is None or self._wanted[0] != own.placement.seed:
            return None
        told, error = attempt(self._ready, self._wanted[1], named, own)
        if error is not None:
            self._codes = self._wanted = None
            self._shards.clear()
            return EngineError(f"{type(error).__name__}: {error}")
        return told

    @torch.no_grad()
    def _ready(self, wanted: CodesWanted, named: Named, own: PlacedShards) -> Told:
        held: list[tuple[int, Any]] = [
            (i, named[i][1]) for i in wanted.parameters if i in own.spots
        ]
        shards = {index: tensor.to_local().detach() for index, tensor in held}
        if self._codes is None or not self._codes.fits(wanted, shards):
            self._codes, self._is_told = None, False  # its memory goes before that of others comes
            self._codes = ShardCodes(wanted, named, own, shards)
            self._codes.start(shards)  # the kernel is compiled: what fails is known
        self._shards = shards
        was_told, self._is_told = self._is_told, True
        placed = self._codes.placed
        return placed.placement.seed if was_told else placed

    def start(self) -> None:
        """Quantize what is ready, unless it was started: while the engines begin."""
        if self._shards:
            assert self._codes is not None
            self._codes.start(self._shards)
            self._shards.clear()

    def check(self) -> None:
        """Wait until all of this rank is quantized.

        Raises:
            EngineError: a weight holds NaN or Inf.
        """
        assert self._codes is not None
        self._codes.check()

    def assemble(self, shards: Shards | None, of_ranks: list[Told | EngineError]) -> Shards | None:
        """On the leader: the shards, with the codes of all ranks beside them where each has them.

        Args:
            of_ranks: what ``ready`` returned on each.
        """
        told = [each for each in of_ranks if not isinstance(each, EngineError)]
        for rank, each in enumerate(of_ranks):
            if isinstance(each, EngineError) and not self._has_failed:
                self._has_failed = True
                logger.warning(
                    "engines read shards in BF16, which is slower: rank %d has no codes (%s)",
                    rank,
                    each,
                )
        if shards is None or self._codes is None or len(told) < len(of_ranks):
            return shards
        codes = self._of_ranks.survey(told, self._codes.whole)
        if codes is None:
            return shards
        if self._with_codes is None or self._with_codes[:2] != (shards, codes):
            both = shards.with_codes(self._codes.wanted, codes)
            self._with_codes = shards, codes, both
        return self._with_codes[2]

    def decide(
        self,
        shards: Shards | None,
        named: Named,
        family: str | None,
        readers: list[tuple[dict[str, Any], int]],
    ) -> CodesWanted | None:
        """On the leader: ``codes_wanted`` from the next update on.

        Args:
            shards: of all ranks, where they lie now.
        """
        if shards is None or self._has_failed:
            return None
        made_of = shards, family, readers
        if self._decided is None or self._decided[0] != made_of:
            self._decided = made_of, codes_wanted(shards, named, family, readers)
        return self._decided[1]

    def committed(self, seed: str | None, wanted: CodesWanted | None) -> None:
        """Remember what was decided.

        Args:
            seed: of where the shards of this rank lie.
        """
        self._wanted = None if seed is None or wanted is None else (seed, wanted)
        if wanted is None:
            self._codes = None

    def forget(self) -> None:
        """After a failure: the leader may not have heard where the codes of this rank lie."""
        self._wanted, self._is_told = None, False
        self._shards.clear()
