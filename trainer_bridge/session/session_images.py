"""What engines on other hosts keep of one update, so that the next one sends only what changed."""

import logging

from trainer_bridge.session.engine_connection import EngineConnection
from trainer_bridge.session.session_engines import SessionEngines
from trainer_bridge.transfer.image_changes import ImageChanges
from trainer_bridge.transfer.transfer_plan import TransferPlan

logger = logging.getLogger(__name__)


class SessionImages:
    """The images of one update, from its begin to its end."""

    def __init__(self, plan: TransferPlan) -> None:
        self._plan = plan
        self.changes: ImageChanges | None = None
        """None where no engine keeps what it is sent."""
        self._keeping: list[EngineConnection] = []

    @property
    def names(self) -> tuple[str, str]:
        """The images that changes are of, and that they make; empty where there are none."""
        return ("", "") if self.changes is None else (self.changes.before, self.changes.name)

    def begin(self, engines: SessionEngines) -> None:
        """Send only what changed to the engines that hold the last update."""
        fingerprint, kept, held = self._plan.manifest.fingerprint, [], []
        for member, ranks in engines.open:
            connection = member.connection
            if ranks.image is None or not self._fits(ranks.image_bytes):
                connection.image = None
                continue
            held.append(ranks.image)
            self._keeping.append(connection)
            if connection.image is not None and connection.image[0] == fingerprint:
                kept.append(connection.image[1])
        if not self._keeping:
            return
        self.changes = ImageChanges(kept, held)
        for _, ranks in engines.open:
            ranks.next_image = self.changes.name
        if not self.changes.before:
            for image in kept:
                image.empty()  # its memory goes before that of the next one comes
            for connection in self._keeping:
                connection.image = None

    def commit(self) -> None:
        """Send the next update as changes of this one, where engines have kept it."""
        if self.changes is None:
            return
        changes, self.changes = self.changes, None
        kept = None
        try:
            kept = self._plan.manifest.fingerprint, changes.commit()
        except (RuntimeError, MemoryError):  # the engines have committed all the same
            logger.exception(
                "what was sent is not kept, so the next update is sent whole; leave memory for "
                "it on the trainer's side, or start the engines without --fp8rl-image-bytes"
            )
        for connection in self._keeping:
            connection.image, connection.image_failed = kept, False

    def close(self) -> None:
        """End; an update that has not committed has failed."""
        if self.changes is not None and self.changes.before:
            for connection in self._keeping:
                if connection.image_failed:
                    connection.image = None
                connection.image_failed = not connection.image_failed
        self.changes = None

    def _fits(self, most: int) -> bool:
        """Whether changes of this update may come; a stream's chunks are not known before."""
        chunks = range(len(self._plan.chunks))
        return not self._plan.streamed and sum(self._plan.extent(i)[1] for i in chunks) <= most
