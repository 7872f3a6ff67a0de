"""``update``: bring the engine to the trainer's weights, as one new policy version."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from sgl_fp8rl.weight_update.apply import aligned_rows
from sgl_fp8rl.weight_update.manifest import Manifest, TensorSpec, describe
from sgl_fp8rl.weight_update.wire import FAULTS
from trainer_bridge.engine_client import EngineClient, EngineError, connect
from trainer_bridge.fsdp import NamedTensors, is_sharded, pairs_of, sources
from trainer_bridge.transport.memory import MemoryTransport, half_bytes

T = TypeVar("T")


@dataclass(frozen=True)
class UpdateResult:
    """What an update did."""

    version: int
    """The policy version that generates now."""
    tensors: int
    """HF tensors that were sent."""
    bytes: int
    """Payload in bytes, sent once and read by every rank of the engine."""
    seconds: dict[str, float]
    """Wall time by stage: ``begin`` (check, pause, flush), ``read`` (gather and cast), ``write``
    (copy to the bucket, wait for ranks that quantize), ``commit``; and ``total``."""


def update(
    model_or_named_tensors: nn.Module | NamedTensors, engine: Any, *, version: int
) -> UpdateResult:
    """Stream weights into a running engine and commit them as policy ``version``.

    Requests that are running are aborted and come back with what they have; new ones wait for the
    end of the update. If anything fails after the first write, the engine refuses to generate until
    a later update is complete.

    Args:
        model_or_named_tensors: a module whose parameters have HF names (plain, or FSDP2 on several
            ranks), or a mapping or iterable of (HF checkpoint name, tensor): BF16, FP16, FP32, or
            FP8 E4M3 codes with ``<name>_scale_inv``.
        engine: an ``sgl.Engine`` or an ``http://`` address. With FSDP2 every rank calls, and only
            rank 0's engine is used; the others pass None.
        version: a whole number, greater than the engine's version.

    Returns:
        what happened, the same on every rank.

    Raises:
        EngineError: the engine refused the update (nothing was written), or it failed.
        ManifestError: the tensors cannot make an update, such as a name that comes twice.
    """
    clock = _Clock()
    if not isinstance(model_or_named_tensors, nn.Module):
        model_or_named_tensors = list(pairs_of(model_or_named_tensors))  # it is read twice
    sharded = is_sharded(model_or_named_tensors)
    lead = _Lead(sharded)

    client: Any = lead.attempt(connect, engine)
    layout: Any = lead.share(lead.attempt(_ask_layout, client))
    planned = sources(model_or_named_tensors, getattr(torch, layout["dtype"]), layout["fp32"])
    manifest = describe((pair for source in planned for pair in source.announce()), version)
    session: Any = lead.attempt(_Session, client, manifest, layout)
    try:
        lead.share(None)
        clock.lap("begin")
        for source in planned:
            for name, tensor in source.read():
                clock.lap("read")
                lead.attempt(_Session.put, session, name, tensor)
                clock.lap("write")
        lead.attempt(_Session.finish, session)
        clock.lap("write")
        lead.attempt(_Session.commit, session)
        lead.share(None)
        clock.lap("commit")
    finally:
        if session is not None:
            session.close()
    return UpdateResult(version, len(manifest.tensors), manifest.nbytes, clock.seconds())


class _Session:
    """The sending side of one update."""

    def __init__(self, client: EngineClient, manifest: Manifest, layout: dict[str, Any]) -> None:
        self._client = client
        part_bytes = half_bytes(layout["bucket_bytes"])
        # known before the first write, so refused before it
        self._steps = {
            name: _rows_at_once(name, spec, part_bytes, whole=name in layout["fallback"])
            for name, spec in manifest.tensors.items()
        }
        begun = client.control({"op": "begin", "manifest": manifest.to_json()})
        self._open = True
        try:
            self._transport = MemoryTransport(
                begun["sockets"], begun["token"], layout["bucket_bytes"]
            )
        except EngineError:
            with suppress(EngineError):
                client.control({"op": "end"})
            raise

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Send one tensor, in pieces where it is larger than half of the bucket."""
        length = tensor.shape[0] if tensor.dim() else 1
        step = self._steps[name]
        for start in range(0, length, step):
            rows = (start, min(start + step, length))
            self._transport.put(name, tensor[slice(*rows)] if tensor.dim() else tensor, rows)

    def finish(self) -> None:
        """Have every rank hold that nothing is missing."""
        self._transport.finish()

    def commit(self) -> None:
        """Commit on all ranks, and wait until the engine generates again.

        Raises:
            EngineError: a rank could not; the engine is quarantined.
        """
        self._transport.commit()
        self._open = False
        self._transport.close()
        self._client.control({"op": "end"})

    def close(self) -> None:
        """Abort the session unless it is committed."""
        if not self._open:
            return
        self._open = False
        self._transport.abort("the trainer gave up the update")
        self._transport.close()
        # the error that brought us here says more than an engine that is gone
        with suppress(EngineError):
            self._client.control({"op": "end"})


def _rows_at_once(name: str, spec: TensorSpec, part_bytes: int, whole: bool) -> int:
    """How many rows of a tensor go into half of the bucket; ``whole``: it cannot be split."""
    length = spec.shape[0] if spec.shape else 1
    row_bytes = spec.nbytes // length
    fits = part_bytes // row_bytes
    if fits >= length:
        return length
    unit = length if whole else aligned_rows(spec.shape)
    if fits < unit:
        raise EngineError(
            f"{unit} rows of {name} need {unit * row_bytes} bytes, more than half of the "
            f"engine's bucket; start the engine with a larger --fp8rl-bucket-bytes"
        )
    return fits // unit * unit


class _Lead:
    """Rank 0 speaks with the engine; what it learns and where it fails reaches every rank."""

    def __init__(self, sharded: bool) -> None:
        self._sharded = sharded
        self._leads = not sharded or dist.get_rank() == 0
        self._error: Exception | None = None

    def attempt(self, action: Callable[..., T], *args: Any) -> T | None:
        """Call ``action`` on rank 0, unless something failed before.

        An error waits for the next ``share``: until then the ranks must go on gathering together.
        """
        if not self._leads or self._error is not None:
            return None
        try:
            return action(*args)
        except FAULTS as error:
            self._error = error
            return None

    def share(self, value: T) -> T:
        """Rank 0's value, on every rank.

        Raises:
            EngineError, ManifestError: an attempt failed; on every rank.
        """
        if self._sharded:
            box: list[Any] = [value, self._error]
            dist.broadcast_object_list(box, src=0)
            value, self._error = box
        if self._error is not None:
            raise self._error
        return value


def _ask_layout(client: EngineClient) -> dict[str, Any]:
    return client.control({"op": "layout"})


class _Clock:
    """Adds up wall time by stage."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """Count the time since the last lap to ``stage``."""
        now = time.perf_counter()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """Seconds of each stage and of all."""
        return {**self._seconds, "total": time.perf_counter() - self._started}
