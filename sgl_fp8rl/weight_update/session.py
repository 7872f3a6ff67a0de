"""An update session: begin -> write chunks -> commit, or abort. Only a committed version generates.

One ``EngineWeights`` lives beside the model on each rank. It knows nothing of sockets or SGLang's
scheduler; ``rank_server.py`` drives it.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from server_args import Fp8RLServerArgs
from sgl_fp8rl.kv_cache import incoming_scales
from sgl_fp8rl.kv_cache.scales import KVScales
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import Manifest, ManifestError
from sgl_fp8rl.protocol.policy import CHECKPOINT, Policy
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.protocol.values import are_names, excerpt
from sgl_fp8rl.weight_update.route_tracer import WriteWatch, record_routes
from sgl_fp8rl.weight_update.routes import RouteError, RouteTable, shapes_of
from sgl_fp8rl.weight_update.shared_memory import SharedMemory
from sgl_fp8rl.weight_update.weight_writer import WeightWriter

logger = logging.getLogger(__name__)

WRITERS_KEPT = 4
"""Writers that a rank remembers: a trainer has one for its bucket and one for mapped parameters."""

WEIGHTS_TAG = "weights"
"""SGLang's tag of the weights' memory."""
RUNS_KEPT = 64
"""Runs that a rank remembers to have been replaced by another."""


class SessionError(RuntimeError):
    """An update that failed after it began; the engine is quarantined."""


class EngineWeights:
    """The weights of one rank: its routes, its policy version and its state.

    Args:
        kv: the scales of an FP8 KV cache, or None where it is not FP8.
        options: the engine's, by default the defaults.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        kv: KVScales | None = None,
        options: Fp8RLServerArgs | None = None,
    ) -> None:
        self.model = model
        self.options = options or Fp8RLServerArgs()
        self.dtype = dtype
        self.kv = kv
        self.device = next(model.parameters()).device
        self.table: RouteTable | None = None
        self.memory = SharedMemory(self.device)
        self.policy = CHECKPOINT
        """What was committed last; while the engine is quarantined it does not generate."""
        self.transaction = ""
        """The one that committed ``policy``, by the name that its trainer gave it."""
        self._in_doubt: tuple[str, Session] | None = None
        """A transaction that this engine voted for, and was not told the end of."""
        self.state = State.QUARANTINED
        self.reason = "no complete set of weights has been loaded yet"
        self.released_tags: frozenset[str] = frozenset()
        """What the memory saver has taken away, by SGLang's tags."""
        self.waiting: list[Any] = []
        """Requests to release memory, which wait until nothing runs, and what came behind them."""
        self.session: Session | None = None
        self._replaced: deque[str] = deque(maxlen=RUNS_KEPT)
        self._writers: OrderedDict[str, WeightWriter] = OrderedDict()
        self._addresses = _addresses(model)

    @property
    def released(self) -> bool:
        """Whether the weights' memory is away."""
        return WEIGHTS_TAG in self.released_tags

    @property
    def may_generate(self) -> bool:
        """Whether a committed version serves, and no memory is away."""
        return self.state is State.SERVING and not self.released_tags

    def knows(self, fingerprint: str) -> bool:
        """Whether a manifest with this fingerprint was accepted before."""
        return fingerprint in self._writers

    def committed_by(self, transaction: str, policy: Policy) -> bool:
        """Whether this transaction committed this policy, which still serves."""
        known = transaction, policy, State.SERVING
        return known == (self.transaction, self.policy, self.state)

    def is_in_doubt(self, transaction: str, policy: Policy) -> bool:
        """Whether all of this policy was written here, and only its commit was not heard of."""
        if self._in_doubt is None:
            return False
        voted_for, session = self._in_doubt
        return (voted_for, session.policy) == (transaction, policy)

    def settle(self) -> None:
        """Commit the transaction that was in doubt."""
        assert self._in_doubt is not None
        transaction, self.session = self._in_doubt
        self.commit(transaction)

    def check_policy(self, policy: Policy) -> None:
        """Check that an update to this policy may begin now.

        A run begins anywhere. The run that it replaces may not come back: its trainer may still
        be alive without knowing that another one was started in its place.

        Raises:
            ManifestError: an update is under way, the version does not grow within its run, or
                another run took the place of this one.
        """
        if self.session is not None:
            raise ManifestError(
                f"an update to version {self.session.policy.version} is under way; wait for its "
                f"end before version {policy.version} begins"
            )
        if self.released:
            raise ManifestError(
                "the weights' memory is released; resume_memory_occupation before the update"
            )
        if policy.run in self._replaced:
            raise ManifestError(
                f"run {policy.run!r} was replaced: the engine serves {self.policy}; end the older "
                f"trainer, or give it another run"
            )
        if policy.run == self.policy.run and policy.version <= self.policy.version:
            raise ManifestError(
                f"version {policy.version} is not newer than the engine's {self.policy}; versions "
                f"grow within a run, and a trainer that goes back starts another"
            )

    def accept(self, manifest: Manifest) -> None:
        """Check a manifest against the model and plan how it is written.

        Raises:
            ManifestError: the names, shapes or dtypes are not this model's.
        """
        kv_scales = self.kv_scales_in(manifest)
        if self.table is None:
            try:
                self.table = record_routes(self.model, shapes_of(manifest, kv_scales))
            except RouteError as error:
                raise ManifestError(str(error)) from error
        self.table.match(manifest, kv_scales)
        writer = writer_for(self.table, manifest, self.dtype, self.device, kv_scales)
        self._writers[manifest.fingerprint] = writer
        while len(self._writers) > WRITERS_KEPT:
            self._writers.popitem(last=False)

    def kv_scales_in(self, manifest: Manifest) -> frozenset[str]:
        """Names of the manifest's KV scales, held against the model.

        Raises:
            ManifestError: scales for a cache that has none, of wrong shapes, or missing where
                ``kv_scheme`` is ``trainer``.
        """
        if self.kv is None:
            if KV_SCALES in manifest.tensors:
                raise ManifestError(
                    f"the update brings {KV_SCALES}, but the engine's KV cache is not FP8; start "
                    f"it with --kv-cache-dtype fp8_e4m3, or send none"
                )
            return frozenset()
        names = incoming_scales.check(manifest, self.kv.layers, self.kv.heads.total)
        is_update = manifest.version != CHECKPOINT.version
        if not names and is_update and self.kv.scheme == "trainer":
            raise ManifestError(
                f"the update brings no {KV_SCALES}, which an engine with --fp8rl-kv-scheme trainer "
                f"needs; pass kv_scales to trainer_bridge.update, or start with scheme engine"
            )
        return names

    def forget(self, fingerprint: str) -> None:
        """Take back an ``accept``: another rank refused."""
        self._writers.pop(fingerprint, None)

    def begin(self, fingerprint: str, policy: Policy) -> "Session":
        """Open the session of a manifest that was accepted."""
        self._writers.move_to_end(fingerprint)
        writer = self._writers[fingerprint]
        if writer.manifest.streamed:  # its chunks are those of one stream
            self.forget(fingerprint)
        self._in_doubt = None
        self.session = Session(self, writer, policy)
        self.state, self.reason = State.UPDATING, f"version {policy.version} is being written"
        return self.session

    def commit(self, transaction: str = "") -> None:
        """Make the session's policy the one that generates; the session was ``finish``ed.

        Args:
            transaction: by this its trainer may ask again whether it committed.
        """
        assert self.session is not None
        if self.kv is not None:
            self.kv.after_update(self.session.kv_scales)
        policy = self.session.policy
        if policy.run != self.policy.run and self.policy != CHECKPOINT:
            self._replaced.append(self.policy.run)
        self.policy, self.transaction = policy, transaction
        self.state, self.reason, self.session = State.SERVING, "", None
        self._in_doubt = None

    def quarantine(self, reason: str, voted_for: str = "") -> None:
        """End the session; refuse generation until a complete update commits.

        Args:
            voted_for: the session's transaction, where all was written and only its end is unknown.
        """
        logger.error("engine weights are quarantined: %s", reason)
        self._in_doubt = (voted_for, self.session) if voted_for and self.session else None
        self.state, self.reason, self.session = State.QUARANTINED, reason, None
        self.memory.close()

    def resume(self) -> None:
        """End a session that wrote nothing on any rank: what was true before it still is."""
        assert self.session is not None
        self.state, self.reason = self.session.previous
        self.session = None
        self.memory.close()

    def check_addresses(self) -> None:
        """Check that no parameter moved since the model was built.

        Raises:
            SessionError: one did; captured CUDA graphs would read freed memory.
        """
        moved = [
            n for n, address in _addresses(self.model).items() if self._addresses.get(n) != address
        ]
        if moved:
            raise SessionError(f"{moved[0]} moved in memory; something rebinds engine parameters")


