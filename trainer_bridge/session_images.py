"""What engines on other hosts keep of one update, so that the next one sends only what changed."""

import logging
import time
from collections.abc import Iterable

from sgl_fp8rl.protocol.image import Steps
from trainer_bridge.engine_connection import EngineConnection
from trainer_bridge.faster_way import FasterWay
from trainer_bridge.image_changes import ImageChanges, sent_as
from trainer_bridge.session_engines import SessionEngines
from trainer_bridge.transfer_plan import TransferPlan
from trainer_bridge.transport.rank_client import Content

logger = logging.getLogger(__name__)


class SessionImages:
    """The images of one update, from its begin to its end."""

    def __init__(self, plan: TransferPlan) -> None:
        self._plan = plan
        self._changes: ImageChanges | None = None
        """None where no engine keeps what it is sent."""
        self._keeping: list[EngineConnection] = []
        self._way = FasterWay(plan.manifest.fingerprint)
        self._is_mixed = False
        """Whether some engines are sent changes, and others all."""
        self._began: float | None = None
        """When the first chunk was to be sent."""

    @property
    def names(self) -> tuple[str, str]:
        """The images that changes are of, and that they make; empty where there are none."""
        return ("", "") if self._changes is None else (self._changes.before, self._changes.name)

    def begin(self, engines: SessionEngines) -> None:
        """Send only what changed to the engines that hold the last update, unless whole updates
        take less time."""
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
        self._changes = ImageChanges(kept, held)
        known = (each.way for each in self._keeping if each.way is not None)
        self._way = next((way for way in known if way.fingerprint == fingerprint), self._way)
        if self._changes.before and self._way.goes_whole():
            self._changes = ImageChanges([], held)
        sent = [ranks.image for _, ranks in engines.open]
        self._is_mixed = any(name != self._changes.before for name in sent)
        for _, ranks in engines.open:
            ranks.next_image = self._changes.name
        if not self._changes.before:
            for image in kept:
                image.empty()  # its memory goes before that of the next one comes
            for connection in self._keeping:
                connection.image = None

    def sent_as(self, chunk: int, content: Content, held: Iterable[str | None]) -> Steps[Content]:
        """See ``image_changes.sent_as``."""
        if self._began is None:
            self._began = time.monotonic()
        return sent_as(self._changes, chunk, content, held)

    def commit(self) -> None:
        """Send the next update as changes of this one, where engines have kept it."""
        if self._changes is None:
            return
        changes, self._changes = self._changes, None
        kept, is_whole = None, not changes.before
        try:
            kept = self._plan.manifest.fingerprint, changes.commit()
        except (RuntimeError, MemoryError):  # the engines have committed all the same
            logger.exception(
                "what was sent is not kept, so the next update is sent whole; leave memory for "
                "it on the trainer's side, or start the engines without --fp8rl-image-bytes"
            )
        if self._began is not None and (is_whole or not self._is_mixed):
            self._way.note(is_whole, time.monotonic() - self._began)
        for connection in self._keeping:
            connection.image, connection.way = kept, self._way
            connection.image_failed = False

    def close(self) -> None:
        """End; an update that has not committed has failed."""
        if self._changes is not None and self._changes.before:
            for connection in self._keeping:
                if connection.image_failed:
                    connection.image = None
                connection.image_failed = not connection.image_failed
        self._changes = None

    def _fits(self, most: int) -> bool:
        """Whether changes of this update may come; a stream's chunks are not known before."""
        chunks = range(len(self._plan.chunks))
        return not self._plan.streamed and sum(self._plan.extent(i)[1] for i in chunks) <= most
