"""The sending side of one update to the engines of one layout: chunks, and the vote."""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from sgl_fp8rl.protocol.image import Steps
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.values import excerpt
from trainer_bridge.announcement import as_announced
from trainer_bridge.engine_client import EngineError
from trainer_bridge.engine_connection import EngineConnection
from trainer_bridge.faster_way import FasterWay
from trainer_bridge.filler import Filler
from trainer_bridge.image_changes import ImageChanges, sent_as
from trainer_bridge.lookahead import Lookahead
from trainer_bridge.packer import QuantizePacker
from trainer_bridge.participant import Participant
from trainer_bridge.sender import Sender
from trainer_bridge.sources import Named
from trainer_bridge.transfer_plan import TransferPlan, is_aligned
from trainer_bridge.transport.board import LeadersBoard
from trainer_bridge.transport.rank_client import Content, UnreachableMemoryError

logger = logging.getLogger(__name__)

Message = dict[str, Any]
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
    return None if None in seconds else max(known, default=None)


class UpdateSession:
    """What the engines of one layout are sent, by one plan and from one bucket.

    Args:
        lose: called with an engine that failed; it raises where the update cannot go on without.
    """

    def __init__(
        self,
        members: list[Participant],
        sender: Sender,
        plan: TransferPlan,
        device: torch.device | None,
        kv_scales: torch.Tensor | None,
        lose: Callable[[Participant, EngineError], None],
    ) -> None:
        self.members, self.sender, self.plan, self.device = members, sender, plan, device
        self._kv_scales, self._lose = kv_scales, lose
        self._board: LeadersBoard | None = None
        self._changes: ImageChanges | None = None
        """Where engines on other hosts keep what they were sent."""
        self._keeping: list[EngineConnection] = []
        self._way = FasterWay()
        self._began = 0.0
        """When all was ready to be sent."""
        self._came: dict[int, None] = {}
        """What a stream has brought, in its order."""
        self._order: list[str] = []
        """Tensors of a stream that the engines are told of with the next chunk."""
        self._read = self._in_flight = 0
        """Chunks that the engines have read, and that they are reading."""
        self._senders = 1
        """Ranks of the trainer that send chunks in turn; this one sends the first."""
        self.network_bytes_of_others = 0
        """Bytes of chunks that those sent to engines on other hosts."""
        self._ahead = Lookahead[tuple[Message, Content | None]]()
        self._filler = Filler(plan, self._send_chunk, self._await_slot)

    def open(self) -> None:
        """Have the engines open the memory that they will read."""
        if not self._open_members():
            return
        self.sender.join(self)  # an engine that is lost meanwhile must not free what others read
        self._begin_changes()
        users = {self, *(member.connection for member in self._open_members())}
        packer = self._filler.packer = self.sender.share(self, self.plan, self.device, users)
        for member in self._open_members():
            member.connection.use(self.sender)
        if packer is not None:
            packer.begin()
        self._began = time.monotonic()

    @property
    def known(self) -> set[str]:
        """Names of the shared memory that every rank of every engine has open."""
        known = [m.ranks.known for m in self._open_members() if m.ranks is not None]
        return set.intersection(*known) if known else set()

    @property
    def network_bytes(self) -> int:
        """Bytes of chunks that engines on other hosts were sent."""
        own = sum(m.ranks.network_bytes for m in self._open_members() if m.ranks is not None)
        return own + self.network_bytes_of_others

    @property
    def kv_scales(self) -> torch.Tensor | None:
        """KV scales that are still to be put in."""
        return self._kv_scales

    @property
    def images(self) -> tuple[str, str]:
        """The images that changes are of, and that they make; empty where there are none."""
        return ("", "") if self._changes is None else (self._changes.before, self._changes.name)

    def send_every(self, senders: int) -> None:
        """From now on other ranks of the trainer send chunks, all in turn."""
        self._senders = senders

    def ask(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        """Send a message to every rank of every engine and wait for their replies."""
        self._send(message, fds)
        return self._wait()

    def put_kv_scales(self) -> None:
        """Put in the KV scales of this update, unless the engines read them in place."""
        scales, self._kv_scales = self._kv_scales, None
        if scales is not None:
            self.put_named(KV_SCALES, scales)

    def put_named(self, name: str, tensor: torch.Tensor) -> None:
        """Put the next tensor of a stream into the bucket.

        Raises:
            ManifestError: it was not announced, or came before.
        """
        if not self._open_members():
            return
        plan, index = self.plan, self.plan.index_of(name)
        if index is None:
            if self.sender.has_tied_head and name == TIED_HEAD:
                return  # a copy of the embedding, which checkpoints leave out
            raise ManifestError(
                f"{name} was not announced; announce every tensor of the stream, by the names of "
                f"the HF checkpoint"
            )
        if index in self._came:
            raise ManifestError(f"{name} comes twice in the stream; send each tensor once")
        if plan.mapped[index]:
            return
        source = plan.sources[index]
        # as the packer will read it
        whole = as_announced(name, tensor, source.held_as, source.shape)
        self._came[index] = None
        if plan.streamed:
            self._order += plan.add(index)
        self.put(index, whole)
        self._filler.own(index)

    def end_stream(self) -> None:
        """Check that the stream was complete.

        Raises:
            ManifestError: a tensor of the last stream is missing; the engine checks the first.
        """
        self.put_kv_scales()
        missing = sorted(set(range(len(self.plan.sources))) - self._came.keys())
        if missing and self._open_members() and not self.plan.streamed:
            raise ManifestError(
                f"the stream ended without {len(missing)} tensors that the last one brought, "
                f"{self.plan.sources[missing[0]].cuts[0][0]} among them; stream the whole model"
            )

    def put_residents(self, named: Named) -> bool:
        """Put all parameters into the bucket where each is the trainer's own memory on its GPU.

        Returns:
            whether they were; otherwise nothing was done.
        """
        packer, scales = self._filler.packer, self._kv_scales
        tensors = [tensor for _, tensor in named] + ([] if scales is None else [scales])
        if not isinstance(packer, QuantizePacker) or not self.plan.is_resident:
            return False
        self._kv_scales = None
        packer.put_residents(tensors)
        self._filler.finish()
        return True

    def put(self, index: int, elements: torch.Tensor | None, start: int = 0) -> None:
        """Put a parameter into the bucket once it is its turn; full slots are sent on the way.

        Args:
            elements: contiguous ones of the parameter, from ``start`` on: all of them, unless
                other ranks write theirs. None where this rank writes none.
        """
        if not self._open_members():
            return
        if self.device is not None and elements is not None:
            if elements.device != self.device:
                elements = elements.to(self.device)
            elements = elements if is_aligned(elements) else elements.clone()
        try:
            self._filler.put(index, None if elements is None else (elements, start))
        except BaseException:
            self._stop_ranks()
            raise

    def fill_together(self, board: LeadersBoard) -> None:
        """From now on other ranks of the trainer put in what they hold."""
        self._board = board
        board.reset()
        board.allow(self.plan.manifest.slots)

    def send_rest(self) -> None:
        """Send what is left, and wait until it is read."""
        if not self._open_members():
            return
        try:
            self._filler.finish()
            for ready in self._ahead.drain():
                self._send_filled(*ready)
            while self._in_flight:
                self._wait_chunk()
        except BaseException:
            self._stop_ranks()
            raise

    def finish(self) -> float | None:
        """Send what is left, and have every rank check that nothing is missing.

        Returns:
            seconds that the slowest GPU took to write, or None on a CPU.
        """
        self.send_rest()
        if not self._open_members():
            return None
        if self._filler.packer is not None:
            self._filler.packer.finish()
        return slowest_gpu(self.ask({"op": "finish"}))

    def committed(self) -> None:
        """Plan the next stream as this one came, unless it came as planned, and send the next
        update as changes of this one where engines have kept it."""
        if self._changes is not None:
            changes, self._changes = self._changes, None
            kept, is_whole = None, not changes.before
            try:
                kept = self.plan.manifest.fingerprint, changes.commit()
            except (RuntimeError, MemoryError):  # the engines have committed all the same
                logger.exception(
                    "what was sent is not kept, so the next update is sent whole; leave memory for "
                    "it on the trainer's side, or start the engines without --fp8rl-image-bytes"
                )
            self._way.note(is_whole, time.monotonic() - self._began)
            for connection in self._keeping:
                connection.image, connection.way = kept, self._way
                connection.image_failed = False
        came = list(self._came)
        if came and (self.plan.streamed or came != sorted(came)):
            self.sender.remember_stream(self.plan, came)
        self._came.clear()

    def close(self) -> None:
        """End, once; memory that no engine has open is freed."""
        self._stop_ranks()
        if self._changes is not None and self._changes.before:  # the update failed
            for connection in self._keeping:
                if connection.image_failed:
                    connection.image = None
                connection.image_failed = not connection.image_failed
        self._changes = None
        if self._came:  # it failed, perhaps for what was held of it in the order of the last one
            self.sender.forget_stream()
        self.sender.leave(self)
        # they refer to here: a cycle would keep the trainer's tensors
        del self._filler, self._ahead

    def _is_mine(self, chunk: int) -> bool:
        return chunk % self._senders == 0

    def _send_chunk(self, chunk: int) -> None:
        if not self._is_mine(chunk):
            return
        if self._board is not None:
            self._board.fill(chunk + 1)
            self._board.await_filled(chunk)
        if self.device is not None and not self.sender.layout["is_far"]:
            torch.cuda.current_stream(self.device).synchronize()  # the slot is filled
        order = {"order": self._order} if self.plan.streamed else {}
        message = {"op": "chunk", "index": chunk, **order}
        self._order = []
        for ready in self._ahead.push(self._filled(message, chunk)):
            self._send_filled(*ready)

    def _filled(self, message: Message, chunk: int) -> Steps[tuple[Message, Content | None]]:
        """A message and what it is about, for engines that do not read the bucket."""
        if not self.sender.layout["is_far"] or not self._open_members():
            return message, None
        content = self.sender.content(self.plan, chunk)
        held = [member.ranks.image for member in self._open_members() if member.ranks is not None]
        return message, (yield from sent_as(self._changes, chunk, content, held))

    def _send_filled(self, message: Message, content: Content | None) -> None:
        self._await_engine()
        for member in self._open_members():
            assert member.ranks is not None
            member.ranks.send_chunk(message, content)
        self._in_flight += 1

    def _begin_changes(self) -> None:
        """Send only what changed to the engines that hold the last update."""
        manifest, kept, held = self.plan.manifest, [], []
        for member in self._open_members():
            assert member.ranks is not None
            ranks, connection = member.ranks, member.connection
            if ranks.image is None or not self._fits_an_image(ranks.image_bytes):
                connection.image = None
                continue
            held.append(ranks.image)
            self._keeping.append(connection)
            if connection.image is not None and connection.image[0] == manifest.fingerprint:
                kept.append(connection.image[1])
        if not self._keeping:
            return
        self._changes = ImageChanges(kept, held)
        if self._changes.before:
            self._way = self._keeping[0].way
            if self._way.goes_whole():
                self._changes = ImageChanges([], held)
        for member in self._open_members():
            assert member.ranks is not None
            member.ranks.next_image = self._changes.name
        if not self._changes.before:
            for connection in self._keeping:
                connection.image = None  # its memory goes before that of the next one comes

    def _fits_an_image(self, most: int) -> bool:
        """Whether changes of this update may come; a stream's chunks are not known before."""
        chunks = range(len(self.plan.chunks))
        return not self.plan.streamed and sum(self.plan.extent(i)[1] for i in chunks) <= most

    def _await_slot(self, chunk: int) -> bool:
        if not self._is_mine(chunk):
            return False
        self._await_engine()
        return bool(self._open_members())  # or the bucket may be gone

    def _await_engine(self) -> None:
        """Wait until engines have read so much that a slot is free."""
        while self._in_flight >= self.plan.manifest.slots // self._senders:
            self._wait_chunk()

    def _wait_chunk(self) -> None:
        self._wait()
        self._in_flight -= 1
        self._read += 1
        if self._board is not None:
            self._board.allow(self._read + self.plan.manifest.slots)

    def _stop_ranks(self) -> None:
        """Have the other ranks of the trainer wait for no slot any more."""
        if self._board is not None:
            self._board.abort()

    def _open_members(self) -> list[Participant]:
        return [member for member in self.members if member.ranks is not None]

    def _send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        for member in self._open_members():
            assert member.ranks is not None
            member.ranks.send(message, fds)

    def _wait(self) -> list[dict[str, Any]]:
        replies: list[dict[str, Any]] = []
        began = time.monotonic()
        for member in self._open_members():
            assert member.ranks is not None
            try:
                replies += member.ranks.wait(began)
            except UnreachableMemoryError:
                raise
            except EngineError as error:
                self._lose(member, error)
        return replies
