"""Codes of the shards of all ranks: each rank makes those of its own, once for all engines.

An engine that reads shards over links would read two bytes of an element where a code has one, and
each of several engines would quantize by itself. So ranks quantize what such engines keep in FP8,
by the engines' own kernel, into memory that stays, and engines read codes and scales in its place.
What must be equal on all ranks is decided by the first one at an update, for the next one.
"""

import logging
import weakref
from collections.abc import Collection
from typing import Any

import torch

from sgl_fp8rl.formats import FORMATS
from sgl_fp8rl.formats.weight_format import NOT_FINITE
from sgl_fp8rl.protocol.cuda_memory import CudaMemoryError, DeviceMemory
from sgl_fp8rl.protocol.values import attempt
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.shards.code_pieces import codes_wanted, range_of_scales, scales_of
from trainer_bridge.shards.codes_memory import SUFFIX, CodesMemory
from trainer_bridge.shards.placed_shards import (
    CodesWanted,
    PlacedShards,
    Range,
    ShardRegistry,
    ShardReport,
    Shards,
)
from trainer_bridge.sources.parameters import Named
from trainer_bridge.transfer.transfer_plan import is_aligned
from trainer_bridge.transport.cuda_ipc import placement_of

logger = logging.getLogger(__name__)


class ShardCodes:
    """Codes of what this rank holds of some parameters, in memory that stays.

    Args:
        shards: what this rank holds of those that are wanted, by their places among them.

    Raises:
        EngineError: engines could not read them.
        CudaMemoryError: the GPU has too little memory left.
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
        self._memory = CodesMemory(
            [*shards.values()], wanted.dtype, self._allocate, FORMATS[wanted.format]
        )
        placement = placement_of([part for codes in self._memory.codes for part in codes])
        if placement is None:
            raise EngineError("the memory of codes cannot be opened by other processes")
        ranges: list[Range | None] = []
        self.whole: Named = []
        """Codes and scales of each parameter in turn, as meta tensors."""
        for index in wanted.parameters:
            name, tensor = named[index]
            held = own.ranges[index] if index in shards else (0, 0)
            assert held is not None
            ranges += held, range_of_scales(held, tensor.shape)
            self.whole.append((name, torch.empty(tensor.shape, device="meta")))
            self.whole.append((name + SUFFIX, scales_of(tensor.shape)))
        numbers = {index: number for number, index in enumerate(wanted.parameters)}
        order = [2 * numbers[index] + part for index in shards for part in (0, 1)]
        spots = {index: spot for spot, index in enumerate(order)}
        self.placed = PlacedShards(own.host, tuple(ranges), spots, placement)
        self.seed = placement.seed

    def _allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """From the driver: of torch's memory engines would open all that was allocated with it."""
        try:
            memory = DeviceMemory(nbytes, device.index)
        except CudaMemoryError:
            torch.cuda.empty_cache()  # as torch does before it gives up
            memory = DeviceMemory(nbytes, device.index)
        self.close = weakref.finalize(self, memory.close)
        """Free the memory; every engine has let go of it before."""
        self.close.atexit = False  # not before the engines have; the driver frees it anyway
        return memory.tensor

    def start(self, shards: dict[int, torch.Tensor] | None = None) -> None:
        """Quantize them, behind what is on the GPU's current stream.

        Args:
            shards: by default what lies where those of the last call lay.
        """
        self._memory.restart()
        self._memory.launch(None if shards is None else [*shards.values()])

    def check(self) -> None:
        """Wait until all are quantized."""
        bad = self._memory.bad()
        if bad is not None:
            raise EngineError(f"{self._names[bad]} {NOT_FINITE}")


@torch.no_grad()
def _started(wanted: CodesWanted, named: Named, own: PlacedShards) -> ShardCodes:
    """New ones, whose kernel is compiled and started: that may fail where it does no harm."""
    found: dict[int, Any] = {i: named[i][1] for i in wanted.parameters if i in own.spots}
    shards = {index: tensor.to_local().detach() for index, tensor in found.items()}
    codes = ShardCodes(wanted, named, own, shards)
    codes.start(shards)
    return codes


class CodesRegistry:
    """The codes of this process: on each rank its own, and on the leader where those of all lie."""

    def __init__(self) -> None:
        self._decided: tuple[str, CodesWanted] | None = None
        """The seed of the shards that the last update was of, and what it decided of them."""
        self._codes: ShardCodes | None = None
        """Those of what was decided, once they are made."""
        self._retired: list[ShardCodes] = []
        """Those before, which engines may still have open: CUDA does not define what becomes of
        memory that is freed meanwhile."""
        self._is_due = False
        """Whether that is to be quantized in this update."""
        self._fault: Exception | None = None
        """Why it could not be."""
        self._of_ranks = ShardRegistry()
        self._with_codes: tuple[Shards, Shards, Shards] | None = None
        """Shards and codes, and both together."""
        self._choice: tuple[Any, CodesWanted | None] | None = None
        """What ``decide`` returned last, and of what."""
        self._has_failed = False

    def ready(self, named: Named, own: PlacedShards | None) -> ShardReport | EngineError:
        """Get ready to quantize what the last update decided, of shards that have not moved since.

        Returns:
            where the codes will be, as ``ShardRegistry.place`` has it; or why this rank cannot.
        """
        self._is_due, self._fault = False, None
        if own is None or self._decided is None or self._decided[0] != own.placement.seed:
            return None
        if self._codes is not None:
            self._is_due = True
            return self._codes.seed
        self._codes, error = attempt(_started, self._decided[1], named, own)
        if error is not None:
            self._decided = None
            return EngineError(f"{type(error).__name__}: {error}")
        assert self._codes is not None
        return self._codes.placed

    def start(self) -> None:
        """Quantize what is ready, unless it was started: while the engines begin."""
        if self._is_due:
            assert self._codes is not None
            self._is_due = False
            _, self._fault = attempt(self._codes.start)

    def check(self) -> None:
        """Wait until all of this rank is quantized.

        Raises:
            EngineError: a weight holds NaN or Inf.
        """
        if self._fault is not None:
            raise self._fault
        assert self._codes is not None
        self._codes.check()

    def assemble(
        self, shards: Shards | None, of_ranks: list[ShardReport | EngineError]
    ) -> Shards | None:
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
            shards: of all ranks, where none has moved since the last update.
        """
        if shards is None or self._has_failed:
            return None
        made_of = shards, family, readers
        if self._choice is None or self._choice[0] != made_of:
            self._choice = made_of, codes_wanted(shards, named, family, readers)
        return self._choice[1]

    def committed(
        self, seed: str | None, wanted: CodesWanted | None, opened: Collection[str]
    ) -> None:
        """Remember what was decided, and free what is neither that nor open.

        Args:
            seed: of where the shards of this rank lie.
            opened: seeds of what engines have open, those too that were not in the update.
        """
        decided = None if seed is None or wanted is None else (seed, wanted)
        if decided != self._decided:
            self.forget()
        self._decided = decided
        self.release(opened)

    def forget(self) -> None:
        """After a failure: the leader may not have heard where the codes of this rank lie."""
        self._decided = None
        self._retire()

    def release(self, opened: Collection[str]) -> None:
        """Free codes that no engine has open; argument as above."""
        if self._codes is not None and self._codes.seed not in opened:
            self._retire()
        for codes in [each for each in self._retired if each.seed not in opened]:
            self._retired.remove(codes)
            codes.close()

    def _retire(self) -> None:
        if self._codes is not None:
            self._retired.append(self._codes)
            self._codes = None
