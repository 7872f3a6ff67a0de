"""The manifest: what an update will deliver, sent and checked before the first write."""

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from sgl_fp8rl.formats import BLOCKS, DTYPES, SUFFIXES, format_of, split_name
from sgl_fp8rl.formats.weight_format import TensorSpec, WeightFormat
from sgl_fp8rl.protocol.policy import RUN_LENGTH, Policy
from sgl_fp8rl.protocol.states import IN_FLIGHT
from sgl_fp8rl.protocol.values import excerpt

PROTOCOL = 15
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHUNK_ALIGNMENT = 256
"""Bytes; a slot of the bucket is a multiple of it, as device memory is aligned."""
SLOTS = 2
"""Of a bucket in host memory, for each rank that fills it: one is filled while another is read."""
MOST_SLOTS = 32
"""Of a bucket; two for each rank of a trainer that sends to another host."""
TIED_HEAD = "lm_head.weight"
"""Checkpoints of tied models leave it out; many trainers send it all the same."""
MOST_DIMENSIONS, MOST_ELEMENTS, LONGEST_NAME = 8, 2**48, 256
"""Of one tensor; what exceeds them comes from no model, and torch cannot count its bytes."""


class ManifestError(ValueError):
    """An update that must not begin; nothing was written."""


def wrong_names(unknown: Collection[str] = (), missing: Collection[str] = ()) -> str:
    """What is said of tensors that are not those of the model, whatever brings them."""

    def first(names: Collection[str]) -> str:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(sorted(names)[:3]) + more

    facts = [f"unknown: {first(unknown)}"] if unknown else []
    facts += [f"missing: {first(missing)}"] if missing else []
    return f"the names are not this model's ({'; '.join(facts)}); use those of the HF checkpoint"


def wrong_shape(name: str, found: Sequence[int], expected: Sequence[int]) -> str:
    """What is said of a tensor of another shape than the model's."""
    return (
        f"{name} has shape {tuple(found)}, the engine's is {tuple(expected)}; send the whole "
        f"tensor in the checkpoint's layout"
    )


def twice(name: str) -> str:
    """What is said of a name that comes twice."""
    return f"{name} comes twice; send each tensor once"


@dataclass(frozen=True)
class Manifest:
    """One update: every tensor by its HF checkpoint name.

    The dtype of a weight says which format it is sent in (``formats/``): BF16, FP16 and FP32 as it
    is, float8_e4m3fn as codes, with ``<name>_scale_inv``. Tensors travel in this order
    (``chunks.py``).
    """

    tensors: Mapping[str, TensorSpec]
    chunk_bytes: int = 512 << 20
    """Bytes of one slot of the bucket: the most that one chunk carries."""
    mapped: frozenset[str] = frozenset()
    """Names that travel in no bucket: the engine reads them in the trainer's own memory."""
    streamed: bool = False
    """Whether tensors come in an order that is told with each chunk. Those may be left out that
    the engine keeps nothing of."""
    slots: int = SLOTS
    """Of the bucket: 2, which are filled and written in turn, for each rank that sends, or 1, where
    one GPU does both."""
    codes: str | None = None
    """The name of one of ``BLOCKS``, of which the trainer makes codes; None where it makes none."""

    def __post_init__(self) -> None:
        for name, spec in self.tensors.items():
            _check_companions(self.tensors, name, spec)

    @cached_property
    def nbytes(self) -> int:
        """Payload of the whole update in bytes."""
        return sum(spec.nbytes for spec in self.tensors.values())

    @property
    def bucket_bytes(self) -> int:
        """Bytes of the whole bucket."""
        return self.slots * self.chunk_bytes

    @cached_property
    def fingerprint(self) -> str:
        """Equal for updates that differ in nothing but their values."""
        return hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()

    def format_of(self, name: str) -> WeightFormat:
        """The format that a weight is sent in."""
        return format_of(self.tensors[name].dtype)

    def is_companion(self, name: str) -> bool:
        """Whether ``name`` belongs to the codes of another tensor, as scales do."""
        weight, suffix = split_name(name)
        return weight in self.tensors and suffix in self.format_of(weight).suffixes

    def weights(self) -> Iterable[tuple[str, TensorSpec]]:
        """Every tensor but the companions."""
        return ((name, spec) for name, spec in self.tensors.items() if not self.is_companion(name))

    def to_json(self) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL,
            "tensors": {n: [_NAMES[s.dtype], list(s.shape)] for n, s in self.tensors.items()},
            "chunk_bytes": self.chunk_bytes,
            "mapped": sorted(self.mapped),
            "streamed": self.streamed,
            "slots": self.slots,
            "codes": self.codes,
        }

    @classmethod
    def from_json(cls, data: Any) -> "Manifest":
        """Parse and check a manifest from the wire.

        Raises:
            ManifestError: another protocol, a malformed entry, a dtype or shape that no weight has.
        """
        if not isinstance(data, dict) or data.get("protocol") != PROTOCOL:
            found = data.get("protocol") if isinstance(data, dict) else type(data).__name__
            raise ManifestError(
                f"the manifest speaks protocol {excerpt(found)}, this engine {PROTOCOL}; install "
                f"the same sgl-fp8rl on both sides"
            )
        tensors = data.get("tensors")
        if not isinstance(tensors, dict) or not tensors:
            raise ManifestError("the manifest names no tensors; send every tensor of the model")
        size, mapped = data.get("chunk_bytes"), data.get("mapped")
        if type(size) is not int or not 0 < size < 2**40 or size % CHUNK_ALIGNMENT:
            raise ManifestError(
                f"chunk_bytes is {excerpt(size)}; give a positive multiple of {CHUNK_ALIGNMENT}"
            )
        if not isinstance(mapped, list) or not all(type(n) is str and n in tensors for n in mapped):
            raise ManifestError("mapped names a tensor that the manifest lacks; list it there too")
        streamed = data.get("streamed")
        if type(streamed) is not bool or (streamed and mapped):
            raise ManifestError(
                f"streamed is {excerpt(streamed)}; give true or false, and true for no tensor that "
                f"is mapped"
            )
        slots = data.get("slots")
        if type(slots) is not int or not 1 <= slots <= MOST_SLOTS:
            raise ManifestError(f"slots is {excerpt(slots)}; give a number from 1 to {MOST_SLOTS}")
        codes, known = data.get("codes"), [format_.name for format_ in BLOCKS]
        if codes is not None and codes not in known:
            raise ManifestError(
                f"codes are of {excerpt(codes)}; give one of {', '.join(known)}, or null"
            )
        specs = {name: parse_spec(name, entry) for name, entry in tensors.items()}
        return cls(specs, size, frozenset(mapped), streamed, slots, codes)


