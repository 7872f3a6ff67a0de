"""What ranks of a trainer tell each other through the job's store: JSON, of which nothing is run.

Whoever reaches the store can write there. What is read is rebuilt from plain values, tensors,
errors, and classes that are named here or marked with ``exchanged``.
"""

import base64
import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch

from sgl_fp8rl.protocol.cuda_memory import Handle
from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.values import excerpt
from trainer_bridge.engines.engine_client import EngineError

C = TypeVar("C", bound=type)

_PLAIN = (str, int, float, bool, type(None))
_CLASSES: dict[str, type] = {}
"""By name."""
_NAMES: dict[type, str] = {}


def exchanged(cls: C) -> C:
    """Let ranks exchange a NamedTuple, a dataclass, or an exception of one sentence."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    _CLASSES[name], _NAMES[cls] = cls, name
    return cls


for _each in (
    *(Policy, Handle, EngineError, ManifestError),
    *(AssertionError, KeyError, MemoryError, NotImplementedError, OSError, RuntimeError),
    *(TimeoutError, TypeError, ValueError, torch.OutOfMemoryError),
):
    exchanged(_each)


def pack(value: Any) -> bytes:
    """The bytes of a value."""
    return json.dumps(_packed(value)).encode()


def unpack(data: bytes) -> Any:
    """The value of ``pack``; an error of a class that is not exchanged is one of its base class."""
    try:
        return json.loads(data, object_hook=_unpacked)
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError):
        raise ValueError(
            f"the job's store has {excerpt(data)} where a rank should have written; install the "
            f"same sgl-fp8rl on all ranks, and let nobody else reach the store"
        ) from None


def _packed(value: Any) -> Any:
    """JSON, in which an object is a kind and its content."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_packed(each) for each in value]
    if kind in (tuple, torch.Size, set):
        return {"set" if kind is set else "tuple": [_packed(each) for each in value]}
    if kind is dict:
        return {"dict": [[_packed(key), _packed(each)] for key, each in value.items()]}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().view(-1)
        data = base64.b64encode(content.view(torch.uint8).numpy().tobytes()).decode()
        return {"tensor": [_packed(value.dtype), list(value.shape), data]}
    if isinstance(value, Exception):
        known = next((_NAMES[base] for base in kind.__mro__ if base in _NAMES), None)
        return {"error": [known, _sentence(value, known), getattr(value, "status", None)]}
    if kind in _NAMES:
        names = [each.name for each in fields(value)] if is_dataclass(value) else value._fields
        return {_NAMES[kind]: [_packed(getattr(value, name)) for name in names]}
    raise TypeError(f"ranks do not exchange a {kind.__name__}; mark its class as exchanged")


def _sentence(error: Exception, known: str | None) -> str:
    if known is None:
        return f"{type(error).__name__}: {error}"
    # that of a KeyError is quoted by str()
    return error.args[0] if [type(each) for each in error.args] == [str] else str(error)


def _unpacked(packed: dict[str, Any]) -> Any:
    ((kind, content),) = packed.items()
    if kind in _READERS:
        return _READERS[kind](content)
    cls = _CLASSES[kind]
    if issubclass(cls, Exception):
        raise TypeError
    return cls(*content)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError
    return dtype


def _tensor(content: list[Any]) -> torch.Tensor:
    dtype, shape, data = content
    return torch.frombuffer(bytearray(base64.b64decode(data)), dtype=dtype).reshape(shape)


def _error(content: list[Any]) -> Exception:
    known, sentence, status = content
    cls = RuntimeError if known is None else _CLASSES[known]
    if not issubclass(cls, Exception) or not isinstance(sentence, str):
        raise TypeError
    return cls(sentence, status) if issubclass(cls, EngineError) else cls(sentence)


_READERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "dict": dict,
    "dtype": _dtype,
    "tensor": _tensor,
    "error": _error,
}
