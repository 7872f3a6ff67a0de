"""The tensors of a checkpoint's safetensors files."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open


def read_tensors(files: Iterable[Path | str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of safetensors files, mapped: only what is copied out is read from disk."""
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)
