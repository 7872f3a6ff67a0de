"""``update``: bring the engine to the trainer's weights, as one new policy version."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import check_in_flight, check_version
from sgl_fp8rl.protocol.states import ABORT
from trainer_bridge import hf_names
from trainer_bridge.engine_client import EngineError
from trainer_bridge.engine_connection import EngineConnection, connection_to, gpu_of, sources_for
from trainer_bridge.fsdp import NamedTensors, is_sharded, named_tensors
from trainer_bridge.transfer_plan import TransferPlan, is_aligned
from trainer_bridge.transport.rank_client import RankClients

T = TypeVar("T")


@dataclass(frozen=True)
class UpdateResult:
    """What an update did."""

    version: int
    """The policy version that generates now."""
    tensors: int
    """HF tensors that were sent."""
    bytes: int
    """Payload in bytes, read by every rank of the engine."""
    mapped_bytes: int
    """How much of it was read in place, from the trainer's own memory."""
    seconds: dict[str, float]
    """Wall time by stage: ``begin`` (check, pause, flush), ``read`` (gather and cast), ``write``
    (copy to the bucket, wait for ranks that quantize), ``commit``; and ``total``."""
    gpu_seconds: float | None
    """Time of the engine's kernels on the slowest GPU; None on a CPU."""


def update(
    model_or_named_tensors: nn.Module | NamedTensors,
    engine: Any,
    *,
    version: int,
    kv_scales: torch.Tensor | None = None,
    in_flight: str = ABORT,
) -> UpdateResult:
    """Stream weights into a running engine and commit them as policy ``version``.

    Requests that are running are aborted, finished or retracted, as ``in_flight`` says; new ones
    wait for the end of the update. Parameters on a GPU that lie where they lay at the last update
    are read in place; others pass through a bucket, quantized by the trainer's GPU where it has
    one. If anything fails after the first write, the engine refuses to generate until a later
    update is complete.

    Args:
        model_or_named_tensors: a module whose parameters have HF names (plain, or FSDP2 on several
            ranks), or a mapping or iterable of (HF checkpoint name, tensor): BF16, FP16, FP32, or
            FP8 E4M3 codes with ``<name>_scale_inv``.
        engine: an ``sgl.Engine`` or an ``http://`` address. With FSDP2 every rank calls, and only
            rank 0's engine is used; the others pass None.
        version: a whole number, greater than the engine's version.
        in_flight: what happens to running requests. ``"abort"``: they come back with what they
            have. ``"finish"``: the update begins at their end; it is refused where that takes
            longer than 570 s. ``"retract"``: they wait with what they have
            and go on under the new version, whose weights prefill prompt and tokens again; each
            token keeps the logprob and the version that it was sampled with.
        kv_scales: for an FP8 KV cache, FP32 ``[layers, 3, KV heads of the whole model]``: scales
            of K, V and Q, as ``KVCalibrator.scales`` gives them. They begin with this version.
            Of several ranks, rank 0's are used.

    Returns:
        what happened, the same on every rank.

    Raises:
        EngineError: the engine refused the update (nothing was written), or it failed.
        ManifestError: the tensors cannot make an update, such as a name that comes twice, or the
            KV scales are not for this engine.
    """
    clock = _Clock()
    check_version(version)
    check_in_flight(in_flight)
    family = None
    if isinstance(model_or_named_tensors, nn.Module):
        family = hf_names.model_type(model_or_named_tensors)
    named = named_tensors(model_or_named_tensors)
    rank0 = _Rank0(is_sharded(named))

    connection: Any = rank0.attempt(connection_to, engine)
    layout: Any = rank0.share(rank0.attempt(EngineConnection.layout, connection))

    device = gpu_of(named, layout)
    if kv_scales is not None:
        kept: Any = rank0.attempt(EngineConnection.kv_scales, connection, kv_scales, device)
        named = named if kept is None else [*named, (KV_SCALES, kept)]
    plan: Any = rank0.attempt(EngineConnection.plan, connection, named, family, device)
    planned = sources_for(named, family, layout) if plan is None else plan.sources
    session: Any = rank0.attempt(_Session, connection, plan, version, in_flight, device)
    gpu_seconds: Any = None
    try:
        rank0.share(None)
        clock.lap("begin")
        for index, (source, (_, tensor)) in enumerate(zip(planned, named, strict=True)):
            if plan is not None and plan.mapped[index]:
                continue
            whole = source.read(tensor)
            clock.lap("read")
            rank0.attempt(_Session.put, session, index, whole)
            clock.lap("write")
        gpu_seconds = rank0.attempt(_Session.finish, session)
        clock.lap("write")
        rank0.attempt(_Session.commit, session)
        gpu_seconds, facts = rank0.share((gpu_seconds, _facts(plan)))
        clock.lap("commit")
    except BaseException as error:
        if session is not None:
            session.close(error)
        raise
    tensors, nbytes, mapped_bytes = facts
    return UpdateResult(version, tensors, nbytes, mapped_bytes, clock.seconds(), gpu_seconds)


