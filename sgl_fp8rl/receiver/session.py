"""The session of an update on one rank: write each chunk once, then finish.

``rank_server.py`` drives it.
"""

from typing import TYPE_CHECKING, Any

import torch

from sgl_fp8rl.protocol.manifest import ManifestError, wrong_names
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.values import are_names, excerpt
from sgl_fp8rl.receiver.kv import incoming_scales
from sgl_fp8rl.receiver.kv.scales import KVScales
from sgl_fp8rl.receiver.routes.route_tracer import WriteWatch
from sgl_fp8rl.receiver.writers.weight_writer import UndoLog, WeightWriter

if TYPE_CHECKING:
    from sgl_fp8rl.receiver.engine_weights import EngineWeights


class SessionError(RuntimeError):
    """An update that failed after it began; the engine is quarantined."""


class Session:
    """The writes of one update on one rank."""

    def __init__(self, weights: "EngineWeights", writer: WeightWriter, policy: Policy) -> None:
        self.weights = weights
        self.writer = writer
        self.policy = policy
        self.previous = (weights.state, weights.reason)
        self.finished = False
        self.kv_scales: torch.Tensor | None = None
        """What the update brought and ``finish`` found sound; in force from ``commit`` on."""
        self.base = weights.snapshot_of(writer)
        """The update that is stored, of which changes may come; empty if of none."""
        self.snapshot = ""
        """What its trainer calls this update, once it commits."""
        self._undo_log: UndoLog = []
        self._is_whole = False
        """Whether a chunk came that was no change."""
        self._written: set[int] = set()
        writer.begin()
        # before the trainer connects: it may then free what this update does not use
        if not writer.manifest.mapped:
            weights.memory.close_segments()
        if not writer.uses_bucket:
            weights.memory.close_bucket()

    @property
    def dirty(self) -> bool:
        """Whether engine storage was written; before that, the old version is still whole."""
        return self.writer.dirty

    @property
    def can_undo(self) -> bool:
        """Whether all that was written are changes."""
        return self.dirty and not self._is_whole

    def extend(self, names: Any) -> None:
        """Take note of the next tensors of a stream, in their order.

        Raises:
            SessionError: they are not tensors that are due, or belong to a chunk that was written.
        """
        if not are_names(names):
            raise SessionError(f"a chunk announces {excerpt(names)}; send a list of tensor names")
        written = {index: len(self.writer.chunks[index]) for index in self._written}
        try:
            for name in names:
                self.writer.add(name)
        except ManifestError as error:
            raise SessionError(str(error)) from error
        for index, length in written.items():
            if len(self.writer.chunks[index]) != length:
                raise SessionError(f"chunk {index} was written before all of it was announced")

    def write(self, index: Any) -> None:
        """Write chunk ``index``, which lies in the trainer's shared memory.

        Raises:
            SessionError: the chunk came before, or there is none of that number.
            ValueError: NaN or Inf, or the memory is not what was announced.
        """
        self._check_awaited(index)
        self._is_whole = True
        self.forget_changes()
        self.writer.write(index, self.writer.chunk_source(index, self.weights.memory))
        self._written.add(index)

    def change(self, index: Any, size: Any) -> None:
        """Write what changes in chunk ``index``: a delta of ``size`` bytes, which lies in its slot.

        Raises:
            SessionError, ValueError: as ``write``; or this rank does not hold what changes are of.
        """
        self._check_awaited(index)
        if not self.base:
            raise SessionError(f"chunk {index} is a change of what is not here; send it whole")
        manifest = self.writer.manifest
        slot = self.weights.memory.bucket_for(manifest).slot(index, manifest)
        if type(size) is not int or not 0 <= size <= slot.content.numel():
            raise SessionError(f"a change of {excerpt(size)} bytes is more than its chunk")
        self.writer.change(index, slot.content[:size], None if self._is_whole else self._undo_log)
        self._written.add(index)

    def undo(self) -> None:
        """Write back what changed: the version before is whole again.

        Raises:
            SessionError: a parameter moved.
            RuntimeError, ValueError: it cannot be written, or what was there is not known.
        """
        self.writer.check_complete()
        self.writer.begin()
        while self._undo_log:
            index, back = self._undo_log[-1]
            self.writer.change(index, back, log=None)
            self._undo_log.pop()
        self.writer.table.fill_constants()
        self.weights.derived.refresh()
        self.weights.check_addresses()
        self.writer.finish()

    def forget_changes(self) -> None:
        """Free what ``undo`` needs: it will not be called."""
        self._undo_log.clear()

    def _check_awaited(self, index: Any) -> None:
        known = type(index) is int and 0 <= index < len(self.writer.chunks)
        if not known or index in self._written:
            raise SessionError(f"chunk {excerpt(index)} is not awaited; write each chunk once")

    def finish(self) -> float | None:
        """Check that every chunk came, and refresh what is derived from them.

        Returns:
            seconds that the GPU took to write the update, or None on a CPU.

        Raises:
            SessionError: something is missing, or a parameter moved.
            ValueError: NaN or Inf, or KV scales that are not positive.
        """
        if due := self.writer.due():
            raise SessionError(wrong_names(missing=due))
        missing = sorted(set(range(len(self.writer.chunks))) - self._written)
        if missing:
            raise SessionError(
                f"{len(missing)} of {len(self.writer.chunks)} chunks are missing, "
                f"{self.writer.chunks[missing[0]][0].name} among them; send every chunk of the "
                f"manifest before commit"
            )
        deferred = self.writer.deferred
        kv_scales = {name: deferred[name] for name in self.writer.kv_scales}
        if deferred.keys() - kv_scales:
            self._load_deferred()
        self.writer.table.fill_constants()
        self.weights.derived.refresh()
        self.weights.check_addresses()
        seconds = self.writer.finish()  # a GPU may have written until now
        self.writer.end()
        kv = self.weights.kv
        if kv_scales and isinstance(kv, KVScales):
            self.kv_scales = incoming_scales.assemble(kv_scales, kv.layers, kv.heads.total)
            kv.check(self.kv_scales)
        self.finished = True
        return seconds

    def _load_deferred(self) -> None:
        """Give SGLang's own loader the tensors that have no routes."""
        table = self.writer.table
        tensors = {n: t for n, t in self.writer.deferred.items() if n not in self.writer.kv_scales}
        for name, tensor in tensors.items():
            _check_finite(name, tensor)
        self.writer.dirty = True
        with WriteWatch(self.weights.model) as watch:
            self.weights.model.load_weights(iter(tensors.items()))  # type: ignore[operator]
        unwritten = sorted(table.by_loader - watch.written)
        if unwritten:
            raise SessionError(f"SGLang's loader left {unwritten[0]} unwritten; report this")
        for name in table.by_loader:
            # after the cast: a large FP32 value is Inf in FP16 storage
            _check_finite(name, table.parameters[name])


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name} holds NaN or Inf; check the trainer's weights")
