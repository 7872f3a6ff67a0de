"""What an update changes in the image that engines on other hosts keep of the one before."""

import secrets
from collections.abc import Collection, Iterable

import torch

from sgl_fp8rl.protocol.image import Change, Image
from trainer_bridge.transport.rank_client import Content


class ImageChanges:
    """The changes of one update.

    Args:
        kept: images of updates with the same manifest.
        held: names of the images that engines hold.
    """

    def __init__(self, kept: Iterable[Image], held: Collection[str]) -> None:
        self._before = next((i for i in kept if i.name and i.name in held), None)
        self._image = self._before or Image("", {})
        self._changes: dict[int, Change] = {}
        self.name = secrets.token_hex(16)
        """Of the image after this update."""

    @property
    def before(self) -> str:
        """The name of the image that changes are of; empty where chunks travel whole."""
        return "" if self._before is None else self._before.name

    def of(self, chunk: int, content: torch.Tensor) -> Change:
        """What becomes of a chunk.

        Args:
            content: uint8; it is copied where it is needed later.
        """
        change = self._changes[chunk] = self._image.change_to(chunk, content)
        return change

    def added_to(self, content: Content, chunk: int) -> Content:
        """A chunk as ranks are sent it, with its change."""
        return content._replace(before=self.before, change=self.of(chunk, content.data))

    def commit(self) -> Image:
        """The image of this update."""
        return self._image.advance(self._changes, self.name)
