"""Brings engines to the versions of a chain, from a copy of its folder."""

import logging
from pathlib import Path
from time import sleep
from typing import Any

from sgl_fp8rl.ops.delta import apply
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.protocol.values import attempt, real
from trainer_bridge.chain import files
from trainer_bridge.chain.files import DELTA, Tensors, as_bytes
from trainer_bridge.chain.index import ChainError, Index, Link, brief, read_index
from trainer_bridge.rollouts.serving_engines import check_status
from trainer_bridge.session.kept import KEPT
from trainer_bridge.updates.update import UpdateResult, update

logger = logging.getLogger(__name__)

POLL_S, MOST_POLL_S = 1.0, 60.0
"""Seconds between two looks; after looks that failed they double, up to the second."""
STATUS_S = 30.0
"""Seconds for an engine to say what it serves."""


class ChainFollower:
    """The newest version of a chain that can be made from the files that are there.

    It keeps one version in host memory, and the next one while it is made.

    Args:
        folder: of the chain, or a copy of it.

    Raises:
        ChainError: zstandard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        files.zstandard()
        self._folder = Path(folder)
        self._tensors: Tensors = {}
        self._serial = 0
        self.policy: Policy | None = None
        """Of the version that it has."""

    def advance(self) -> bool:
        """Go on to the newest version that can be made; whether that is another one.

        Files that are missing or torn end the way by deltas, until they are copied, or until a
        later version is there whole.

        Raises:
            ChainError: it cannot go on to the newest version; it may have come a part of the way.
        """
        before = self._serial
        index = read_index(self._folder)
        if index.serial <= before:  # the copy may be an older one
            return False
        error = self._apply_deltas(index)
        later = [link for link in index.links if link.anchor and link.serial > self._serial]
        for link in reversed(later if error is not None else []):
            _, torn = attempt(self._take_anchor, link)
            if torn is None:
                error = self._apply_deltas(index)
                break
            if self.policy is None:
                error = torn
        if error is not None:
            why = str(error) if isinstance(error, ChainError) else brief(error)
            raise ChainError(f"the chain ends for now at {self.policy or 'nothing'}: {why}")
        return self._serial != before

    def update(self, engine: Any, **options: Any) -> UpdateResult:
        """Bring an engine, or a list of them, to the version that it has.

        Args:
            engine, options: as for ``trainer_bridge.update``.

        Raises:
            ChainError: it has none yet.
            EngineError, ManifestError: as ``trainer_bridge.update``.
        """
        if self.policy is None:
            raise ChainError(f"{self._folder} has no version yet; call advance() first")
        scales = self._tensors.get(KV_SCALES)
        named = {name: tensor for name, tensor in self._tensors.items() if name != KV_SCALES}
        run, version = self.policy
        return update(named, engine, version=version, run=run, kv_scales=scales, **options)

    def serve(self, engines: list[Any], **options: Any) -> bool:
        """Update those engines that do not serve the version that it has; whether all can.

        One that cannot be reached holds up no other.

        One that serves a later version of the run is left alone, and so is one that is quarantined
        at this version, until the next one: a version is committed once.

        Args:
            options: as for ``trainer_bridge.update``.

        Raises:
            EngineError, ManifestError: as ``trainer_bridge.update``; or an engine could not be
                reached, and the others have been updated.
        """
        if self.policy is None:
            return False
        asked = [attempt(_state_of, engine) for engine in engines]
        behind = [
            engine
            for engine, (found, _) in zip(engines, asked, strict=True)
            if found is not None and (found[1] != self.policy.run or found[2] < self.policy.version)
        ]
        if behind:
            self.update(behind if len(behind) > 1 else behind[0], **options)
            logger.info("%d of %d engines took %s", len(behind), len(engines), self.policy)
        for _, error in asked:
            if error is not None:
                raise error
        states = [_state_of(engine) for engine in engines] if behind else [s for s, _ in asked]
        return all(state is not None and state[0] == State.SERVING.value for state in states)

    def _apply_deltas(self, index: Index) -> Exception | None:
        """Go on as far as deltas lead; why they do not lead to the newest version."""
        for link in index.links:
            if link.serial <= self._serial:
                continue
            if not link.delta or link.base != self._serial:
                return ChainError(f"{link.policy} is a change of a version that is not here")
            _, error = attempt(self._take_delta, link)
            if error is not None:
                return error
        return None

    def _take_anchor(self, link: Link) -> None:
        self._take(link, dict(files.read(self._folder, link.anchor)))

    def _take_delta(self, link: Link) -> None:
        tensors = dict(self._tensors)
        for name, tensor in files.read(self._folder, link.delta):
            if name.startswith(DELTA):
                name = name.removeprefix(DELTA)
                tensors[name] = tensors[name].clone()  # this version's stays as it is
                apply(as_bytes(tensors[name]), tensor)
            else:
                tensors[name] = tensor
        self._take(link, tensors)

    def _take(self, link: Link, tensors: Tensors) -> None:
        if files.digest(tensors) != link.digest:
            raise ChainError(
                f"the tensors of {link.policy} are not those that were published; use the same "
                f"version of sgl-fp8rl on both sides"
            )
        self._tensors, self._serial, self.policy = tensors, link.serial, link.policy


def follow(
    folder: str | Path,
    engines: Any,
    *,
    poll_s: float = POLL_S,
    once: bool = False,
    **options: Any,
) -> None:
    """Keep engines at the newest version of a chain; faults are logged, and tried again.

    Args:
        engines: an engine or a list of them, as for ``update``. One that restarts gets its version
            again.
        poll_s: seconds between two looks at the folder and at the engines.
        once: return when all engines serve the newest version.
        options: as for ``trainer_bridge.update``, such as ``in_flight``.

    Raises:
        ChainError: ``poll_s`` is not a number above 0, or zstandard is not installed.
        EngineError: an engine is neither an engine nor an address.
    """
    try:
        poll_s = real("poll_s", poll_s, above=True)
    except ValueError as fault:
        raise ChainError(str(fault)) from None
    engines = list(engines) if isinstance(engines, list | tuple) else [engines]
    for engine in engines:
        KEPT.connection_to(engine)
    follower = ChainFollower(folder)
    logged, wait_s = "", poll_s
    while True:
        # whatever the folder is, engines that restart get what there is
        _, torn = attempt(follower.advance)
        serve, error = attempt(lambda: follower.serve(engines, **options))
        error = torn or error
        if error is None and follower.policy is None:
            error = ChainError(f"{folder} has no version yet")
        if error is not None and str(error) != logged:
            logger.warning("engines do not follow the chain for now: %s", error)
        logged = "" if error is None else str(error)
        if once and error is None and serve:
            return
        wait_s = poll_s if error is None else min(2 * wait_s, max(MOST_POLL_S, poll_s))
        sleep(wait_s)


def _state_of(engine: Any) -> tuple[str, str, int]:
    """State, run and version of an engine."""
    status = KEPT.connection_to(engine).client.control({"op": "status"}, STATUS_S)
    check_status("the engine's status", status)
    return status["state"], status["run"], status["version"]
