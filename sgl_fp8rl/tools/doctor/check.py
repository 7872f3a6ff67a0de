"""One finding of ``doctor``, and what is installed."""

from dataclasses import dataclass
from importlib import metadata
from typing import Literal

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    """What was checked, such as ``sglang``."""
    status: Status
    """``fail`` makes the exit code 1; ``skip``: could not be checked here."""
    message: str
    """One sentence: the finding and, unless it is ok, what to do."""
    detail: str = ""
    """More lines, such as a traceback; only ``--json`` prints them all."""


def installed(distribution: str) -> str | None:
    """Its version, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
