"""The states of an engine's weights, and what an update does to running requests."""

from enum import Enum

ABORT, FINISH, RETRACT = "abort", "finish", "retract"
IN_FLIGHT = (ABORT, FINISH, RETRACT)
"""Abort: running requests come back with what they have. Finish: the update waits for their end.
Retract: they wait for the update's end, and go on under the new version."""


class State(Enum):
    """Whether the engine may generate."""

    SERVING = "serving"
    UPDATING = "updating"
    QUARANTINED = "quarantined"
