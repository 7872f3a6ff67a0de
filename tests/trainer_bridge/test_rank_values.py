"""What ranks exchange comes back as it was, and what others write is refused and never run."""

from typing import Any

import pytest
import torch

from sgl_fp8rl.protocol.cuda_memory import Handle
from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.place import here
from sgl_fp8rl.protocol.policy import Policy
from trainer_bridge.chain.index import ChainError
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.ranks.rank_values import pack, unpack
from trainer_bridge.session.transaction import BeginResult, MissedCommitError
from trainer_bridge.shards.placed_shards import CodesWanted, PlacedShards
from trainer_bridge.transport.cuda_ipc import Placement
from trainer_bridge.transport.rank_client import UnreachableMemoryError
from trainer_bridge.updates import shared_sending
from trainer_bridge.updates.shared_sending import SendResult
from trainer_bridge.updates.update import PolicyRequest

POLICY = Policy("run", 3)
PLACEMENT = Placement((1,), (2,), (Handle("ab", 8, "GPU-1"),), ((0, 4),), "seed")
LAYOUT = {"formats": {"block_fp8": ["a", "b"]}, "gpus": [], "fp32": None}
VALUES = [
    *(None, True, 3, 2**62, -1.5, float("inf"), "a \ud800", [], (), {}, set()),
    *([1, [2, (3, None)]], {"a": {1: (2,)}, 3: []}, {"x", "y"}, torch.Size([2, 3])),
    *(torch.bfloat16, POLICY, PolicyRequest(POLICY, "abort", False), CodesWanted(torch.half, (1,))),
    PlacedShards(here(), ((0, 4), None), {0: 0}, PLACEMENT),
    BeginResult(POLICY, True, [LAYOUT], {"engine 1": "gone"}, [[True]], False, True, False),
    (SendResult(None, {"http://a": "late"}, 7), ({"host": "a", "port": 1}, "token", 2.0)),
    shared_sending.Offer(2, {}, LAYOUT, "f", [], ("", "a")),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back(value: Any) -> None:
    found = unpack(pack(value))
    assert found == value
    assert type(found) is (tuple if isinstance(value, torch.Size) else type(value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_a_tensor_comes_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).mul(9).to(dtype)
    found = unpack(pack([tensor.mT if tensor.dim() > 1 else tensor]))[0]
    expected = tensor.mT if tensor.dim() > 1 else tensor
    assert found.dtype == dtype and torch.equal(found, expected)


class LocalError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (EngineError("refused", 503), EngineError, "refused"),
        (MissedCommitError("missed"), MissedCommitError, "missed"),
        (UnreachableMemoryError("far"), EngineError, "far"),
        (ManifestError("it comes twice"), ManifestError, "it comes twice"),
        (ChainError("older"), ChainError, "older"),
        (KeyError("lm_head"), KeyError, "'lm_head'"),
        (FileNotFoundError(2, "No such file", "a"), OSError, "[Errno 2] No such file: 'a'"),
        (torch.OutOfMemoryError("CUDA"), torch.OutOfMemoryError, "CUDA"),
        (UnicodeDecodeError("ascii", b"a", 0, 1, "why"), ValueError, "'ascii' codec can't"),
        (LocalError("of a test"), RuntimeError, "LocalError: of a test"),
        (TimeoutError(), TimeoutError, ""),
    ],
)
def test_an_error_comes_back(error: Exception, kind: type, sentence: str) -> None:
    found = unpack(pack(error))
    assert type(found) is kind
    assert str(found).startswith(sentence)
    assert getattr(found, "status", None) == getattr(error, "status", None)


@pytest.mark.parametrize(
    "written",
    [
        *(b"", b"\xff", b"\x80\x04N.", b"{", b"[" * 100_000, b"{}", b'{"a": 1, "b": 2}'),
        *(b'{"os.system": ["true"]}', b'{"set": [[1]]}', b'{"dict": [1]}', b'{"dtype": "load"}'),
        *(b'{"dtype": 3}', b'{"tensor": [3, [2], "AA=="]}', b'{"builtins.ValueError": ["a"]}'),
        b'{"error": ["builtins.eval", "1", null]}',
        b'{"error": ["builtins.ValueError", {"dict": []}, null]}',
        b'{"sgl_fp8rl.protocol.policy.Policy": ["one", 2, 3]}',
    ],
)
def test_what_another_program_writes_is_refused(written: bytes) -> None:
    with pytest.raises(ValueError, match="let nobody else reach the store"):
        unpack(written)


def test_other_classes_are_not_exchanged() -> None:
    with pytest.raises(TypeError, match="mark its class as exchanged"):
        pack([1, {"a": object()}])
