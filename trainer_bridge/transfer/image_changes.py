"""What an update changes in the image of the one before, which engines on other hosts hold."""

import secrets
from collections.abc import Collection, Iterable

import torch

from sgl_fp8rl.protocol.image import Change, Image, Steps
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
        self._device = torch.device("cpu")
        self.name = secrets.token_hex(16)
        """Of the image after this update."""

    @property
    def before(self) -> str:
        """The name of the image that changes are of; empty where chunks travel whole."""
        return "" if self._before is None else self._before.name

    def of(self, chunk: int, content: torch.Tensor) -> Steps[Change]:
        """What becomes of a chunk.

        Args:
            content: uint8, where weights are quantized: the image lies there too. It is copied
                where it is needed later than after two steps.
        """
        self._device = content.device
        change = self._changes[chunk] = yield from self._image.changing(chunk, content)
        return change

    def commit(self) -> Image:
        """The image of this update."""
        return self._image.advance(self._changes, self.name, self._device)


def sent_as(
    changes: ImageChanges | None, chunk: int, content: Content, held: Iterable[str | None]
) -> Steps[Content]:
    """A chunk as engines on other hosts are sent it: with its change, if they keep images.

    Args:
        held: the images of all of them.
    """
    offset, data, *_ = content
    if changes is None:
        return Content(offset, data.cpu())
    before = changes.before
    is_whole_for_some = before and any(image != before for image in held)
    whole = data.cpu() if is_whole_for_some else data
    change = yield from changes.of(chunk, data)
    return Content(offset, whole if change.is_delta else change.payload, before, change)
