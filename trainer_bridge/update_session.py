"""The sending side of one update: begin, chunks, finish, commit, or abort."""

from contextlib import suppress
from typing import Any

import torch

from sgl_fp8rl.formats.weight_format import TensorSpec
from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.values import excerpt
from trainer_bridge.announcement import as_announced
from trainer_bridge.engine_client import EngineError
from trainer_bridge.engine_connection import EngineConnection
from trainer_bridge.transfer_plan import TransferPlan, is_aligned
from trainer_bridge.transport.rank_client import RankClients

TIED_HEAD = "lm_head.weight"
"""Frameworks stream it where it is tied too."""


def slowest_gpu(replies: list[dict[str, Any]]) -> float | None:
    """Seconds of the slowest GPU in the ranks' replies to ``finish``; None on a CPU.

    Raises:
        EngineError: a rank reports something else.
    """
    seconds: list[Any] = [reply.get("gpu_seconds") for reply in replies]
    known = [each for each in seconds if type(each) in (int, float) and 0 <= each < float("inf")]
    if len(known) + seconds.count(None) != len(seconds):
        raise EngineError(
            f"a rank of the engine reports {excerpt(seconds)} as its seconds; install the same "
            f"sgl-fp8rl on both sides"
        )
    return None if None in seconds else max(known)


class UpdateSession:
    """The sending side of one update."""

    def __init__(
        self,
        connection: EngineConnection,
        plan: TransferPlan,
        policy: Policy,
        in_flight: str,
        device: torch.device | None,
    ) -> None:
        self._connection, self.plan, self._device = connection, plan, device
        self._policy = policy
        self._open = False
        try:
            begun = self._begin(in_flight)
        except EngineError:
            connection.invalidate_layout()
            raise
        self.committed_before = bool(begun.get("committed"))
        """Whether an earlier try at this update committed, though its answer did not arrive."""
        if self.committed_before:
            connection.committed(policy)
            return
        self._open = True
        self._token: Any = begun.get("token")
        self._chunk = self._turn = 0
        self._read: dict[int, torch.Tensor] = {}
        self._came: set[int] = set()
        self._order: list[str] = []
        """Tensors of a stream that the engine is told of with the next chunk."""
        self._in_flight = 0
        try:
            self._ranks = RankClients(begun.get("sockets"), self._token)
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

    def _begin(self, in_flight: str) -> dict[str, Any]:
        manifest, policy = self.plan.manifest, self._policy
        unanswered, token = self._connection.unanswered
        message = {
            "op": "begin",
            "run": policy.run,
            "version": policy.version,
            "fingerprint": manifest.fingerprint,
            "in_flight": in_flight,
            "retry_of": token if policy == unanswered else None,
        }
        begun = self._connection.client.control(message)
        if "unknown" in begun:
            whole = {**manifest.to_json(), "version": policy.version}
            begun = self._connection.client.control({**message, "manifest": whole})
        return begun

    def put_named(self, name: str, tensor: torch.Tensor) -> None:
        """Lay the next tensor of a stream into the bucket.

        Raises:
            ManifestError: it was not announced, or came before.
        """
        plan, index = self.plan, self.plan.index_of(name)
        if index is None:
            if self._connection.has_tied_head and name == TIED_HEAD:
                return  # a copy of the embedding, which checkpoints leave out
            raise ManifestError(
                f"{name} was not announced; announce every tensor of the stream, by the names of "
                f"the HF checkpoint"
            )
        if index in self._came:
            raise ManifestError(f"{name} comes twice in the stream; send each tensor once")
        source = plan.sources[index]
        # as the packer will read it
        whole = as_announced(name, tensor, TensorSpec(source.held_as, tuple(source.shape)))
        self._came.add(index)
        if plan.streamed:
            self._order += plan.add(index)
        self.put(index, whole)

    def end_stream(self) -> None:
        """Check that the stream was complete.

        Raises:
            ManifestError: a tensor of the last stream is missing; the engine checks the first.
        """
        missing = sorted(set(range(len(self.plan.sources))) - self._came)
        if missing and not self.plan.streamed:
            raise ManifestError(
                f"the stream ended without {len(missing)} tensors that the last one brought, "
                f"{self.plan.sources[missing[0]].cuts[0][0]} among them; stream the whole model"
            )

    def put(self, index: int, whole: torch.Tensor) -> None:
        """Lay a parameter into the bucket once it is its turn; full slots are sent on the way."""
        assert self._packer is not None
        if self._device is not None:
            whole = whole.to(self._device)
            whole = whole if is_aligned(whole) else whole.clone()
        self._read[index] = whole
        turns = self.plan.turns
        while self._turn < len(turns) and turns[self._turn][1] in self._read:
            chunk, source = turns[self._turn]
            while self._chunk < chunk:
                self._send_chunk()
            while self._in_flight >= self.plan.manifest.slots:
                self._wait_chunk()  # its slot must be free before it is filled
            self._packer.put(source, self._read[source], chunk)
            self._turn += 1
            if self._turn > self.plan.last_turns[source]:
                del self._read[source]

    def finish(self) -> float | None:
        """Send what is left, and have every rank check that nothing is missing.

        Returns:
            seconds that the slowest GPU took to write, or None on a CPU.
        """
        while self._chunk < len(self.plan.chunks):
            self._send_chunk()
        while self._in_flight:
            self._wait_chunk()
        if self._packer is not None:
            self._packer.finish()
        return slowest_gpu(self._ranks.ask({"op": "finish"}))

    def commit(self) -> None:
        """Commit on all ranks, and wait until the engine generates again.

        Where the answer gets lost, another try at this policy learns whether it committed.

        Raises:
            EngineError: a rank could not; the engine is quarantined.
        """
        self._connection.unanswered = self._policy, self._token
        self._ranks.ask({"op": "commit"})
        self._open = False
        self._connection.keep(self._ranks)
        self._connection.client.control({"op": "end"})
        if self.plan.streamed:
            self._connection.remember_stream(self.plan)
        self._connection.committed(self._policy)

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
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()  # the slot is filled
        order = {"order": self._order} if self.plan.streamed else {}
        self._ranks.send({"op": "chunk", "index": self._chunk, **order})
        self._order = []
        self._chunk += 1
        self._in_flight += 1

    def _wait_chunk(self) -> None:
        self._ranks.wait()
        self._in_flight -= 1
