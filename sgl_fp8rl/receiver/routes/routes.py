"""Routes: where a slice of one HF tensor lives in this rank's engine storage.

SGLang's ``model.load_weights`` knows every architecture. It runs once with probes in the place of
tensors (``route_tracer.py``); each copy that it makes becomes a route, replayed at every update.
No route leads to constants and derived tensors: these are made again behind the copies.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from sgl_fp8rl.formats import (
    QUANTIZED,
    UNQUANTIZED,
    split_name,
    stored_format,
)
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.ops.regions import Region, numel, overlap, view
from sgl_fp8rl.protocol.manifest import (
    Manifest,
    ManifestError,
    wrong_names,
    wrong_shape,
)


class RouteError(RuntimeError):
    """SGLang's loader does something with the weights that cannot be served right."""


_LEAVE = "leave its layer BF16 with --fp8rl-ignored-layers, or all such with --fp8rl-ragged bf16"
FUSED_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
"""How transformers ends the names of parameters that hold the experts of a layer."""
DERIVED = ("w_kc", "w_vc")
Constant = tuple[str, Region, float]
"""A box of a parameter that no update brings, and the value that it holds."""


@dataclass(frozen=True)
class Route:
    """One copy: a box of an HF tensor to a box of an engine parameter, of equal sizes.

    Dimensions of size 1 may stand on one side only (an expert's matrix goes into a stack).
    """

    source: str
    src: Region
    parameter: str
    dst: Region


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
    constants: list[Constant] = field(default_factory=list)
    """Padding: of blocks, and what the loader filled, such as that of the vocabulary."""
    by_loader: set[str] = field(default_factory=set)
    """Parameters that only ``load_weights`` writes; each session checks that it did."""
    skipped: frozenset[str] = frozenset()
    """Tensors that no rank's loader keeps, such as the head of a tied model; an update may omit
    them."""

    def format_of(self, route: Route) -> WeightFormat:
        """The format of the storage that a route leads to."""
        return stored_format(self.parameters[route.parameter])

    def storage_of(self, parameter: str) -> tuple[WeightFormat, str]:
        """The format that a parameter is stored in, and its suffix there; ``""`` for codes."""
        weight, suffix = split_name(parameter)
        if suffix and weight in self.parameters:
            format_ = stored_format(self.parameters[weight])
            if suffix in format_.suffixes:
                return format_, suffix
        return stored_format(self.parameters[parameter]), ""

    def kept_as(self, source: str) -> WeightFormat:
        """The format of the storage that all routes of an HF tensor lead to."""
        routes = self.routes.get(source)
        return self.format_of(routes[0]) if routes else UNQUANTIZED

    def why_ragged(self, source: str) -> str | None:
        """Why the sides of an HF matrix are not multiples of a block's, or None if they are."""
        *_, rows, cols = self.sources[source]
        return QUANTIZED.refusal([rows], cols)

    def by_format(self) -> dict[str, list[str]]:
        """The HF tensors that a trainer may send as codes, by the name of the format."""
        found: dict[str, list[str]] = defaultdict(list)
        for source, routes in self.routes.items():
            for name in {self.format_of(route).name for route in routes}:
                if name != UNQUANTIZED.name:
                    found[name].append(source)
        return dict(found)

    @cached_property
    def names(self) -> dict[str, Any]:
        """HF tensors by how they are kept, for the engine's ``layout``: the same until a new table
        is recorded."""
        fp32 = [
            source
            for source, routes in self.routes.items()
            if any(self.parameters[route.parameter].dtype == torch.float32 for route in routes)
        ]
        return {"fp32": fp32, "formats": self.by_format()}

    def check(self) -> None:
        """Check what must be true before anything is written through these routes.

        Raises:
            RouteError: a parameter is not covered exactly once, a block of storage is not one of a
                tensor, a quantized box has no scales, or one tensor goes to storage of two formats.
        """
        covered: dict[str, list[Region]] = defaultdict(list)
        blocks: dict[str, list[Region]] = defaultdict(list)
        for name, region, _ in self.constants:
            covered[name].append(region)
        for source, routes in self.routes.items():
            if len({self.format_of(route).name for route in routes}) > 1:
                raise RouteError(
                    f"{source} goes to storage of two formats at once; leave its layers BF16 with "
                    f"--fp8rl-ignored-layers"
                )
            for route in routes:
                covered[route.parameter].append(route.dst)
                blocks[route.parameter].append(self._check_format(route))
        for name, regions in blocks.items():
            if stored_format(self.parameters[name]) is not UNQUANTIZED and overlap(regions):
                raise RouteError(f"two tensors share a block of {name}; {_LEAVE}")
        for name, tensor in self.parameters.items():
            _, suffix = self.storage_of(name)
            if not suffix:  # a companion's routes are derived from its codes'
                self._check_cover(name, tensor, covered[name])

    def _check_format(self, route: Route) -> Region:
        """The blocks of storage that a route writes to, which must be those of its source."""
        parameter, format_ = self.parameters[route.parameter], self.format_of(route)
        shape = tuple(parameter.shape)
        source = self.sources[route.source]
        blocks = format_.stored_blocks(route.src, route.dst, source, shape)
        if blocks is None:
            raise RouteError(
                f"{route.source} -> {route.parameter} cuts a block: {route.src} goes to "
                f"{route.dst} of {shape}; {_LEAVE}"
            )
        for suffix, spec in format_.companions(shape).items():
            companion = self.parameters.get(route.parameter + suffix)
            if companion is None or tuple(companion.shape) != spec.shape:
                raise RouteError(
                    f"{route.parameter} is {format_.name} but {route.parameter + suffix} is "
                    f"{'missing' if companion is None else tuple(companion.shape)}; report this "
                    f"model family"
                )
        return blocks

    def _check_cover(self, name: str, tensor: torch.Tensor, regions: list[Region]) -> None:
        total = sum(numel(region) for region in regions)
        if total == tensor.numel() and not overlap(regions):
            return
        quantized = stored_format(tensor) is not UNQUANTIZED
        if self.fallback and not quantized and total == 0:
            self.by_loader.add(name)
            return
        for source, shape in self.sources.items():
            if source.endswith(FUSED_EXPERTS) and len(shape) == 3 and not self.routes[source]:
                raise RouteError(
                    f"{source} holds all experts of a layer, and SGLang's loader of this model "
                    f"takes each expert's matrices by themselves; save the checkpoint in its "
                    f"original format (save_original_format=True in transformers)"
                )
        raise RouteError(
            f"the stream writes {total} of {tensor.numel()} elements of {name}"
            + (f" (not recorded: {', '.join(sorted(self.fallback))})" if self.fallback else "")
            + "; this model family cannot be updated in place yet"
        )

    def match(self, manifest: Manifest, kv_scales: Collection[str] = ()) -> None:
        """Check a manifest against what this model needs.

        Args:
            kv_scales: names of the manifest that are not weights.

        Raises:
            ManifestError: an unknown or missing name, a wrong shape, FP8 for a BF16 layer.
        """
        offered = {name: spec for name, spec in manifest.weights() if name not in kv_scales}
        unknown = offered.keys() - self.sources.keys()
        missing = self.sources.keys() - self.skipped - offered.keys()
        if unknown or missing:
            raise ManifestError(wrong_names(unknown, missing))
        for name, spec in offered.items():
            if spec.shape != self.sources[name]:
                raise ManifestError(wrong_shape(name, spec.shape, self.sources[name]))
            # A rank that keeps nothing of the tensor cannot tell; the ranks that do will.
            sent, kept = manifest.format_of(name), self.kept_as(name)
            if sent is UNQUANTIZED or not (self.routes.get(name) or name in self.fallback):
                continue
            # Codes of a variant are codes of the other, too. Where no one says which they are of,
            # values are checked as they come.
            if not isinstance(kept, type(sent)) or manifest.codes not in (None, kept.name):
                raise ManifestError(
                    f"{name} is {manifest.codes or sent.name}, but the engine keeps it in "
                    f"{kept.name}; send it unquantized, or update again if the engine has restarted"
                )

    def fill_constants(self) -> None:
        """Fill boxes of constants again: no update brings them, and released memory lost them."""
        for name, region, value in self.constants:
            view(self.parameters[name], region).fill_(value)

    def routes_for(self, name: str, manifest: Manifest) -> list[Route]:
        """The routes of a tensor of this manifest; a companion's follow from its codes'."""
        if not manifest.is_companion(name):
            return self.routes[name]
        weight, suffix = split_name(name)
        region = manifest.format_of(weight).companion_region
        return [
            Route(name, region(suffix, r.src), r.parameter + suffix, region(suffix, r.dst))
            for r in self.routes[weight]
        ]


def shapes_of(manifest: Manifest, kv_scales: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Shape by name of everything but scales."""
    return {name: spec.shape for name, spec in manifest.weights() if name not in kv_scales}


class DerivedTensors:
    """What MLA keeps of ``kv_b_proj`` beside it, to attend to latents: ``w_kc`` and ``w_vc``; none
    where a model has no MLA.

    They are not parameters. SGLang makes them when a checkpoint is loaded; here its own method
    writes them again after each update, in place. ``kv_b_proj`` is BF16, and they are its rows.
    They are allocated at once, so that they never move: CUDA graphs read them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers = {n: m for n, m in model.named_modules() if hasattr(m, DERIVED[0])}
        self.refresh()

    def refresh(self) -> None:
        """Make them from the weights as they are now."""
        if self._layers:
            self._model.post_load_weights()  # type: ignore[operator]

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name: ``w_kc`` [heads, qk_nope, kv_lora] and ``w_vc`` [heads, kv_lora, v]."""
        return {f"{n}.{x}": getattr(m, x) for n, m in self._layers.items() for x in DERIVED}
