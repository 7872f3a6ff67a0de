"""An update session: begin -> apply parts -> commit, or abort. Only a committed version generates.

One ``EngineWeights`` lives beside the model on each rank. It knows nothing of sockets or SGLang's
scheduler; ``serve.py`` drives it.
"""

import logging
from enum import Enum

import torch
from torch import nn

from sgl_fp8rl.weight_update.apply import Rows, aligned_rows, apply
from sgl_fp8rl.weight_update.manifest import Manifest, ManifestError
from sgl_fp8rl.weight_update.probe import WriteWatch, record
from sgl_fp8rl.weight_update.routes import RouteError, RouteTable, shapes_of

logger = logging.getLogger(__name__)

CHECKPOINT_VERSION = -1
"""The policy version of the weights that an engine starts with; updates count from 0."""


class State(Enum):
    """Whether the engine may generate."""

    SERVING = "serving"
    UPDATING = "updating"
    QUARANTINED = "quarantined"


class SessionError(RuntimeError):
    """An update that failed after it began; the engine is quarantined."""


class EngineWeights:
    """The weights of one rank: its routes, its policy version and its state."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model = model
        self.dtype = dtype
        self.table: RouteTable | None = None
        self.version = CHECKPOINT_VERSION
        self.state = State.QUARANTINED
        self.reason = "no complete set of weights has been loaded yet"
        self.released = False
        """Whether the memory saver has taken the weights' memory away."""
        self.pending: Manifest | None = None
        """The manifest that was accepted, until its session begins."""
        self.session: Session | None = None
        self._addresses = _addresses(model)

    def check(self, manifest: Manifest) -> None:
        """Hold an update's manifest against the engine, before anything is written.

        Raises:
            ManifestError: an update is under way, the version does not grow, or the names, shapes
                or dtypes are not this model's.
        """
        if self.session is not None:
            raise ManifestError(
                f"an update to version {self.session.manifest.version} is under way; wait for its "
                f"end before version {manifest.version} begins"
            )
        if self.released:
            raise ManifestError(
                "the weights' memory is released; resume_memory_occupation before the update"
            )
        if manifest.version <= self.version:
            raise ManifestError(
                f"version {manifest.version} is not newer than the engine's version "
                f"{self.version}; versions only grow"
            )
        if self.table is None:
            try:
                self.table = record(self.model, shapes_of(manifest))
            except RouteError as error:
                raise ManifestError(str(error)) from error
        self.table.match(manifest)

    def begin(self, manifest: Manifest) -> "Session":
        """Open the session of a manifest that ``check`` accepted."""
        assert self.table is not None
        self.session = Session(self, self.table, manifest)
        self.state, self.reason = State.UPDATING, f"version {manifest.version} is being written"
        return self.session

    def commit(self) -> None:
        """Make the session's version the one that generates; the session was ``finish``ed."""
        assert self.session is not None
        self.version = self.session.manifest.version
        self.state, self.reason, self.session = State.SERVING, "", None

    def quarantine(self, reason: str) -> None:
        """End the session; refuse generation until a complete update commits."""
        logger.error("engine weights are quarantined: %s", reason)
        self.state, self.reason, self.session = State.QUARANTINED, reason, None

    def resume(self) -> None:
        """End a session that wrote nothing on any rank: what was true before it still is."""
        assert self.session is not None
        self.state, self.reason = self.session.previous
        self.session = None

    def check_addresses(self) -> None:
        """Hold that no parameter moved since the model was built.

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

    def __init__(self, weights: EngineWeights, table: RouteTable, manifest: Manifest) -> None:
        self.weights = weights
        self.table = table
        self.manifest = manifest
        self.previous = (weights.state, weights.reason)
        self.dirty = False
        """Whether engine storage was written; before that, the old version is still whole."""
        self.finished = False
        self._received: dict[str, list[Rows]] = {}
        self._fallback: list[tuple[str, torch.Tensor]] = []

    def write(self, name: str, tensor: torch.Tensor, rows: Rows | None = None) -> None:
        """Write one tensor, or rows ``[start, stop)`` of its first dimension.

        Raises:
            SessionError: a name or shape that the manifest did not announce, or rows that came
                before.
            ValueError: NaN or Inf.
        """
        spec = self.manifest.tensors.get(name)
        if spec is None or self.finished:
            raise SessionError(f"{name} is not awaited; announce each tensor in the manifest")
        rows = rows or (0, spec.shape[0] if spec.shape else 1)
        self._check_part(name, tensor, rows)
        self._received.setdefault(name, []).append(rows)
        self.dirty = True
        if name in self.table.fallback:
            self._fallback.append((name, tensor.clone()))
        else:
            apply(
                self.table,
                self.table.routes_for(name, self.manifest),
                tensor,
                rows,
                self.weights.dtype,
            )

    def _check_part(self, name: str, tensor: torch.Tensor, rows: Rows) -> None:
        spec = self.manifest.tensors[name]
        whole = (0, spec.shape[0] if spec.shape else 1)
        expected = (rows[1] - rows[0], *spec.shape[1:]) if spec.shape else ()
        step = aligned_rows(spec.shape)
        inside = 0 <= rows[0] < rows[1] <= whole[1]
        aligned = rows[0] % step == 0 and (rows[1] % step == 0 or rows[1] == whole[1])
        splittable = name not in self.table.fallback and not self.manifest.is_scale(name)
        if tensor.dtype != spec.dtype or tuple(tensor.shape) != expected or not inside:
            raise SessionError(
                f"{name} rows {rows} came as {tensor.dtype} {tuple(tensor.shape)}; the manifest "
                f"announced {spec.dtype} {spec.shape}"
            )
        if rows != whole and not (aligned and splittable):
            raise SessionError(f"{name} is split at {rows}; split matrices at multiples of {step}")
        for start, stop in self._received.get(name, ()):
            if max(start, rows[0]) < min(stop, rows[1]):
                raise SessionError(f"{name} rows {rows} came twice; send each row once")

    def finish(self) -> None:
        """Hold that every row of every tensor came once, and refresh what is derived from them.

        Raises:
            SessionError: something is missing, or a parameter moved.
        """
        missing = [
            name
            for name, spec in self.manifest.tensors.items()
            if sum(b - a for a, b in self._received.get(name, ()))
            != (spec.shape[0] if spec.shape else 1)
        ]
        if missing:
            raise SessionError(
                f"{len(missing)} of {len(self.manifest.tensors)} tensors are missing or cut short, "
                f"such as {missing[0]}; send every tensor of the manifest before commit"
            )
        if self._fallback:
            for name, tensor in self._fallback:
                if not bool(torch.isfinite(tensor).all()):
                    raise ValueError(f"{name} holds NaN or Inf; check the trainer's weights")
            with WriteWatch(self.weights.model) as watch:
                self.weights.model.load_weights(iter(self._fallback))  # type: ignore[operator]
            unwritten = sorted(self.table.by_loader - watch.written)
            if unwritten:
                raise SessionError(f"SGLang's loader left {unwritten[0]} unwritten; report this")
            for name in self.table.by_loader:
                # after the cast: a large FP32 value is Inf in FP16 storage
                if not bool(torch.isfinite(self.table.parameters[name]).all()):
                    raise ValueError(f"{name} holds NaN or Inf; check the trainer's weights")
        self.weights.check_addresses()
        self.finished = True


def _addresses(model: nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
