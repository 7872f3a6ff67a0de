"""What a trainer's last update was: only changed bytes travel over a slow link.

A delta is exact, whatever the format of the weights is. The trainer keeps a snapshot of what it
sent; engines have it in what they store, wherever that lies. At the learning rates of RL some 0.1%
to 0.3% of FP8 codes change in a step, and each takes 3 bytes.
"""

import logging
from collections.abc import Generator, Mapping
from typing import NamedTuple, TypeVar

import torch

from sgl_fp8rl.ops.delta import apply, difference

logger = logging.getLogger(__name__)

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that yields where it would wait for a GPU, and returns its result."""


class Change(NamedTuple):
    """What becomes of a chunk."""

    payload: torch.Tensor
    """uint8, in host memory: a delta, or the whole chunk."""
    is_delta: bool


class Snapshot:
    """The chunks of a committed update, each uint8, on the device that they were compared on.

    Args:
        name: of the update; engines keep it.
    """

    def __init__(self, name: str, chunks: dict[int, torch.Tensor]) -> None:
        self.name = name
        self._chunks = chunks

    def changing(self, chunk: int, content: torch.Tensor) -> Steps[Change]:
        """What makes a chunk into ``content``, which is copied where it is needed whole: in steps,
        on a GPU; after two of them ``content`` may be written."""
        old = self._chunks.get(chunk)
        if old is None or (old.shape, old.device) != (content.shape, content.device):
            return Change(content.to("cpu", copy=True), False)
        if content.is_cuda:
            from sgl_fp8rl.ops.delta_triton import Comparison  # a CPU may have no Triton

            try:
                comparison = Comparison(old, content)
                yield
                if comparison.encode():
                    yield
                    return Change(comparison.delta(), True)
            except torch.OutOfMemoryError:
                logger.warning("a chunk is sent whole: the GPU has no memory to compare it in")
        elif (found := difference(old, content)) is not None:
            return Change(found, True)
        return Change(content.to("cpu", copy=True), False)

    def advance(
        self,
        changes: Mapping[int, Change],
        name: str,
        device: torch.device | str = "cpu",
    ) -> "Snapshot":
        """The snapshot of the update with these changes: the chunks that they name and no others,
        for what somebody else sends meanwhile is not known. This one gives its chunks away and is
        empty: whoever still holds it is refused, also where the changes are interrupted.

        Args:
            device: where its chunks lie.
        """
        old = self._chunks
        self.empty()
        chunks = {}
        for chunk, change in changes.items():
            kept = old.pop(chunk, None)
            if not change.is_delta:
                del kept  # its memory goes before that of the new one comes
                chunks[chunk] = change.payload.to(device)
            elif kept is not None:
                _apply(kept, change.payload)
                chunks[chunk] = kept
        return Snapshot(name, chunks)

    def empty(self) -> None:
        """Give up its memory and its name, whoever still holds it."""
        self._chunks, self.name = {}, ""


def _apply(content: torch.Tensor, payload: torch.Tensor) -> None:
    if content.is_cuda:
        from sgl_fp8rl.ops import delta_triton  # a CPU may have no Triton

        delta_triton.apply(content, payload.to(content.device, non_blocking=True))
    else:
        apply(content, payload)
