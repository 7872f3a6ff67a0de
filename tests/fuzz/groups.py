"""The modules of decoders; ``decoders`` of each sets up what they need."""

from types import ModuleType

from tests.fuzz import chains, control, frames, http_replies, memory, relay, replies, trainer

# control first: it imports SGLang, whose platform must be resolved before our modules are loaded
GROUPS: tuple[ModuleType, ...] = (
    *(control, frames, memory),
    *(trainer, http_replies, replies, relay, chains),
)
SHARES = 23
"""Decoders in all; each gets an equal part of the inputs."""
