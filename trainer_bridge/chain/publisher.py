"""Publishes a trainer's weights in a chain: quantized as an engine keeps them, and what changed."""

import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn

from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.values import as_python
from trainer_bridge.chain import files
from trainer_bridge.chain.files import Tensors, VersionWriter
from trainer_bridge.chain.index import (
    ChainError,
    Index,
    Link,
    delete_all_but,
    lock,
    read_index,
    write_index,
)
from trainer_bridge.ranks.collective import Leader, ranks_of
from trainer_bridge.session.kept import KEPT
from trainer_bridge.sources.hf_names import group_of
from trainer_bridge.sources.parameters import Named, NamedTensors
from trainer_bridge.sources.tied_head import check_head, on_all_ranks, repeats_here
from trainer_bridge.transfer.layout import check_kv_scales, sources_for
from trainer_bridge.updates.update import RUN, PolicyRequest, agree, ask
from trainer_bridge.updates.weights import WholeModel

logger = logging.getLogger(__name__)


class ChainPublisher:
    """Writes versions into a folder; the first one of a process is whole.

    It keeps the last version in host memory, 9.4 GB of the 8B shape, and the next one while it is
    written.

    Args:
        folder: is made, where there is none. One process at a time writes to it.
        like: the engine (as for ``update``) whose layers decide what is FP8; on the ranks that do
            not lead, None.
        anchor_every: 16 writes every 16th version whole as well, for those who join late.
            The files of the last two such versions, and of all since, are kept.

    Raises:
        ChainError: ``anchor_every`` is not a whole number from 1 up, or zstandard is not installed.
    """

    def __init__(self, folder: str | Path, like: Any, anchor_every: int = 16) -> None:
        anchor_every = as_python(anchor_every)
        if type(anchor_every) is not int or anchor_every < 1:
            raise ChainError(f"anchor_every is {anchor_every!r}; give a whole number from 1 up")
        files.zstandard()
        self._folder, self._like, self._anchor_every = Path(folder), like, anchor_every
        self._lock: BinaryIO | None = None
        self._tensors: Tensors = {}
        self._serial = 0
        """Of the version that these are."""
        self._since = 0
        """Versions since the last one that was written whole."""

    def publish(
        self,
        model_or_named_tensors: nn.Module | NamedTensors,
        *,
        version: int,
        run: str | None = None,
        kv_scales: torch.Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> int:
        """Write a version; where it fails, the chain ends with the one before.

        With FSDP2 or DDP every rank calls; the first one writes.

        Args:
            model_or_named_tensors, version, run, group: as for ``update``; no iterator.
            kv_scales: as for ``update``; without them, those of the version before are kept.

        Returns:
            bytes of the delta, or of all tensors where there is none; the same on every rank.

        Raises:
            ChainError: it is older than what is there, or another process publishes there.
            OSError: it cannot be written.
            ManifestError: weights, version, run or scales are not valid, or ranks differ.
        """
        group = group or group_of(model_or_named_tensors)
        if isinstance(model_or_named_tensors, Iterator):
            why = "an iterator cannot be published; pass a module, a mapping or a list"
            weights = WholeModel({}, ManifestError(why))
        else:
            weights = WholeModel(model_or_named_tensors)
        named, family = weights.named, weights.family
        ranks = ranks_of(named, group)
        leader = Leader(ranks)
        new: Any = None
        try:
            request = leader.each(ask, partial(weights.check, ranks), RUN, run, version)
            of_ranks = leader.collect((request, repeats_here(named)))
            new = leader.attempt(self._begin, ranks, of_ranks, named, kv_scales)
            layout: Any = leader.share(new and new.layout)
            planned = sources_for(named, family, layout)
            for (_, parameter), source in zip(named, planned, strict=True):
                if not source.cuts:
                    continue
                whole = source.read(parameter)
                for name, cut in source.cuts:
                    leader.attempt(VersionWriter.put, new, name, cut(whole), source.sent_as)
            size = leader.share(leader.attempt(self._finish, new) or 0)
        except BaseException as error:
            leader.tell(error)
            if new is not None:
                new.delete()
            raise
        if leader.rank == 0:
            self._clean()
        return size

    def close(self) -> None:
        """Let another process publish in the folder; the next version of this one is whole."""
        if self._lock is not None:
            self._lock.close()
        self._lock, self._tensors, self._serial = None, {}, 0

    def _begin(
        self,
        ranks: tuple[int, ...],
        of_ranks: list[tuple[PolicyRequest | str, bool | None]],
        named: Named,
        kv_scales: torch.Tensor | None,
    ) -> VersionWriter:
        policy = agree(ranks, [request for request, _ in of_ranks])
        if self._lock is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock(self._folder)
        index = read_index(self._folder)
        last = index.links[-1] if index.links else None
        if policy.run in index.replaced:
            raise ChainError(f"run {policy.run!r} was replaced in the chain by a later one")
        if last is not None and last.run == policy.run and last.version >= policy.version:
            raise ChainError(f"the chain has {last.policy} already; publish a later version")
        layout = KEPT.connection_to(self._like).layout()
        if not layout["formats"] or layout["fp32"] is None:
            raise ChainError(
                "the engine does not know yet what it keeps its tensors in; update it first"
            )
        check_head(named, layout["tied"], on_all_ranks(repeats for _, repeats in of_ranks))
        if kv_scales is not None:
            check_kv_scales(kv_scales, layout.get("kv_cache"))
        # else it was interrupted, or another process came between
        before = self._tensors if index.serial == self._serial else {}
        is_anchor = not before or self._since + 1 >= self._anchor_every
        serial = max(index.serial + 1, time.time_ns())  # later than those of a chain that is gone
        return VersionWriter(self._folder, policy, serial, layout, before, is_anchor, kv_scales)

    def _finish(self, new: VersionWriter) -> int:
        link = new.finish(self._serial)
        index = read_index(self._folder)
        if index.serial >= link.serial or (link.base and index.serial != link.base):
            raise ChainError(f"another process published in {self._folder}; end one of them")
        write_index(self._folder, _extended(index, link))
        self._tensors, self._serial = new.tensors, link.serial
        self._since = 0 if link.anchor else self._since + 1
        return sum(part.bytes for part in link.delta or link.anchor)

    def _clean(self) -> None:
        try:
            delete_all_but(self._folder, read_index(self._folder).parts)
        except (ChainError, OSError) as error:
            logger.warning("old files of the chain are left: %s", error)


def _extended(index: Index, link: Link) -> Index:
    """With a new version, and without those before the last anchor but one: a reader may be at work
    on that."""
    links = (*index.links, link)
    replaced = index.replaced
    if index.links and index.links[-1].run != link.run:
        replaced = (*replaced, index.links[-1].run)
    anchors = [number for number, each in enumerate(links) if each.anchor]
    return Index(links[anchors[-2] if len(anchors) > 1 else 0 :], replaced)
