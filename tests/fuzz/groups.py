"""The decoders, by group."""

from contextlib import AbstractContextManager
from typing import Protocol

from tests.fuzz import (
    chains,
    control,
    frames,
    http_replies,
    manifests,
    memory,
    relay,
    replies,
    trainer,
)
from tests.fuzz.decoder import Decoder


class Group(Protocol):
    """A module of decoders."""

    def decoders(self) -> AbstractContextManager[list[Decoder]]:
        """Decoders, while what they need is set up."""


# control first: it imports SGLang, whose platform must be resolved before our modules are loaded
GROUPS: tuple[Group, ...] = (
    *(control, manifests, frames, memory),
    *(trainer, http_replies, replies, relay, chains),
)
SHARES = 23
"""Decoders in all; each gets an equal part of the inputs."""
