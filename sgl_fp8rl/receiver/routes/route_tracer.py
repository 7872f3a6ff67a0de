"""Record routes: run SGLang's ``load_weights`` on probes, tensors with a shape but no storage.

A probe is a tensor subclass, so ``__torch_dispatch__`` sees its copies in every thread (a dispatch
mode sees only its own). Slicing a probe slices a meta tensor; where that view starts and how it
strides tells which box of the HF tensor a copy reads.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from sgl_fp8rl.formats import QUANTIZED, mark, marked_format
from sgl_fp8rl.ops.regions import Region, as_region
from sgl_fp8rl.protocol.manifest import TIED_HEAD
from sgl_fp8rl.receiver.routes.padded_storage import gaps, placed, unpadded
from sgl_fp8rl.receiver.routes.routes import Route, RouteError, RouteTable

logger = logging.getLogger(__name__)
aten = torch.ops.aten

# Copies of a whole tensor: what comes out still is the same box of the same HF tensor.
_SAME_VALUES = {
    aten._to_copy.default,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh.default,
}


# Views that read the storage in another way than by boxes of elements.
_REINTERPRETS = {aten.view.dtype, aten.as_strided.default}


class UnrecordableError(RuntimeError):
    """The loader did something to these tensors that is not a copy of a box."""

    def __init__(self, sources: set[str], reason: str) -> None:
        super().__init__(reason)
        self.sources = sources


class Probe(torch.Tensor):
    """Stands for a box of an HF tensor while SGLang's loader slices and copies it, or for several
    boxes that it concatenated, which can be copied as a whole."""

    parts: "Parts"
    axis: int
    recorder: "_Recorder"
    _sglang_runai_streamer_tensor = True
    """Loaders with a pool of threads copy such tensors at once, in the thread that is watched."""

    @staticmethod
    def __new__(cls: Any, parts: "Parts", recorder: "_Recorder", axis: int = 0) -> "Probe":
        metas = [meta for _, meta in parts]
        meta = metas[0] if len(metas) == 1 else torch.cat(metas, axis)
        probe = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=torch.device("cpu"),
        )
        probe.parts, probe.recorder, probe.axis = parts, recorder, axis
        return probe  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Probe({', '.join(source for source, _ in self.parts)}, {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        probes = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Probe)]
        parts, recorder = [part for probe in probes for part in probe.parts], probes[0].recorder
        if func is aten.cat.default and len(probes) == len(parts) == len(args[0]):
            return Probe(parts, recorder, *args[1:])
        if func is aten.copy_.default and not isinstance(args[0], Probe):
            recorder.copied(args[0], probes[0])
            return args[0]
        if func in _SAME_VALUES:
            return Probe(parts, recorder, probes[0].axis)
        fault = UnrecordableError({source for source, _ in parts}, f"its loader calls {func} on it")
        if len(parts) > 1 or not func.is_view or func in _REINTERPRETS:
            raise fault
        ((source, meta),) = parts
        metas = tree_map_only(Probe, lambda _: meta, (args, kwargs))
        try:
            out = func(*metas[0], **(metas[1] or {}))
        except RuntimeError as error:  # a view of what would have been made contiguous
            raise fault from error
        return tree_map_only(torch.Tensor, lambda meta: Probe([(source, meta)], recorder), out)


Parts = list[tuple[str, torch.Tensor]]
"""HF tensors, and the boxes of them as views on the meta device."""


class _Recorder(TorchDispatchMode):
    """Collects routes, and notes what else writes into the model's storage meanwhile."""

    def __init__(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes = shapes
        self.parameters = _apart(model)
        self.names = {p.untyped_storage().data_ptr(): n for n, p in self.parameters.items()}
        buffers = dict(model.named_buffers())
        self.buffers = {b.untyped_storage().data_ptr(): n for n, b in buffers.items()}
        self.routes: list[Route] = []
        self.constants: list[tuple[str, Region, float]] = []
        self.unrecordable: dict[str, str] = {}
        self.offered = ""

    def copied(self, target: torch.Tensor, probe: Probe) -> None:
        name = self.names.get(target.untyped_storage().data_ptr())
        if name is None or target.shape != probe.shape:
            raise UnrecordableError(
                {source for source, _ in probe.parts},
                "it is copied to a temporary tensor or broadcast",
            )
        first = 0
        for source, meta in probe.parts:
            part = target
            if len(probe.parts) > 1:
                part = target.narrow(probe.axis, first, meta.shape[probe.axis])
                first += meta.shape[probe.axis]
            dst = _region_of(self.parameters[name], part)
            # offset and strides of the view are those inside of the whole HF tensor
            place = int(meta.storage_offset()), tuple(meta.shape), meta.stride()
            src = as_region(self.shapes[source], *place)
            if src is None or dst is None or _longer(src) != _longer(dst):
                raise UnrecordableError(
                    {source}, "it is transposed, strided or reshaped on the way"
                )
            self.routes.append(Route(source, src, name, dst))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Probe) for leaf in tree_leaves((args, kwargs))):
            return result  # the probe has recorded it
        for written in written_by(func, args, kwargs or {}):
            storage = written.untyped_storage().data_ptr()
            if storage in self.names and func in (aten.fill_.Scalar, aten.zero_.default):
                name = self.names[storage]
                region = _region_of(self.parameters[name], written)
                if region is not None:
                    value = float(args[1]) if func is aten.fill_.Scalar else 0.0
                    self.constants.append((name, region, value))
                    continue
            if storage in self.names or storage in self.buffers:
                name = self.names.get(storage) or self.buffers[storage]
                self.unrecordable[self.offered] = f"{name} is derived from it"
        return result