def _facts(plan: TransferPlan | None) -> tuple[int, int, int]:
    """Tensors, bytes and mapped bytes of an update; on the other ranks, places for them."""
    if plan is None:
        return 0, 0, 0
    return len(plan.views), plan.manifest.nbytes, plan.mapped_bytes


class _Session:
    """The sending side of one update."""

    def __init__(
        self,
        connection: EngineConnection,
        plan: TransferPlan,
        version: int,
        in_flight: str,
        device: torch.device | None,
    ) -> None:
        self._connection, self._plan, self._device = connection, plan, device
        if device is not None:
            torch.cuda.synchronize(device)  # the optimizer's last step is in the weights
        try:
            begun = self._begin(version, in_flight)
        except EngineError:
            connection.invalidate_layout()
            raise
        self._open = True
        self._chunk = self._turn = 0
        self._read: dict[int, torch.Tensor] = {}
        self._in_flight = 0
        try:
            self._ranks = RankClients(begun["sockets"], begun["token"])
        except EngineError:
            with suppress(EngineError):
                connection.client.control({"op": "end"})
            connection.forget()
            raise
        try:
            self._packer = connection.share(self._ranks, plan, device)
            if self._packer is not None:
                self._packer.begin()
        except Exception as error:  # whatever it is, the engines must be told
            self.close(error)
            raise

    def _begin(self, version: int, in_flight: str) -> dict[str, Any]:
        manifest = self._plan.manifest
        message = {
            "op": "begin",
            "version": version,
            "fingerprint": manifest.fingerprint,
            "in_flight": in_flight,
        }
        begun = self._connection.client.control(message)
        if "unknown" in begun:
            whole = {**manifest.to_json(), "version": version}
            begun = self._connection.client.control({**message, "manifest": whole})
        return begun

    def put(self, index: int, whole: torch.Tensor) -> None:
        """Lay a parameter into the bucket once it is its turn; full halves are sent on the way."""
        assert self._packer is not None
        if self._device is not None:
            whole = whole.to(self._device)
            whole = whole if is_aligned(whole) else whole.clone()
        self._read[index] = whole
        turns = self._plan.turns
        while self._turn < len(turns) and turns[self._turn][1] in self._read:
            chunk, source = turns[self._turn]
            while self._chunk < chunk:
                self._send_chunk()
            self._packer.put(source, self._read[source], chunk)
            self._turn += 1
            if self._turn > self._plan.last_turns[source]:
                del self._read[source]

    def finish(self) -> float | None:
        """Send what is left, and have every rank check that nothing is missing.

        Returns:
            seconds that the slowest GPU took to write, or None on a CPU.
        """
        while self._chunk < len(self._plan.chunks):
            self._send_chunk()
        while self._in_flight:
            self._wait_chunk()
        if self._packer is not None:
            self._packer.finish()
        seconds = [reply["gpu_seconds"] for reply in self._ranks.ask({"op": "finish"})]
        return None if None in seconds else max(seconds)

    def commit(self) -> None:
        """Commit on all ranks, and wait until the engine generates again.

        Raises:
            EngineError: a rank could not; the engine is quarantined.
        """
        self._ranks.ask({"op": "commit"})
        self._open = False
        self._ranks.close()
        self._connection.client.control({"op": "end"})
        self._connection.committed()

    def close(self, error: BaseException) -> None:
        """Abort the session unless it is committed; the engine's quarantine says why."""
        if not self._open:
            return
        self._open = False
        why = str(error) or type(error).__name__
        self._ranks.send({"op": "abort", "reason": f"the trainer gave up the update: {why}"})
        self._ranks.close()
        # the error that brought us here says more than an engine that is gone
        with suppress(EngineError):
            self._connection.client.control({"op": "end"})
        self._connection.forget()

    def _send_chunk(self) -> None:
        if self._packer is not None:
            self._packer.complete(self._chunk)
        if self._in_flight == 1:
            self._wait_chunk()  # the other half must be free before it is filled
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()  # the half is filled
        self._ranks.send({"op": "chunk", "index": self._chunk})
        self._chunk += 1
        self._in_flight += 1

    def _wait_chunk(self) -> None:
        self._ranks.wait()
        self._in_flight -= 1


class _Rank0:
    """Rank 0 speaks with the engine; what it learns and where it fails reaches every rank."""

    def __init__(self, sharded: bool) -> None:
        self._sharded = sharded
        self._is_rank0 = not sharded or dist.get_rank() == 0
        self._error: Exception | None = None

    def attempt(self, action: Callable[..., T], *args: Any) -> T | None:
        """Call ``action`` on rank 0, unless something failed before.

        An error waits for the next ``share``: until then the ranks must go on gathering together.
        """
        if not self._is_rank0 or self._error is not None:
            return None
        try:
            return action(*args)
        except Exception as error:  # noqa: BLE001  (the other ranks wait, and are told it)
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
