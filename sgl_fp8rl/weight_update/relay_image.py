"""The image of the last update that came over a network, and how one session changes it."""

import logging
from collections.abc import Iterator
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import torch

from sgl_fp8rl.protocol.host_memory import HostMemory
from sgl_fp8rl.protocol.image import Change, Image
from sgl_fp8rl.protocol.values import excerpt

logger = logging.getLogger(__name__)


class Memories:
    """What the engine's main process keeps for trainers on other hosts.

    Args:
        most_bytes: of a bucket.
        most_image_bytes: of an image, and of the changes of an update; none is kept where it is 0.
    """

    def __init__(self, most_bytes: int, most_image_bytes: int = 0) -> None:
        self.most_bytes, self.most_image_bytes = most_bytes, most_image_bytes
        self.by_name: WeakValueDictionary[str, HostMemory] = WeakValueDictionary()
        """The buckets, each as long as a relay uses it."""
        self.image = Image("", {})
        self.lock = Lock()
        """Held while an image is read or changed: the thread of a session may outlive it."""


class SessionImage:
    """One session's part in it: an update changes the image of the one before, or makes a new one.

    What a session that fails has taken is its own, and goes with it.
    """

    def __init__(self, memories: Memories) -> None:
        self._memories, self._before = memories, memories.image
        self.name = ""
        """Of the image after this session."""
        self._changes: dict[int, Change] = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._kept: dict[int, torch.Tensor] | None = {}
        """Chunks that came whole; None where they are too much."""
        self._taken = 0
        """Bytes of either."""
        self._taking = Lock()
        """Several ranks of a trainer may send at once."""

    @property
    def told(self) -> dict[str, Any]:
        """What the trainer is told: the image that it may change, and how large one may be."""
        most = self._memories.most_image_bytes
        return {"image": self._before.name, "image_bytes": most} if most else {}

    def keep(self, index: Any, content: torch.Tensor) -> None:
        """Copy a chunk that came whole."""
        most = self._memories.most_image_bytes
        with self._taking:
            if not most or self._kept is None or type(index) is not int:
                return
            if not self._kept:  # both would be twice the model
                self._memories.image = self._before = Image("", {})
            self._taken += content.numel()
            if self._taken > most:
                logger.warning(
                    "an update has more than %d bytes, so the next one travels whole too; give "
                    "--fp8rl-image-bytes more",
                    most,
                )
                self._kept = None
            else:
                self._kept[index] = content.clone()

    def room_for(self, index: Any, size: Any, of: int) -> torch.Tensor:
        """Memory for the ``size`` bytes of a change of a chunk of ``of`` bytes.

        Raises:
            ValueError: there can be no such change.
        """
        if type(index) is not int or index in self._changes or type(size) is not int:
            raise ValueError(f"chunk {excerpt(index)} cannot be changed; install one sgl-fp8rl")
        if not 0 <= size <= of:
            raise ValueError(f"a change of {size} bytes is more than its chunk")
        with self._taking:
            self._taken += size
            if self._taken > self._memories.most_image_bytes:
                raise ValueError(f"a change of {size} bytes is more than is kept of an update")
        return torch.empty(size, dtype=torch.uint8)

    def take(self, index: Any, payload: torch.Tensor, offset: int, of: int) -> None:
        """Note a change that has come whole, of the chunk of ``of`` bytes at ``offset``.

        Raises:
            ValueError: there is one of this chunk.
        """
        with self._taking:
            if index in self._changes:
                raise ValueError(f"chunk {index} comes twice; install one sgl-fp8rl")
            self._changes[index] = Change(payload, is_delta=payload.numel() != of)
            self._places[index] = offset, of

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Index, offset and size of each chunk that changes; neighbours lie in other slots."""
        return ((index, *place) for index, place in sorted(self._places.items()))

    def write(self, index: int, target: torch.Tensor) -> None:
        """Write a chunk as it will be.

        Raises:
            DeltaError: the change does not fit this chunk.
        """
        with self._memories.lock:
            self._before.write(index, self._changes[index], target)

    def commit(self) -> None:
        """All ranks committed: what they were given is the image of the next update."""
        memories = self._memories
        with memories.lock:
            if self._changes and memories.image is self._before:
                memories.image = Image("", {})  # unless all goes well
                memories.image = self._before.advance(self._changes, self.name)
            elif self._kept and not self._changes and self.name:
                memories.image = Image(self.name, self._kept)
            # this session's thread lives on, and its memory must not
            self._before, self._changes, self._kept = Image("", {}), {}, None
