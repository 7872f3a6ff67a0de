"""Publishes a trainer's weights in a chain: quantized as an engine keeps them, and what changed."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sgl_fp8rl.formats import FORMATS, by_tensor, format_of, split_name
from sgl_fp8rl.formats.weight_format import WEIGHT_DTYPES, Encoded
from sgl_fp8rl.protocol.attempt import attempt
from sgl_fp8rl.protocol.image import difference
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import ManifestError, describe
from sgl_fp8rl.protocol.policy import Policy
from trainer_bridge import hf_names
from trainer_bridge.agreement import Asked, agree, ask
from trainer_bridge.chain import budget, files
from trainer_bridge.chain.files import (
    ChainError,
    Index,
    Link,
    PartWriter,
    Tensors,
    as_bytes,
)
from trainer_bridge.collective import Leader, check_ranks, ranks_of
from trainer_bridge.connections import connection_to
from trainer_bridge.fsdp import Named, NamedTensors, named_tensors
from trainer_bridge.layout import check_kv_scales, sources_for
from trainer_bridge.update import RUN

logger = logging.getLogger(__name__)

DELTA = "delta:"
"""Before the name of a tensor that is given by what changed in it (``protocol/image.py``)."""


class ChainPublisher:
    """Writes versions into a folder; the first one of a process is whole.

    It keeps the last version in host memory, 9.4 GB of the 8B shape, and the next one while it is
    written.

    Args:
        folder: is made, where there is none. One process at a time writes to it.
        like: the engine (as for ``update``) whose layers decide what is FP8; on the ranks that do
            not lead, None.
        anchor_every: every so many-th version is written whole besides, for those who join late.
            The files of the last two such versions, and of all since, are kept.
        budget_bytes: of a delta, before it is compressed: the largest changes are published, and
            what is left of them with a later version. By default versions are exact; those that
            are written whole besides always are, and so is each that fits.

    Raises:
        ChainError: ``anchor_every`` or ``budget_bytes`` is no number from 1, or zstandard is not
            installed.
    """

    def __init__(
        self,
        folder: str | Path,
        like: Any,
        anchor_every: int = 16,
        budget_bytes: int | None = None,
    ) -> None:
        for name, value in (("anchor_every", anchor_every), ("budget_bytes", budget_bytes)):
            if value is not None and (type(value) is not int or value < 1):
                raise ChainError(f"{name} is {value!r}; give a number from 1")
        files.zstandard()
        self._folder, self._like, self._anchor_every = Path(folder), like, anchor_every
        self._budget_bytes = budget_bytes
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
            ChainError: it cannot be written, or is older than what is there.
            ManifestError: weights, version, run or scales are not valid, or ranks differ.
        """
        if isinstance(model_or_named_tensors, DistributedDataParallel):
            group = group or model_or_named_tensors.process_group
            model_or_named_tensors = model_or_named_tensors.module
        named, fault = attempt(_named, model_or_named_tensors)
        ranks = ranks_of(named or [], group)
        leader = Leader(ranks)

        def check() -> None:
            if fault is not None:
                raise fault
            check_ranks(named or [], ranks)

        new: _Version | None = None
        try:
            asked = leader.collect(leader.each(ask, check, RUN, run, version))
            new = leader.attempt(self._begin, ranks, asked, kv_scales)
            layout: Any = leader.share(new and new.layout)
            family = None
            if isinstance(model_or_named_tensors, nn.Module):
                family = hf_names.model_type(model_or_named_tensors)
            for (_, parameter), source in zip(
                named or [], sources_for(named or [], family, layout), strict=True
            ):
                whole = source.read(parameter)
                for name, cut in source.cuts:
                    leader.attempt(_put, new, name, cut, whole, source.sent_as)
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
        asked: list[Asked | str],
        kv_scales: torch.Tensor | None,
    ) -> "_Version":
        policy = agree(ranks, asked)
        if self._lock is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = files.lock(self._folder)
        index = files.read_index(self._folder)
        last = index.links[-1] if index.links else None
        if policy.run in index.replaced:
            raise ChainError(f"run {policy.run!r} was replaced in the chain by a later one")
        if last is not None and last.run == policy.run and last.version >= policy.version:
            raise ChainError(f"the chain has {last.policy} already; publish a later version")
        layout = connection_to(self._like).layout()
        if not layout["formats"] or layout["fp32"] is None:
            raise ChainError(
                "the engine does not know yet what it keeps its tensors in; update it first"
            )
        if kv_scales is not None:
            check_kv_scales(kv_scales, layout.get("kv_cache"))
        # else it was interrupted, or another process came between
        before = self._tensors if index.serial == self._serial else {}
        is_anchor = not before or self._since + 1 >= self._anchor_every
        serial = max(index.serial + 1, time.time_ns())  # later than those of a chain that is gone
        most = None if is_anchor else self._budget_bytes
        return _Version(self._folder, policy, serial, layout, before, is_anchor, most, kv_scales)

    def _finish(self, new: "_Version") -> int:
        link = new.finish(self._serial)
        index = files.read_index(self._folder)
        if index.serial >= link.serial or (link.base and index.serial != link.base):
            raise ChainError(f"another process published in {self._folder}; end one of them")
        files.write_index(self._folder, _extended(index, link))
        self._tensors, self._serial = new.tensors, link.serial
        self._since = 0 if link.anchor else self._since + 1
        return sum(part.bytes for part in link.delta or link.anchor)

    def _clean(self) -> None:
        try:
            files.delete_all_but(self._folder, files.read_index(self._folder).parts)
        except (ChainError, OSError) as error:
            logger.warning("old files of the chain are left: %s", error)


