"""Routes: where a slice of one HF tensor lives in this rank's engine storage.

SGLang's ``model.load_weights`` knows every architecture. It runs once with probes in the place of
tensors (``route_tracer.py``); each copy that it makes becomes a route, replayed at every update.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from sgl_fp8rl.ops.reference import BLOCK, FP8_DTYPE, num_blocks
from sgl_fp8rl.protocol.manifest import SCALE_SUFFIX, Manifest, ManifestError

Span = tuple[int, int]
"""Start and stop along one dimension."""
Region = tuple[Span, ...]
"""A box inside a tensor: one span for each dimension."""


class RouteError(RuntimeError):
    """SGLang's loader does something with the weights that cannot be served right."""


@dataclass(frozen=True)
class Route:
    """One copy: a box of an HF tensor to a box of an engine parameter, of equal sizes.

    Dimensions of size 1 may stand on one side only (an expert's matrix goes into a stack).
    """

    source: str
    src: Region
    parameter: str
    dst: Region


def sizes(region: Region) -> tuple[int, ...]:
    """Length along each dimension."""
    return tuple(stop - start for start, stop in region)


def numel(region: Region) -> int:
    """Elements in the box."""
    return math.prod(sizes(region))


def view(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The box as a view."""
    return tensor[tuple(slice(start, stop) for start, stop in region)]


def as_region(
    shape: tuple[int, ...], offset: int, sizes_: tuple[int, ...], strides: tuple[int, ...]
) -> Region | None:
    """The box that a strided view covers in a contiguous tensor, or None if it is no box.

    Args:
        shape: the contiguous tensor's shape.
        offset, sizes_, strides: the view, in elements.
    """
    kept = [(s, st) for s, st in zip(sizes_, strides, strict=True) if s != 1]
    if len(kept) == 1 and kept[0] == (math.prod(shape), 1) and offset == 0:
        return tuple((0, s) for s in shape)  # the whole tensor, flattened
    region: list[Span] = []
    step = math.prod(shape)
    for size in shape:
        step //= size
        start, offset = divmod(offset, step)
        length = 1
        if kept and kept[0][1] == step and size != 1:
            length = kept.pop(0)[0]
        if start + length > size:
            return None
        region.append((start, start + length))
    return None if kept or offset else tuple(region)


def to_blocks(region: Region) -> Region:
    """The region of the scales that belongs to a region of codes."""
    *lead, rows, cols = region
    return (*lead, *((start // BLOCK, num_blocks(stop)) for start, stop in (rows, cols)))


@dataclass
class RouteTable:
    """Everything that updates of one model on one rank need to know."""

    sources: Mapping[str, tuple[int, ...]]
    """Shape of each HF tensor that was offered to the loader."""
    routes: dict[str, list[Route]]
    """The routes of each HF tensor; empty where this rank keeps nothing of it."""
    parameters: dict[str, torch.Tensor]
    """Engine storage by parameter name, scales included."""
    fallback: dict[str, str] = field(default_factory=dict)
    """Tensors that go through ``load_weights`` at each update, with the reason."""
    constants: list[tuple[str, Region]] = field(default_factory=list)
    """Boxes that the loader filled with a constant, such as vocabulary padding."""
    by_loader: set[str] = field(default_factory=set)
    """Parameters that only ``load_weights`` writes; each session holds that it did."""
    skipped: frozenset[str] = frozenset()
    """Tensors that no rank's loader keeps, such as the head of a tied model; an update may omit
    them."""

    def is_fp8(self, source: str) -> bool:
        """Whether the engine keeps this HF tensor as codes and scales."""
        routes = self.routes.get(source, ())
        return any(self.parameters[route.parameter].dtype == FP8_DTYPE for route in routes)

    def kept_in(self, dtype: torch.dtype) -> list[str]:
        """The HF tensors that the engine keeps in this dtype."""
        return [
            source
            for source, routes in self.routes.items()
            if any(self.parameters[route.parameter].dtype == dtype for route in routes)
        ]

    def check(self) -> None:
        """Hold what must be true before anything is written through these routes.

        Raises:
            RouteError: a parameter is not covered exactly once, an FP8 box does not fall on block
                borders or has no scales, or one tensor goes to FP8 and to other storage.
        """
        covered: dict[str, list[Region]] = defaultdict(list)
        for name, region in self.constants:
            covered[name].append(region)
        for source, routes in self.routes.items():
            if len({self.parameters[r.parameter].dtype == FP8_DTYPE for r in routes}) > 1:
                raise RouteError(
                    f"{source} goes to FP8 storage and to other storage at once; leave its layers "
                    f"BF16 with --fp8rl-ignored-layers"
                )
            for route in routes:
                covered[route.parameter].append(route.dst)
                if self.is_fp8(source):
                    self._check_blocks(route)
        for name, tensor in self.parameters.items():
            if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in self.parameters:
                continue  # derived from the codes' routes, block by block
            self._check_cover(name, tensor, covered[name])

    def _check_blocks(self, route: Route) -> None:
        parameter = self.parameters[route.parameter]
        scale = self.parameters.get(route.parameter + SCALE_SUFFIX)
        for region, shape in (
            (route.src, self.sources[route.source]),
            (route.dst, parameter.shape),
        ):
            for (start, stop), size in zip(region[-2:], shape[-2:], strict=True):
                if start % BLOCK or (stop % BLOCK and stop != size):
                    raise RouteError(
                        f"{route.source} -> {route.parameter} cuts a 128x128 block at "
                        f"{start}:{stop} of {size}; leave it BF16 with --fp8rl-ignored-layers"
                    )
        n, k = (num_blocks(size) for size in parameter.shape[-2:])
        if scale is None or tuple(scale.shape) != (*parameter.shape[:-2], n, k):
            raise RouteError(
                f"{route.parameter} is FP8 but {route.parameter + SCALE_SUFFIX} is "
                f"{'missing' if scale is None else tuple(scale.shape)}; report this model family"
            )

    def _check_cover(self, name: str, tensor: torch.Tensor, regions: list[Region]) -> None:
        total = sum(numel(region) for region in regions)
        if total == tensor.numel() and not _overlap(regions):
            return
        if self.fallback and tensor.dtype != FP8_DTYPE and total == 0:
            self.by_loader.add(name)
            return
        raise RouteError(
            f"the stream writes {total} of {tensor.numel()} elements of {name}"
            + (f" (not recorded: {', '.join(sorted(self.fallback))})" if self.fallback else "")
            + "; this model family cannot be updated in place yet"
        )

    def match(self, manifest: Manifest, kv_scales: Collection[str] = ()) -> None:
        """Hold a manifest against what this model needs.

        Args:
            kv_scales: names of the manifest that are no weights.

        Raises:
            ManifestError: an unknown or missing name, a wrong shape, FP8 for a BF16 layer.
        """
        offered = {name: spec for name, spec in manifest.weights() if name not in kv_scales}
        unknown = sorted(offered.keys() - self.sources.keys())
        missing = sorted(self.sources.keys() - self.skipped - offered.keys())
        if unknown or missing:
            raise ManifestError(_name_mismatch(unknown, missing))
        for name, spec in offered.items():
            if spec.shape != self.sources[name]:
                raise ManifestError(
                    f"{name} has shape {spec.shape}, the engine loaded {self.sources[name]}; send "
                    f"the whole tensor in the checkpoint's layout"
                )
            # A rank that keeps nothing of the tensor cannot tell; the ranks that do will.
            kept = self.routes.get(name) or name in self.fallback
            if spec.dtype == FP8_DTYPE and kept and not self.is_fp8(name):
                raise ManifestError(
                    f"{name} is FP8, but the engine keeps this tensor in BF16; send it in BF16"
                )

    def routes_for(self, name: str, manifest: Manifest) -> list[Route]:
        """The routes of a tensor of this manifest; those of scales follow from their codes'."""
        if not manifest.is_scale(name):
            return self.routes[name]
        codes = self.routes[name.removesuffix(SCALE_SUFFIX)]
        return [
            Route(name, to_blocks(r.src), r.parameter + SCALE_SUFFIX, to_blocks(r.dst))
            for r in codes
        ]


def _name_mismatch(unknown: list[str], missing: list[str]) -> str:
    def first(names: list[str]) -> str:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(names[:3]) + more

    facts = [f"unknown: {first(unknown)}"] if unknown else []
    facts += [f"missing: {first(missing)}"] if missing else []
    return f"the names are not this model's ({'; '.join(facts)}); use those of the HF checkpoint"


def _overlap(regions: list[Region]) -> bool:
    def pairs(group: list[Region]) -> Iterator[tuple[Region, Region]]:
        return ((a, b) for i, a in enumerate(group) for b in group[i + 1 :])

    if len(regions) < 2:
        return False
    if not regions[0]:
        return True  # a scalar, written twice
    by_first: dict[Span, list[Region]] = defaultdict(list)
    for region in regions:
        by_first[region[0]].append(region)
    apart = all(a[1] <= b[0] for a, b in pairwise(sorted(by_first)))
    # boxes that are apart along the first dimension, such as experts, need no look at each pair
    groups = list(by_first.values()) if apart else [regions]
    return any(
        all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(one, other, strict=True))
        for group in groups
        for one, other in pairs(group)
    )


def shapes_of(manifest: Manifest, kv_scales: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Shape by name of everything but scales."""
    return {name: spec.shape for name, spec in manifest.weights() if name not in kv_scales}
