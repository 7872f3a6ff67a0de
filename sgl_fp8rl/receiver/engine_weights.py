"""The weights of one rank between and during updates: which policy they are, and what may begin.

One ``EngineWeights`` lives beside the model on each rank. It knows nothing of sockets or SGLang's
scheduler; ``update_steps.py`` drives it. Only a committed version generates.
"""

import logging
from collections import OrderedDict, deque
from typing import Any

import torch
from torch import nn

from server_args import Fp8RLServerArgs
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import Manifest, ManifestError
from sgl_fp8rl.protocol.policy import CHECKPOINT, Policy
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver.kv import incoming_scales
from sgl_fp8rl.receiver.kv.quantized import QuantizedKV
from sgl_fp8rl.receiver.kv.scales import KVScales
from sgl_fp8rl.receiver.routes.route_tracer import record_routes
from sgl_fp8rl.receiver.routes.routes import DerivedTensors, RouteError, RouteTable, shapes_of
from sgl_fp8rl.receiver.session import Session, SessionError
from sgl_fp8rl.receiver.writers.shared_memory import SharedMemory
from sgl_fp8rl.receiver.writers.weight_writer import WeightWriter

logger = logging.getLogger(__name__)

WRITERS_KEPT = 4
"""Writers that a rank remembers: a trainer has one for its bucket and one for mapped parameters."""

WEIGHTS_TAG = "weights"
"""SGLang's tag of the weights' memory."""
RUNS_KEPT = 64
"""Runs that a rank remembers to have been replaced by another."""


class EngineWeights:
    """The weights of one rank: its routes, its policy version and its state.

    Args:
        kv: of an 8-bit KV cache, or None where it has 16 bits.
        options: the engine's, by default the defaults.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        kv: QuantizedKV | None = None,
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
        self._snapshot: tuple[WeightWriter, str] | None = None
        """The writer of ``policy``, and what a trainer on another host calls that update."""
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
        self.derived = DerivedTensors(model)
        self._addresses, self._places = self._find_addresses(), self._in_order()

    @property
    def released(self) -> bool:
        """Whether the weights' memory is away."""
        return WEIGHTS_TAG in self.released_tags

    @property
    def may_generate(self) -> bool:
        """Whether a committed version serves, and no memory is away."""
        return self.state is State.SERVING and not self.released_tags

    @property
    def why_not_generate(self) -> str:
        """Said of each request where ``may_generate`` is false."""
        if self.state is not State.SERVING:
            return f"engine weights are quarantined: {self.reason}"
        tags = ", ".join(sorted(self.released_tags))
        return f"the memory of {tags} is released; resume_memory_occupation before requests"

    @property
    def status(self) -> dict[str, Any]:
        """What a trainer is told."""
        return {
            "run": self.policy.run,
            "version": self.policy.version,
            "state": self.state.value,
            "reason": self.reason,
        }

    def snapshot_of(self, writer: WeightWriter) -> str:
        """The name of the update that is stored, where this writer can read it back; else empty."""
        if (
            self._snapshot is None
            or self._snapshot[0] is not writer
            or self.state is not State.SERVING
        ):
            return ""
        return self._snapshot[1]

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
        kind = writer_on(self.device)
        writer = kind(self.table, manifest, self.dtype, self.device, kv_scales)
        self._writers[manifest.fingerprint] = writer
        while len(self._writers) > WRITERS_KEPT:
            self._writers.popitem(last=False)

    def kv_scales_in(self, manifest: Manifest) -> frozenset[str]:
        """Names of the manifest's KV scales, held against the model.

        Raises:
            ManifestError: scales for a cache that has none, or of wrong shapes.
        """
        if isinstance(self.kv, KVScales):
            return incoming_scales.check(manifest, self.kv.layers, self.kv.heads.total)
        if KV_SCALES in manifest.tensors:
            kind = "16 bits" if self.kv is None else "a scale for each token"
            raise ManifestError(
                f"the update brings {KV_SCALES}, but the engine's KV cache has {kind}; send none, "
                f"or start the engine with --kv-cache-dtype fp8_e4m3"
            )
        # those of a checkpoint
        return frozenset() if self.kv is None else incoming_scales.names_in(manifest.tensors)

    def forget(self, fingerprint: str) -> None:
        """Take back an ``accept``: another rank refused."""
        self._writers.pop(fingerprint, None)

    def begin(self, fingerprint: str, policy: Policy) -> Session:
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
        policy, writer = self.session.policy, self.session.writer
        has_name = bool(self.session.snapshot) and writer.holds_bytes
        writer.keep(changes_may_come=has_name)
        self._snapshot = (writer, self.session.snapshot) if has_name else None
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
        # releasing memory between updates is not an error
        level = logging.ERROR if self.session is not None else logging.INFO
        logger.log(level, "engine weights are quarantined: %s", reason)
        self._in_doubt = (voted_for, self.session) if voted_for and self.session else None
        self._snapshot = None
        if self.session is not None:
            self.session.forget_changes()
            self.session.writer.end()
        self.state, self.reason, self.session = State.QUARANTINED, reason, None
        self.memory.close()

    def resume(self) -> None:
        """End a session that wrote nothing on any rank, or undid it: what was true still is."""
        assert self.session is not None
        self.state, self.reason = self.session.previous
        self.session.writer.end()
        self.session = None
        self.memory.close()

    def check_addresses(self) -> None:
        """Raise SessionError if a parameter, or what is derived from one, moved since the model was
        built: captured CUDA graphs would read freed memory."""
        if self._in_order() == self._places:
            return
        now = self._find_addresses()
        moved = [name for name, address in now.items() if self._addresses.get(name) != address]
        if moved:
            raise SessionError(f"{moved[0]} moved in memory; something rebinds engine parameters")

    def _find_addresses(self) -> dict[str, int]:
        tensors = dict(self.model.named_parameters()) | self.derived.tensors()
        return {name: tensor.data_ptr() for name, tensor in tensors.items()}

    def _in_order(self) -> list[int]:
        """The addresses, those of parameters without names, which take five times as long."""
        return [*_in_order(self.model), *(t.data_ptr() for t in self.derived.tensors().values())]


def _in_order(module: nn.Module) -> list[int]:
    found = [p.data_ptr() for p in module._parameters.values() if p is not None]
    for child in module._modules.values():
        if child is not None:
            found += _in_order(child)
    return found


def writer_on(device: torch.device) -> type[WeightWriter]:
    """The writer of weights that are on this device."""
    if device.type != "cuda":
        return WeightWriter
    from sgl_fp8rl.receiver.writers.triton_writer import TritonWriter

    return TritonWriter