def record_routes(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> RouteTable:
    """Run the model's own loader on probes of these HF tensors and keep each copy as a route.

    Values are neither read nor written, so a live model may be recorded. Fills of constants and
    tensors derived from parameters do run.

    Raises:
        RouteError: the loader cannot be recorded, or the routes fail their checks.
    """
    recorder = _Recorder(model, shapes)
    pending = list(shapes.items())
    while pending:
        try:
            with unpadded(recorder.parameters), recorder:
                model.load_weights(_probes(pending, recorder))  # type: ignore[operator]
            break
        except UnrecordableError as error:
            recorder.unrecordable |= dict.fromkeys(error.sources, str(error))
        except Exception as error:  # any: the loader is SGLang's, the names are the trainer's
            raise RouteError(
                f"SGLang's loader failed at {recorder.offered} ({type(error).__name__}: {error}); "
                f"use the names and shapes of the HF checkpoint"
            ) from error
        # what the loader kept for later is lost with its error, so it is offered again
        done = {route.source for route in recorder.routes} | recorder.unrecordable.keys()
        pending = [(name, shape) for name, shape in shapes.items() if name not in done]
    routes: dict[str, list[Route]] = {name: [] for name in shapes}
    for route in _once(recorder.routes):
        if route.source not in recorder.unrecordable:
            routes[route.source] += placed(route, recorder.parameters)
    for name, reason in recorder.unrecordable.items():
        logger.warning("%s goes through SGLang's loader at each update: %s", name, reason)
    table = RouteTable(
        dict(shapes),
        routes,
        {name: _data_of(p) for name, p in recorder.parameters.items()},
        recorder.unrecordable,
        [*dict.fromkeys(recorder.constants), *gaps(recorder.parameters)],
    )
    if not recorder.routes:
        raise RouteError(
            f"no route was recorded for any of {len(shapes)} tensors; report this model"
        )
    table.check()
    return table


def _apart(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters by their first names: one that has several, or is the same memory as another,
    comes once."""
    places: dict[tuple[Any, ...], str] = {}
    return {
        name: p
        for name, p in model.named_parameters()
        if not p.numel() or places.setdefault((p.data_ptr(), p.shape, p.stride()), name) == name
    }


def _data_of(parameter: torch.Tensor) -> torch.Tensor:
    data = parameter.data
    if (format_ := marked_format(parameter)) is not None:
        mark(data, format_)
    return data


def _once(routes: list[Route]) -> list[Route]:
    """Each copy once: a loader that walks the names of tied parameters makes it for each. A
    checkpoint's head that such a loader copies over the embedding is redundant."""
    others = {(r.parameter, r.dst) for r in routes if r.source != TIED_HEAD}
    return [
        route
        for route in dict.fromkeys(routes)
        if route.source != TIED_HEAD or (route.parameter, route.dst) not in others
    ]


def _probes(
    pending: list[tuple[str, tuple[int, ...]]], recorder: _Recorder
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape in pending:
        recorder.offered = name
        # Matrices appear as codes: a loader that refuses to cast BF16 down then accepts them, and
        # into BF16 storage they are copied all the same.
        dtype = QUANTIZED.dtypes[0] if len(shape) > 1 else torch.bfloat16
        yield name, Probe([(name, torch.empty(shape, dtype=dtype, device="meta"))], recorder)


def _region_of(base: torch.Tensor, view: torch.Tensor) -> Region | None:
    offset = int(view.storage_offset()) - int(base.storage_offset())
    if view.dtype != base.dtype or not base.is_contiguous() or offset < 0:
        return None
    return as_region(tuple(base.shape), offset, tuple(view.shape), view.stride())


def _longer(region: Region) -> list[int]:
    return [stop - start for start, stop in region if stop - start != 1]


class WriteWatch(TorchDispatchMode):
    """Notes which parameters are written while SGLang's loader runs on real tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        parameters = _apart(model)
        self._names = {p.untyped_storage().data_ptr(): name for name, p in parameters.items()}
        self.written: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            name = self._names.get(tensor.untyped_storage().data_ptr())
            if name is not None:
                self.written.add(name)
        return func(*args, **(kwargs or {}))


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The non-empty tensors that an op writes into, ``out=`` among them."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        if isinstance(value, torch.Tensor) and value.numel():
            yield value
