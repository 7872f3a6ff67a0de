"""The tensors of a checkpoint's safetensors files: how they are read and written."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sgl_fp8rl.protocol.checkpoint_headers import INDEX

SHARD_BYTES = 4 << 30


def read_tensors(files: Iterable[Path | str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of safetensors files, mapped: only what is copied out is read from disk."""
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


class CheckpointWriter:
    """Streams tensors into shards; at most one shard is in memory.

    Args:
        folder: exists and has no checkpoint.
        shard_bytes: a shard is larger only where tensors that stay together are.
    """

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._shard: dict[str, torch.Tensor] = {}
        self._names: list[list[str]] = []
        """Of the tensors in each written shard."""
        self._nbytes = 0

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add tensors that stay in one shard, such as codes and their scales.

        Raises:
            OSError, SafetensorError: the folder cannot be written to.
        """
        held = _nbytes(self._shard)
        if self._shard and held + _nbytes(tensors) > self._shard_bytes:
            self._flush()
        self._shard |= tensors

    def finish(self) -> None:
        """Write the last shard and the index.

        Raises:
            OSError, SafetensorError: as ``add``.
        """
        self._flush()
        total = len(self._names)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._names, start=1):
            file = f"model-{number:05}-of-{total:05}.safetensors"
            self._path(number).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._nbytes}, "weight_map": weight_map}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _flush(self) -> None:
        self._names.append(list(self._shard))
        self._nbytes += _nbytes(self._shard)
        save_file(self._shard, self._path(len(self._names)), metadata={"format": "pt"})
        self._shard = {}

    def _path(self, number: int) -> Path:
        return self._folder / f"shard-{number}"


def _nbytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