class Session:
    """The writes of one update on one rank."""

    def __init__(self, weights: EngineWeights, writer: WeightWriter, policy: Policy) -> None:
        self.weights = weights
        self.writer = writer
        self.policy = policy
        self.previous = (weights.state, weights.reason)
        self.finished = False
        self.kv_scales: torch.Tensor | None = None
        """What the update brought and ``finish`` found sound; in force from ``commit`` on."""
        self._written: set[int] = set()
        self._deferred: dict[str, torch.Tensor] = {}
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

    def extend(self, names: Any) -> None:
        """Take note of the next tensors of a stream, in their order.

        Raises:
            SessionError: they are not tensors that are due, or belong to a chunk that was written.
        """
        if not are_names(names):
            raise SessionError(f"a stream goes on with {excerpt(names)}; give names of tensors")
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
        known = type(index) is int and 0 <= index < len(self.writer.chunks)
        if not known or index in self._written:
            raise SessionError(f"chunk {excerpt(index)} is not awaited; write each chunk once")
        source = self.writer.chunk_source(index, self.weights.memory)
        for chunk_slice in self.writer.deferred(index):
            spec = self.writer.manifest.tensors[chunk_slice.name]
            tensor = source.tensor(chunk_slice, spec)
            if chunk_slice.name not in self._deferred:
                self._deferred[chunk_slice.name] = tensor.new_empty(spec.shape)
            whole = self._deferred[chunk_slice.name]
            (whole[slice(*chunk_slice.rows)] if spec.shape else whole).copy_(tensor)
        self.writer.write(index, self.weights.memory)
        self._written.add(index)

    def finish(self) -> float | None:
        """Check that every chunk came, and refresh what is derived from them.

        Returns:
            seconds that the GPU took to write the update, or None on a CPU.

        Raises:
            SessionError: something is missing, or a parameter moved.
            ValueError: NaN or Inf, or KV scales that are not positive.
        """
        if due := self.writer.due():
            raise SessionError(
                f"{len(due)} tensors are missing from the stream, {due[0]} among them; send every "
                f"tensor of the model"
            )
        missing = sorted(set(range(len(self.writer.chunks))) - self._written)
        if missing:
            raise SessionError(
                f"{len(missing)} of {len(self.writer.chunks)} chunks are missing, "
                f"{self.writer.chunks[missing[0]][0].name} among them; send every chunk of the "
                f"manifest before commit"
            )
        seconds = self.writer.finish()
        kv_scales = {name: self._deferred.pop(name) for name in self.writer.kv_scales}
        if self._deferred:
            self._load_deferred()
        self.writer.table.fill_constants()
        self.weights.check_addresses()
        if kv_scales and self.weights.kv is not None:
            kv = self.weights.kv
            self.kv_scales = incoming_scales.assemble(kv_scales, kv.layers, kv.heads.total)
            kv.check(self.kv_scales)
        self.finished = True
        return seconds

    def _load_deferred(self) -> None:
        """Give SGLang's own loader the tensors that have no routes."""
        table = self.writer.table
        for name, tensor in self._deferred.items():
            _check_finite(name, tensor)
        self.writer.dirty = True
        with WriteWatch(self.weights.model) as watch:
            self.weights.model.load_weights(iter(self._deferred.items()))  # type: ignore[operator]
        unwritten = sorted(table.by_loader - watch.written)
        if unwritten:
            raise SessionError(f"SGLang's loader left {unwritten[0]} unwritten; report this")
        for name in table.by_loader:
            # after the cast: a large FP32 value is Inf in FP16 storage
            _check_finite(name, table.parameters[name])


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name} holds NaN or Inf; check the trainer's weights")


def _addresses(model: nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def writer_for(
    table: RouteTable,
    manifest: Manifest,
    dtype: torch.dtype,
    device: torch.device,
    kv_scales: Collection[str] = (),
) -> WeightWriter:
    """The writer for the device that the weights are on."""
    if device.type == "cuda":
        from sgl_fp8rl.weight_update.triton_writer import TritonWriter

        return TritonWriter(table, manifest, dtype, device, kv_scales)
    return WeightWriter(table, manifest, dtype, kv_scales)
