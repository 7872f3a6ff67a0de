"""What an adapter of a framework must do, as checks that its maintainers run in their own tests.

An adapter brings weights (an iterator), an engine (an address or a client) and rollouts (tokens
with their versions). Each check raises ``ContractError`` with a sentence. docs/frameworks.md says
how an adapter is made.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sgl_fp8rl.formats.weight_format import WEIGHT_DTYPES
from sgl_fp8rl.protocol.checkpoint_headers import read_headers, weight_files
from sgl_fp8rl.protocol.states import State
from trainer_bridge import UpdateResult, update
from trainer_bridge.engine_client import EngineError, connect
from trainer_bridge.update import RUN
from trainer_bridge.update_session import TIED_HEAD

Pairs = Iterator[tuple[str, torch.Tensor]]
Walk = Callable[[], Pairs]
"""Begins another walk over the weights, as the framework does at each update."""
Sample = Callable[[], list[int]]
"""Samples one request in the framework's way: the policy version of each of its tokens.

It raises where the engine refuses the request."""


class ContractError(AssertionError):
    """An adapter that would fail, or lose a guarantee, in training."""


def check_weights(walk: Walk, checkpoint: Path) -> None:
    """The iterator brings every tensor of the checkpoint once, whole, at each walk.

    Args:
        checkpoint: folder of the HF checkpoint that was trained from.

    Raises:
        ContractError: it does not.
    """
    specs = read_headers(weight_files(checkpoint))
    for _ in range(2):
        found: set[str] = set()
        for name, tensor in walk():
            _require(name not in found, f"{name} comes twice in one walk; yield it once")
            found.add(name)
            _require(
                name in specs or name == TIED_HEAD,
                f"{name} is not in the checkpoint; yield the names of the HF checkpoint",
            )
            _require(
                not isinstance(tensor, DTensor), f"{name} is sharded; gather it before the yield"
            )
            _require(
                tensor.dtype in WEIGHT_DTYPES,
                f"{name} is {tensor.dtype}; yield BF16, FP16 or FP32",
            )
            if name in specs:
                _require(
                    tuple(tensor.shape) == specs[name].shape,
                    f"{name} has shape {tuple(tensor.shape)}, in the checkpoint "
                    f"{specs[name].shape}; yield whole tensors in the checkpoint's layout",
                )
        missing = sorted(specs.keys() - found - {TIED_HEAD})
        _require(not missing, f"{missing[:1]} did not come; yield every tensor at every walk")


def check_engine(engine: Any) -> None:
    """Control messages get their reply, and refusals come as ``EngineError``.

    Raises:
        ContractError: they do not.
    """
    status = connect(engine).control({"op": "status"})
    _require(
        {"run", "version", "state"} <= status.keys(),
        f"the reply to a status message is {status}; return the engine's reply as it is",
    )
    try:
        reply: Any = connect(engine).control({"op": "nothing"})
    except EngineError as error:
        _require(
            error.status == 400, f"a refusal has status {error.status}; keep the engine's, 400"
        )
        _require(len(str(error)) > 0, "a refusal has no sentence; keep the engine's")
    except Exception as error:
        raise ContractError(f"a refusal came as {error!r}; raise EngineError") from error
    else:
        raise ContractError(f"a refusal came as the reply {reply}; raise EngineError")


def check_updates(engine: Any, walk: Walk, sample: Sample) -> UpdateResult:
    """Updates commit, fail and heal as docs/guarantees.md says, seen through the adapter.

    Afterwards the engine serves what ``walk`` brings.

    Returns:
        the result of the last update.

    Raises:
        ContractError: they do not.
    """
    client = connect(engine)
    status = client.control({"op": "status"})
    version = status["version"] + 1 if status["run"] == RUN else 0
    update(walk(), engine, version=version)
    _require_versions(sample(), version)

    whole = sum(1 for _ in walk())
    for pairs, number, why in (
        (_Counted(walk()), version, f"version {version} came again"),
        (_Counted(_with_nan(walk())), version + 1, "a tensor held NaN"),
    ):
        try:
            update(pairs, engine, version=number)
        except (EngineError, ValueError):
            pass
        else:
            raise ContractError(f"{why}, and the update was committed; pass updates on unchanged")
        _require(
            pairs.count == whole,
            f"{why}, and {pairs.count} of {whole} tensors were read; pass the iterator itself: "
            f"other ranks wait in its collectives",
        )
    state = client.control({"op": "status"})["state"]
    _require(state == State.QUARANTINED.value, f"after a failed update the engine is {state}")
    try:
        versions = sample()
    except Exception:  # noqa: BLE001  (whatever the framework raises)
        pass
    else:
        raise ContractError(f"a quarantined engine was sampled, versions {versions}; raise its 503")
    healed = update(walk(), engine, version=version + 2)
    _require_versions(sample(), version + 2)
    return healed


class _Counted:
    """Counts what is read of an iterator."""

    def __init__(self, pairs: Pairs) -> None:
        self.count = 0
        self._pairs = pairs

    def __iter__(self) -> "_Counted":
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        pair = next(self._pairs)
        self.count += 1
        return pair


def _with_nan(pairs: Pairs) -> Pairs:
    """The second matrix is spoiled: something was written before it."""
    matrices = 0
    for name, tensor in pairs:
        matrices += tensor.dim() > 1
        if matrices == 2 and tensor.dim() > 1:
            tensor = torch.full_like(tensor, float("nan"))
        yield name, tensor


def _require_versions(found: list[int], version: int) -> None:
    _require(
        bool(found) and set(found) == {version},
        f"tokens of version {version} are said to be of {sorted(set(found))}; return "
        f"meta_info['policy_version'], which has an entry for each token",
    )


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ContractError(otherwise)