class _Version:
    """One version as it is written.

    Args:
        layout: of the engine whose formats are used.
        before: the tensors of the version before.
        is_anchor: whether it is written whole besides.
        budget_bytes: of its delta, or None.
    """

    def __init__(
        self,
        folder: Path,
        policy: Policy,
        serial: int,
        layout: dict[str, Any],
        before: Tensors,
        is_anchor: bool,
        budget_bytes: int | None,
        kv_scales: torch.Tensor | None,
    ) -> None:
        self.layout = {name: layout[name] for name in ("dtype", "fp32", "formats")}
        self.tensors: Tensors = {}
        self._folder, self._policy, self._serial, self._before = folder, policy, serial, before
        self._formats, self._budget_bytes = by_tensor(layout["formats"]), budget_bytes
        self._delta = PartWriter(folder, f"{serial}-delta") if before else None
        self._anchor = PartWriter(folder, f"{serial}-anchor") if is_anchor else None
        scales = before.get(KV_SCALES) if kv_scales is None else kv_scales
        if scales is not None:
            self._put(KV_SCALES, scales.detach().to("cpu", copy=True))

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor of the checkpoint.

        Raises:
            ManifestError: it holds what no engine takes.
        """
        if name == KV_SCALES:
            raise ManifestError(f"{KV_SCALES} is no tensor of a checkpoint; pass kv_scales")
        try:
            encoded = self._encoded(name, tensor)
        except KeyError as error:
            raise ManifestError(f"{name} has dtype {tensor.dtype}; send one of {_KNOWN}") from error
        except ValueError as error:
            raise ManifestError(f"{name} {error}") from error
        for suffix, part in encoded.items():
            self._put(name + suffix, part)

    def _encoded(self, name: str, tensor: torch.Tensor) -> Encoded:
        """As the engine keeps it: checked, on the CPU, in memory of its own."""
        format_ = self._formats.get(name)
        if format_ is not None and tensor.dtype in WEIGHT_DTYPES:
            return {suffix: part.cpu() for suffix, part in format_.encode(tensor).items()}
        owner, suffix = split_name(name)
        if suffix and owner in self._formats:
            self._formats[owner].check_values(suffix, tensor)
        else:
            format_of(tensor.dtype).check_values("", tensor)
        return {"": tensor.to("cpu", copy=True)}

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        if name in self.tensors:
            raise ManifestError(f"{name} comes twice; give each tensor once")
        self.tensors[name] = tensor = tensor.contiguous()
        if self._anchor is not None:
            self._anchor.put(name, tensor)
        if self._delta is not None and self._budget_bytes is None:
            put_change(self._delta, name, self._before.get(name), tensor)

    def finish(self, base: int) -> Link:
        """The version, all files of which are on disk.

        Args:
            base: the serial of the version before.

        Raises:
            ManifestError: it has other tensors than the version before.
        """
        weights = {name: t for name, t in self.tensors.items() if name != KV_SCALES}
        describe(weights.items(), self._policy.version)
        if self._before and (odd := (self._before.keys() - {KV_SCALES}) ^ weights.keys()):
            raise ManifestError(
                f"{min(odd)} is only in one of the last two versions; publish another model in "
                f"another folder"
            )
        is_exact = True
        if self._delta is not None and self._budget_bytes is not None:
            self.tensors, is_exact = self._within(self._budget_bytes)
            for name, tensor in self.tensors.items():
                put_change(self._delta, name, self._before.get(name), tensor)
        delta, anchor = (w.finish() if w is not None else () for w in (self._delta, self._anchor))
        digest = files.digest(self.tensors)
        base = base if delta else 0
        return Link(self._serial, *self._policy, digest, base, delta, anchor, is_exact)

    def _within(self, budget_bytes: int) -> tuple[Tensors, bool]:
        """What of this version fits; KV scales go together, and are not counted."""
        same = {
            name: tensor
            for name, tensor in self.tensors.items()
            if name != KV_SCALES
            and (old := self._before.get(name)) is not None
            and (old.shape, old.dtype) == (tensor.shape, tensor.dtype)
        }
        chosen, is_exact = budget.within(self._before, same, budget_bytes)
        return {**self.tensors, **chosen}, is_exact

    def delete(self) -> None:
        """Delete its files, unless the index has them already."""
        index, _ = attempt(files.read_index, self._folder)
        if index is None:
            return  # which version it ends with is not known
        written = [w.parts for w in (self._delta, self._anchor) if w is not None]
        for name in {part.name for parts in written for part in parts} - index.parts:
            (self._folder / name).unlink(missing_ok=True)


_KNOWN = ", ".join(str(dtype) for format_ in FORMATS.values() for dtype in format_.dtypes)


def put_change(writer: PartWriter, name: str, old: torch.Tensor | None, new: torch.Tensor) -> None:
    """Write what makes a tensor out of an old one: nothing where they are equal, or all of it."""
    change = None
    if old is not None and (old.shape, old.dtype) == (new.shape, new.dtype):
        change = difference(as_bytes(old), as_bytes(new))
    if change is None:
        writer.put(name, new)
    elif change.numel():
        writer.put(DELTA + name, change)


def _named(given: nn.Module | NamedTensors) -> Named:
    if isinstance(given, Iterator):
        raise ManifestError("an iterator cannot be published; pass a module, a mapping or a list")
    return named_tensors(given)


def _put(
    new: _Version, name: str, cut: hf_names.Cut, whole: torch.Tensor, dtype: torch.dtype
) -> None:
    new.put(name, cut(whole).to(dtype))


def _extended(index: Index, link: Link) -> Index:
    """With a new version, and without those before the last anchor but one: a reader may be at work
    on that."""
    links = (*index.links, link)
    replaced = index.replaced
    if index.links and index.links[-1].run != link.run:
        replaced = (*replaced, index.links[-1].run)
    anchors = [number for number, each in enumerate(links) if each.anchor]
    return Index(links[anchors[-2] if len(anchors) > 1 else 0 :], replaced)
