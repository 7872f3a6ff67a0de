"""A chain's index, and a file of what changed, which another process wrote."""

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from safetensors.torch import save

from tests.fuzz.decoder import Decoder
from trainer_bridge.chain import ChainError, ChainFollower, files
from trainer_bridge.chain import index as chain_index
from trainer_bridge.chain.index import Index, Link, Part

PART: dict[str, Any] = {
    "name": "1-anchor-0.safetensors.zst",
    "bytes": 9,
    "raw_bytes": 9,
    "sha256": "0",
}
LINK: dict[str, Any] = {
    "serial": 1,
    "run": "r",
    "version": 3,
    "digest": "d",
    "base": 0,
    "delta": [],
    "anchor": [PART],
}
LATER = {**LINK, "serial": 2, "version": 4, "base": 1, "delta": [PART], "anchor": []}
INDEX: dict[str, Any] = {"format": chain_index.FORMAT, "links": [LINK, LATER], "replaced": ["q"]}
CHANGES: dict[str, list[int]] = {"delta:w": [1, 0, 63, 0, 7, 8], "other": [1, 2, 3], "delta:v": []}


@contextmanager
def decoders() -> Iterator[list[Decoder]]:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.setattr(files, "digest", lambda _: "d")

        def read_index(data: bytes) -> None:
            (folder / chain_index.INDEX).write_bytes(data)
            chain_index.read_index(folder)

        def apply(data: bytes) -> None:
            """A file that is sound, whatever it holds, behind a version of two tensors."""
            content = zstandard.compress(data)
            sha256 = hashlib.sha256(content).hexdigest()
            part = Part("2-delta-0.safetensors.zst", len(content), len(data), sha256)
            (folder / part.name).write_bytes(content)
            link = Link(2, "r", 4, "d", 1, (part,), ())
            chain_index.write_index(folder, Index((link,)))
            follower = ChainFollower(folder)
            follower._serial = 1
            follower._tensors = {
                "w": torch.zeros(64, dtype=torch.uint8),
                "v": torch.zeros(8, 4, dtype=torch.bfloat16),
            }
            follower.advance()

        yield [
            Decoder("a chain's index", (INDEX,), read_index, (ChainError,)),
            Decoder("a chain's delta", (CHANGES,), apply, (ChainError,), to_safetensors),
        ]


def to_safetensors(value: Any) -> bytes:
    """Tensors of bytes, of an object whose values are lists of numbers; others are left out."""
    found = {}
    for name, numbers in value.items() if isinstance(value, dict) else ():
        if isinstance(numbers, list) and all(type(each) is int for each in numbers):
            found[name] = torch.tensor([each % 256 for each in numbers], dtype=torch.uint8)
    return bytes(save(found))
