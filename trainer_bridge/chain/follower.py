"""Brings an engine to the versions of a chain, from a copy of its folder."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sgl_fp8rl.protocol.image import DeltaError, apply
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.states import State
from trainer_bridge.chain import files
from trainer_bridge.chain.files import ChainError, Link
from trainer_bridge.chain.publisher import DELTA, Tensors, as_bytes
from trainer_bridge.connections import connection_to
from trainer_bridge.engine_client import EngineError
from trainer_bridge.update import update
from trainer_bridge.weights_digest import weights_digest

logger = logging.getLogger(__name__)

POLL_S = 1.0
STATUS_S = 30.0
"""Seconds for the engine to say what it serves."""


class ChainFollower:
    """The newest version of a chain that can be made from the files that are there.

    It keeps one version in host memory.

    Args:
        folder: of the chain, or a copy of it.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._state: Tensors = {}
        self._digest = ""
        self.policy: Policy | None = None
        """Of the version that it has."""

    def advance(self) -> bool:
        """Go on to the newest version that can be made; whether that is another one.

        Files that are missing or torn end the way by deltas, until they are copied, or until a
        later version is there whole.

        Raises:
            ChainError: no version at all can be made, or the index cannot be read.
        """
        before = self.policy
        links = files.read_index(self._folder)
        error = self._apply_deltas(links)
        later = links[self._place_in(links) + 1 :]
        for link in reversed([link for link in later if link.anchor]):
            try:
                self._take(link, dict(files.read(self._folder, link.anchor)))
            except ChainError as torn:
                error = error or torn
            else:
                error = self._apply_deltas(links)
                break
        if error is not None:
            if self.policy is None:
                raise error
            logger.warning("the chain ends for now at %s: %s", self.policy, error)
        return self.policy != before

    def _place_in(self, links: list[Link]) -> int:
        """The index of the version that it has, -1 where it is not among them."""
        here = self.policy, self._digest
        return next((i for i, link in enumerate(links) if (link.policy, link.digest) == here), -1)

    def _apply_deltas(self, links: list[Link]) -> ChainError | None:
        """Go on as far as deltas lead; why it ended before the last version, if by a fault."""
        for link in links[self._place_in(links) + 1 :]:
            if not link.delta or link.base != self._digest:
                return None
            try:
                self._take(link, self._changed(link))
            except ChainError as error:
                return error
        return None

    def _changed(self, link: Link) -> Tensors:
        """The tensors of the next version; those of this one stay as they are."""
        state = dict(self._state)
        for name, tensor in files.read(self._folder, link.delta):
            if not name.startswith(DELTA):
                state[name] = tensor
                continue
            name = name.removeprefix(DELTA)
            try:
                state[name] = state[name].clone()
                apply(as_bytes(state[name]), tensor)
            except (KeyError, DeltaError) as error:
                raise ChainError(f"the delta of {link.policy} does not fit: {error}") from error
        return state

    def _take(self, link: Link, state: Tensors) -> None:
        if weights_digest([*state.items()]) != link.digest:
            raise ChainError(
                f"the tensors of {link.policy} are not those that were published; use one "
                f"sgl-fp8rl on both sides"
            )
        self._state, self._digest, self.policy = state, link.digest, link.policy

    def update(self, engine: Any, **options: Any) -> None:
        """Bring an engine, or a list of them, to the version that it has.

        Args:
            engine, options: as for ``trainer_bridge.update``.

        Raises:
            ChainError: it has none yet.
            EngineError, ManifestError: as ``trainer_bridge.update``.
        """
        if self.policy is None:
            raise ChainError("there is no version yet; call advance() first")
        scales = self._state.get(KV_SCALES)
        named = {name: tensor for name, tensor in self._state.items() if name != KV_SCALES}
        run, version = self.policy
        update(named, engine, version=version, run=run, kv_scales=scales, **options)


def follow(
    folder: str | Path,
    engine: Any,
    *,
    poll_s: float = POLL_S,
    is_over: Callable[[Policy | None], bool] = lambda _: False,
) -> None:
    """Keep an engine at the newest version of a chain; faults are logged, and tried again.

    An engine that restarts, or is quarantined, gets its version again.

    Args:
        engine: as for ``update``: one engine.
        poll_s: seconds between two looks at the folder and at the engine.
        is_over: whether to return, given the version that the engine has now.
    """
    follower = ChainFollower(folder)
    last_fault = ""
    while True:
        try:
            follower.advance()
            if follower.policy is not None and _policy_of(engine) != follower.policy:
                follower.update(engine)
                logger.info("the engine has %s of the chain", follower.policy)
            last_fault, has = "", follower.policy
        except (ChainError, EngineError, ManifestError) as error:
            has = None
            if str(error) != last_fault:
                logger.warning("the engine does not follow the chain for now: %s", error)
            last_fault = str(error)
        if is_over(has):
            return
        time.sleep(poll_s)


def _policy_of(engine: Any) -> Policy | None:
    """What the engine serves; None in quarantine, or where it does not generate yet."""
    status = connection_to(engine).client.control({"op": "status"}, STATUS_S)
    if status.get("state") != State.SERVING.value:
        return None
    return Policy(str(status.get("run")), int(status.get("version", -1)))
