"""The manifest, and how it is cut into chunks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sgl_fp8rl.protocol.chunks import cut_into_chunks
from sgl_fp8rl.protocol.framing import FramingError
from sgl_fp8rl.protocol.manifest import PROTOCOL, Manifest, ManifestError
from tests.fuzz.decoder import Decoder, parse

MOST_CHUNKS = 1000
"""An engine cuts only what matches its model; here others are cut too, up to this many."""
SEED: dict[str, Any] = {
    "protocol": PROTOCOL,
    "tensors": {
        "w": ["float8_e4m3fn", [256, 128]],
        "w_scale_inv": ["float32", [2, 1]],
        "experts": ["bfloat16", [2, 64, 32]],
        "norm": ["float16", [64]],
        "scalar": ["float32", []],
    },
    "chunk_bytes": 32768,
    "mapped": ["norm"],
    "streamed": False,
    "slots": 2,
    "codes": "block-fp8",
}


def decode(data: bytes) -> None:
    manifest = Manifest.from_json(parse(data))
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest and again.fingerprint == manifest.fingerprint
    if manifest.nbytes < MOST_CHUNKS * manifest.chunk_bytes:
        rows = [piece.rows for chunk in cut_into_chunks(manifest) for piece in chunk]
        assert all(start < stop for start, stop in rows)


@contextmanager
def decoders() -> Iterator[list[Decoder]]:
    unmapped = {**SEED, "mapped": []}
    small = {**unmapped, "tensors": {"n": ["bfloat16", [4096]]}}
    seeds = SEED, {**unmapped, "streamed": True, "slots": 1}, small
    yield [Decoder("manifest", seeds, decode, (FramingError, ManifestError))]
