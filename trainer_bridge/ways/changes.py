"""Exact changes: what an update changes of the one before, which engines on other hosts hold.

A trainer keeps the chunks of the last update, its base; engines have it in what they store.
"""

import secrets
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

import torch

from sgl_fp8rl.protocol.image import Change, Image, Steps
from trainer_bridge.transport.rank_client import Content

KEPT = 2
"""Bases of a rank that does not lead; each is its part of a model."""


@dataclass
class Base:
    """The last update that an engine on another host committed. It outlasts a failure: the engine
    says what it holds."""

    fingerprint: str
    """Of its manifest."""
    image: Image
    has_failed: bool = False
    """Whether the last update of an engine that holds it failed: after a second one the next is
    whole."""


class Changes:
    """The changes of one update.

    Args:
        base: what they are of; None where chunks travel whole.
        name: of what they make.
    """

    def __init__(self, base: Image | None, name: str | None = None) -> None:
        self.before = "" if base is None else base.name
        """The name of the base; empty where chunks travel whole."""
        self.name = name or secrets.token_hex(16)
        self._image = base or Image("", {})
        self._changes: dict[int, Change] = {}
        self._device = torch.device("cpu")

    def of(self, chunk: int, content: torch.Tensor) -> Steps[Change]:
        """What becomes of a chunk.

        Args:
            content: uint8, where weights are quantized: the base lies there too. It is copied where
                it is needed later than after two steps.
        """
        self._device = content.device
        change = self._changes[chunk] = yield from self._image.changing(chunk, content)
        return change

    def commit(self) -> Image:
        """What engines hold from now on."""
        return self._image.advance(self._changes, self.name, self._device)


def as_sent(
    changes: Changes | None, chunk: int, content: Content, held: Collection[str | None]
) -> Steps[Content]:
    """A chunk as engines on other hosts are sent it: with its change, if they keep bases.

    Args:
        held: the bases of all of them.
    """
    data, offset = content.data, content.offset
    if changes is None:
        return Content(offset, data.cpu())
    before = changes.before
    is_whole_for_some = before and any(name != before for name in held)
    whole = data.cpu() if is_whole_for_some else data
    change = yield from changes.of(chunk, data)
    return Content(offset, whole if change.is_delta else change.payload, before, change)


class Bases:
    """What a rank that does not lead sent in updates before, by the names of the bases."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Image] = OrderedDict()

    def changes(self, before: str, name: str) -> Changes | None:
        """The changes of an update to a base, which make another one; None where engines keep
        none, and so does this rank from now on."""
        if not name:
            self.forget()
            return None
        return Changes(self._kept.get(before) or Image(before, {}), name)

    def keep(self, changes: Changes) -> None:
        """The update has committed."""
        self._kept.pop(changes.before, None)
        self._kept[changes.name] = changes.commit()
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    def forget(self) -> None:
        """Engines keep none any more."""
        self._kept.clear()