def describe(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    chunk_bytes: int = Manifest.chunk_bytes,
    mapped: Collection[str] = (),
    streamed: bool = False,
    slots: int = Manifest.slots,
    codes: str | None = None,
) -> Manifest:
    """The manifest of tensors in memory.

    Raises:
        ManifestError: a name comes twice, or an update cannot carry a dtype.
    """
    tensors: dict[str, TensorSpec] = {}
    for name, tensor in named_tensors:
        if name in tensors:
            raise ManifestError(twice(name))
        if tensor.dtype not in _NAMES:
            known = ", ".join(DTYPES)
            raise ManifestError(f"{name} has dtype {tensor.dtype}; send one of {known}")
        if not tensor.numel():
            raise ManifestError(f"{name} has shape {tuple(tensor.shape)}; send no empty tensors")
        tensors[name] = TensorSpec(tensor.dtype, tuple(tensor.shape))
    return Manifest(tensors, chunk_bytes, frozenset(mapped), streamed, slots, codes)


def check_policy(run: Any, version: Any) -> Policy:
    """The policy that an update will make; ManifestError if these are none."""
    # replies carry it as a 64-bit integer
    if type(version) is not int or not 0 <= version < 2**63:
        raise ManifestError(
            f"version is {excerpt(version)}; give a whole number from 0 up, below 2**63"
        )
    if type(run) is not str or not 0 < len(run) <= RUN_LENGTH or not run.isprintable():
        raise ManifestError(
            f"run is {excerpt(run)}; give a name of 1 to {RUN_LENGTH} printable characters"
        )
    return Policy(run, version)


def check_in_flight(choice: Any) -> str:
    """What becomes of requests in flight; ManifestError if it is none of ``IN_FLIGHT``."""
    if choice not in IN_FLIGHT:
        raise ManifestError(f"in_flight is {excerpt(choice)}; give one of {', '.join(IN_FLIGHT)}")
    return str(choice)


def parse_spec(name: str, entry: Any) -> TensorSpec:
    """Dtype and shape of one tensor, from ``[dtype, shape]`` on the wire; ManifestError if no
    tensor of a model is so."""
    if len(name) > LONGEST_NAME or not name.isprintable():
        raise ManifestError(f"a tensor is called {excerpt(name)}; use the names of the checkpoint")
    if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list)):
        found = excerpt(entry)
        raise ManifestError(f"{name} is described by {found}; describe it as [dtype, shape]")
    dtype, shape = entry
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ManifestError(f"{name} has dtype {excerpt(dtype)}; send one of {', '.join(DTYPES)}")
    if not all(type(size) is int and 0 < size < 2**40 for size in shape):
        found = excerpt(shape)
        raise ManifestError(f"{name} has shape {found}; sizes are whole numbers above 0")
    if len(shape) > MOST_DIMENSIONS or math.prod(shape) > MOST_ELEMENTS:
        raise ManifestError(f"{name} has shape {excerpt(shape)}, which is too large for a tensor")
    return TensorSpec(DTYPES[dtype], tuple(shape))


def _check_companions(tensors: Mapping[str, TensorSpec], name: str, spec: TensorSpec) -> None:
    dtype = _NAMES[spec.dtype]
    try:
        expected = format_of(spec.dtype).companions(spec.shape)
    except ValueError as error:
        raise ManifestError(f"{name} is {error}") from error
    for companion, suffix in ((name + suffix, suffix) for suffix in SUFFIXES):
        found = tensors.get(companion)
        if suffix not in expected and found is not None:
            raise ManifestError(
                f"{companion} comes with {name} in {dtype}; send codes with their scales, or the "
                f"weight alone"
            )
        if suffix in expected and found is None:
            raise ManifestError(f"{name} is {dtype} without {companion}; send both")
        if suffix in expected and found != expected[suffix]:
            assert found is not None
            raise ManifestError(
                f"{companion} is {_NAMES[found.dtype]} of shape {found.shape}; send "
                f"{_NAMES[expected[suffix].dtype]} of shape {expected[suffix].shape}"
            )
