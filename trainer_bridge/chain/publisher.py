"""Publishes a trainer's weights in a chain: quantized as an engine keeps them, and what changed."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sgl_fp8rl.formats import by_tensor
from sgl_fp8rl.formats.weight_format import WEIGHT_DTYPES, WeightFormat
from sgl_fp8rl.protocol.image import difference
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.policy import Policy, check_policy
from trainer_bridge import hf_names
from trainer_bridge.chain import files
from trainer_bridge.chain.files import ChainError, Link, PartWriter
from trainer_bridge.collective import Leader, ranks_of
from trainer_bridge.connections import connection_to
from trainer_bridge.fsdp import Named, NamedTensors, Source, named_tensors
from trainer_bridge.layout import check_kv_scales, sources_for
from trainer_bridge.weights_digest import weights_digest

logger = logging.getLogger(__name__)

DELTA = "delta:"
"""Before the name of a tensor that is given by what changed in it (``protocol/image.py``)."""
Tensors = dict[str, torch.Tensor]
"""All tensors of a version, on the CPU, by their names in an HF checkpoint."""


class ChainPublisher:
    """Writes versions into a folder; the first one of a process is whole.

    It keeps the last version in host memory: 9.4 GB of the 8B shape.

    Args:
        folder: is made, where there is none. One process writes to it.
        like: the engine (as for ``update``) whose layers decide what is FP8; on the ranks that do
            not lead, None.
        every: each so many-th version is written whole besides, for those who join late; the
            files of the last two such versions, and of all since, are kept.
    """

    def __init__(self, folder: str | Path, like: Any, every: int = 16) -> None:
        if type(every) is not int or every < 1:
            raise ChainError(f"every is {every!r}; give a number from 1")
        self._folder, self._like, self._every = Path(folder), like, every
        self._state: Tensors = {}
        self._digest = ""
        self._since = 0

    def publish(
        self,
        model_or_named_tensors: nn.Module | NamedTensors,
        *,
        version: int,
        run: str,
        kv_scales: torch.Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> int:
        """Write a version; where it fails, the chain ends with the one before.

        With FSDP2 every rank calls; the first one writes.

        Args:
            model_or_named_tensors, version, run, kv_scales, group: as for ``update``; no iterator.

        Returns:
            bytes of the delta, or of all tensors where there is none; the same on every rank.

        Raises:
            ChainError: it cannot be written, or is older than what is there.
            ManifestError: weights, version, run or scales are not valid.
        """
        policy = check_policy(run, version)
        family = None
        if isinstance(model_or_named_tensors, nn.Module):
            family = hf_names.model_type(model_or_named_tensors)
        named = named_tensors(model_or_named_tensors)
        leader = Leader(ranks_of(named, group))
        try:
            layout: Any = leader.share(leader.attempt(self._layout))
            formats = by_tensor(layout["formats"])
            new = leader.attempt(self._begin, policy)
            for name, whole in _hf_tensors(named, sources_for(named, family, layout)):
                leader.attempt(_Version.put, new, name, whole, formats.get(name))
            if kv_scales is not None:
                leader.attempt(check_kv_scales, kv_scales, layout["kv_cache"])
                leader.attempt(_Version.put, new, KV_SCALES, kv_scales, None)
            return leader.share(leader.attempt(self._finish, new) or 0)
        except BaseException as error:
            leader.tell(error)
            raise
        finally:
            if leader.rank == 0:
                self._clean()

    def _begin(self, policy: Policy) -> "_Version":
        links = files.read_index(self._folder)
        last = links[-1] if links else None
        if last is not None and last.run == policy.run and last.version >= policy.version:
            raise ChainError(f"the chain has {last.policy} already; publish a later version")
        is_anchor = not self._state or self._since + 1 >= self._every
        return _Version(self._folder, policy, self._state, is_anchor)

    def _layout(self) -> dict[str, Any]:
        layout = connection_to(self._like).layout()
        if not layout["formats"] or layout["fp32"] is None:
            raise ChainError(
                "the engine does not know yet what it keeps its tensors in; update it first"
            )
        return {name: layout.get(name) for name in ("dtype", "fp32", "formats", "kv_cache")}

    def _finish(self, new: "_Version") -> int:
        link = new.finish(self._digest)
        files.write_index(self._folder, _kept([*files.read_index(self._folder), link]))
        self._state, self._digest = new.tensors, link.digest
        self._since = 0 if link.anchor else self._since + 1
        return sum(part.bytes for part in link.delta or link.anchor)

    def _clean(self) -> None:
        try:
            files.delete_all_but(self._folder, files.read_index(self._folder))
        except (ChainError, OSError) as error:
            logger.warning("files of a version that is not in the chain may be left: %s", error)


class _Version:
    """One version as it is written.

    Args:
        before: the tensors of the version before.
        is_anchor: whether it is written whole besides.
    """

    def __init__(self, folder: Path, policy: Policy, before: Tensors, is_anchor: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.policy, self._before = policy, before
        self.tensors: Tensors = {}
        name = f"{policy.version:08d}"
        self._delta = PartWriter(folder, f"{name}-delta") if before else None
        self._anchor = PartWriter(folder, f"{name}-anchor") if is_anchor else None

    def put(self, name: str, tensor: torch.Tensor, format_: WeightFormat | None) -> None:
        """Add a tensor of the checkpoint.

        Args:
            format_: what the engine keeps it in, if it quantizes it.
        """
        if format_ is None or tensor.dtype not in WEIGHT_DTYPES:
            self._put(name, tensor.to("cpu", copy=True))
            return
        for suffix, part in format_.encode(tensor).items():
            self._put(name + suffix, part.cpu())

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        if name in self.tensors:
            raise ManifestError(f"{name} comes twice; give each tensor once")
        self.tensors[name] = tensor = tensor.contiguous()
        if self._anchor is not None:
            self._anchor.put(name, tensor)
        if self._delta is not None:
            put_change(self._delta, name, self._before.get(name), tensor)

    def finish(self, base: str) -> Link:
        """The version, all files of which are on disk.

        Args:
            base: the digest of the version before.

        Raises:
            ManifestError: it has other tensors than the version before.
        """
        if self._before and self._before.keys() != self.tensors.keys():
            name = sorted(self._before.keys() ^ self.tensors.keys())[0]
            raise ManifestError(
                f"{name} is in one of two versions; publish another model in another folder"
            )
        delta, anchor = (w.finish() if w is not None else () for w in (self._delta, self._anchor))
        digest = weights_digest([*self.tensors.items()])
        return Link(*self.policy, digest, base if delta else "", delta, anchor)


def put_change(writer: PartWriter, name: str, old: torch.Tensor | None, new: torch.Tensor) -> None:
    """Write what makes a tensor out of an old one: nothing where they are equal, or all of it."""
    change = None
    if old is not None and (old.shape, old.dtype) == (new.shape, new.dtype):
        change = difference(as_bytes(old), as_bytes(new))
    if change is None:
        writer.put(name, new)
    elif change.numel():
        writer.put(DELTA + name, change)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, uint8 ``[N]``."""
    return tensor.view(-1).view(torch.uint8)


def _kept(links: list[Link]) -> list[Link]:
    """From the last anchor but one on: a reader may be at work on it."""
    anchors = [index for index, link in enumerate(links) if link.anchor]
    return links[anchors[-2] if len(anchors) > 1 else 0 :]


def _hf_tensors(named: Named, sources: list[Source]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of the checkpoint, gathered on every rank that holds a part of it."""
    for (_, parameter), source in zip(named, sources, strict=True):
        whole = source.read(parameter)
        for name, cut in source.cuts:
            yield name, cut(whole).to(source.sent_as)
