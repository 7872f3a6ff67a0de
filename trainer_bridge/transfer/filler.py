"""Fills the bucket in the order of its chunks, however parameters come."""

from collections.abc import Callable

import torch

from trainer_bridge.transfer.packer import Packer
from trainer_bridge.transfer.transfer_plan import TransferPlan


class Filler:
    """One walk over the chunks of a plan.

    Args:
        end_chunk: called when all that this rank puts into a chunk is in it.
        await_slot: called before a chunk is begun; False where nothing is put in any more.
    """

    def __init__(
        self,
        plan: TransferPlan,
        end_chunk: Callable[[int], None],
        await_slot: Callable[[int], bool],
        packer: Packer | None = None,
    ) -> None:
        self._plan, self.packer = plan, packer
        self._end_chunk, self._await_slot = end_chunk, await_slot
        self._chunk = self._turn = 0
        self._held: dict[int, torch.Tensor] = {}

    def put(self, index: int, whole: torch.Tensor) -> None:
        """Put a parameter in once it is its turn."""
        if not self._plan.sources[index].cuts:
            return  # nothing of it is sent
        self._held[index] = whole
        turns = self._plan.turns
        while self._turn < len(turns) and turns[self._turn][1] in self._held:
            chunk, source = turns[self._turn]
            self._end_before(chunk)
            if self._await_slot(chunk):
                assert self.packer is not None
                self.packer.put(source, self._held[source], chunk)
            self._turn += 1
            if self._turn > self._plan.last_turns[source]:
                del self._held[source]

    def own(self, index: int) -> None:
        """Copy a parameter whose turn has not come: its memory may be written again."""
        held = self._held.get(index)
        if held is not None:
            self._held[index] = held.clone()

    def finish(self) -> None:
        """End the last chunk, and those that nothing is put into."""
        self._end_before(len(self._plan.chunks))

    def _end_before(self, chunk: int) -> None:
        while self._chunk < chunk:
            if self.packer is not None and self._await_slot(self._chunk):
                self.packer.complete(self._chunk)
            self._end_chunk(self._chunk)
            self._chunk += 1
