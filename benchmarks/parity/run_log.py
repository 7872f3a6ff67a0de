"""A run's folder: killed at any moment, the run goes on without a row lost or doubled.

The checkpoint says how long the log was when it was written. What the log got after that belongs to
steps that are done again, so it is cut off.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

LOG = "log.jsonl"
CHECKPOINT = "checkpoint.safetensors"
FINISHED = "finished"
"""Empty; exists when the run has come to its end."""
FINAL = "final"
"""Folder of a finished run's weights, in BF16."""
FAILED = "failed.jsonl"
"""In the folder of a study: a row for each time that one of its jobs failed."""
HELD_OUT = "held_out.json"
"""What ``held_out.py`` found; beside the weights that runs begin with as well."""

Row = dict[str, Any]


def rows_of(log: Path) -> list[Row]:
    """All rows of a log that are whole."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Be the only process that goes on with the run in ``folder``.

    Raises:
        RuntimeError: another one does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(
                f"another process goes on with the run in {folder}; wait for its end, or end it"
            ) from error
        yield


class RunLog:
    """The log and the checkpoint of one run, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._log, self._checkpoint = folder / LOG, folder / CHECKPOINT

    @property
    def is_finished(self) -> bool:
        """Whether the run has come to its end."""
        return (self.folder / FINISHED).exists()

    def add(self, kind: str, **values: Any) -> None:
        """Append a row, in one write."""
        with self._log.open("a") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")

    def resume(self) -> tuple[int, dict[str, torch.Tensor], Row]:
        """Cut the log back to the checkpoint; returns the step to go on with, the learner's state
        and the controller's, which are empty at step 0."""
        if not self._checkpoint.exists():
            self._log.unlink(missing_ok=True)
            return 0, {}, {}
        with safe_open(self._checkpoint, "pt") as file:
            about = file.metadata()
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        os.truncate(self._log, int(about["log_bytes"]))
        return int(about["step"]), state, json.loads(about["controller"])

    def save(self, step: int, state: dict[str, torch.Tensor], controller: Row) -> None:
        """Replace the checkpoint, whole or not at all. ``step``: the one to go on with."""
        about = {
            "step": str(step),
            "log_bytes": str(self._log.stat().st_size),
            "controller": json.dumps(controller),
        }
        unfinished = self._checkpoint.with_suffix(".tmp")
        save_file(state, unfinished, metadata=about)
        unfinished.replace(self._checkpoint)

    def finish(self) -> None:
        """Mark the run as finished; its checkpoint takes room and is of no more use."""
        (self.folder / FINISHED).touch()
        self._checkpoint.unlink(missing_ok=True)
