"""The engine's side of ``sgl-fp8rl export``: how it would keep a checkpoint, and what it serves.

Routes are read backwards: each names the box of engine storage that holds a box of an HF tensor.
"""

import math
import os
import stat
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sgl_fp8rl.engine.layers.quant_config import list_layers
from sgl_fp8rl.formats import QUANTIZED, UNQUANTIZED, format_of
from sgl_fp8rl.formats.weight_format import TensorSpec
from sgl_fp8rl.ops.regions import Region, numel, sizes, view
from sgl_fp8rl.protocol.manifest import Manifest, ManifestError
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.protocol.values import excerpt
from sgl_fp8rl.receiver.checkpoint_files import CheckpointWriter
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from sgl_fp8rl.receiver.host import EngineHost
from sgl_fp8rl.receiver.routes.route_tracer import record_routes
from sgl_fp8rl.receiver.routes.routes import RouteTable, shapes_of
from sgl_fp8rl.receiver.update_steps import Gather, attempted, gather_results, sources

Parts = dict[str, list[tuple[Region, torch.dtype, torch.Tensor]]]
"""What a rank holds of one HF tensor: by suffix, boxes of the tensor, their dtype and their bytes.
Bytes, because torch does not pickle FP8."""


def export_layout(
    weights: EngineWeights, message: dict[str, Any], gather: Gather
) -> dict[str, Any]:
    """How an engine that has loaded nothing would keep the tensors of a manifest."""

    def routes() -> RouteTable:
        if weights.table is not None:
            raise ManifestError("the engine has loaded weights; ask one with --load-format dummy")
        manifest = Manifest.from_json(message.get("manifest"))
        return record_routes(weights.model, shapes_of(manifest))

    table, error = attempted(routes, "an export")
    errors = [e for e in gather(error) if e is not None]
    if errors:
        return {"error": errors[0]}
    return {
        **sources(table, gather),
        "dtype": str(weights.dtype).removeprefix("torch."),
        "layers": _not_fp8(weights),
    }


def write(weights: EngineWeights, folder: Any, host: EngineHost) -> dict[str, Any]:
    """Write the committed weights as safetensors: rank 0 writes what all ranks hold.

    Args:
        folder: an empty private folder of the engine's user, made by who asks.
    """
    error = _why_not(weights) or _why_not_into(folder)
    errors = [e for e in host.gather(error) if e is not None]
    if errors:
        return {"error": errors[0]}
    table = weights.table
    assert table is not None  # it serves
    writer = CheckpointWriter(Path(folder)) if host.rank == 0 else None
    for name in (n for n in table.sources if n not in table.skipped):
        ranks = gather_results(partial(_parts, table, name), "an export", host.gather)
        if writer is None or error is not None:
            continue  # whatever happened on rank 0, the others take part to the end
        _, fault = attempted(partial(_add, writer, name, table.sources[name], ranks), "an export")
        error = fault and f"{name} cannot be exported: {fault}"
    if writer is not None and error is None:
        _, fault = attempted(writer.finish, "an export")
        error = fault and f"the export cannot be written: {fault}"
    error = host.gather(error)[0]
    if error:
        return {"error": error}
    formats = {table.kept_as(name) for name in table.sources} - {UNQUANTIZED}
    return {"layers": _not_fp8(weights), "format": (formats or {QUANTIZED}).pop().name}


def _why_not(weights: EngineWeights) -> str | None:
    if weights.state is not State.SERVING:
        return f"the weights are {weights.state.value}, not committed: {weights.reason}"
    assert weights.table is not None
    if weights.table.fallback:
        name = min(weights.table.fallback)
        return (
            f"{name} cannot be read back ({weights.table.fallback[name]}); export the BF16 "
            f"checkpoint of this policy"
        )
    for name in filter(weights.table.is_quantized, weights.table.sources):
        if reason := weights.table.why_ragged(name):
            return (
                f"{name} is not whole blocks ({reason}), which SGLang may not load without this "
                f"plugin; export the BF16 checkpoint of this policy"
            )
    return None


def _why_not_into(folder: Any) -> str | None:
    """No one but the engine's user may have made the folder, or can read what is written there."""
    try:
        path = Path(folder)
        status = path.lstat()
        private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        if private and status.st_uid == os.geteuid() and not any(path.iterdir()):
            return None
    except (OSError, TypeError, ValueError):  # whatever was named
        pass
    return (
        f"the engine cannot write into {excerpt(folder)}; run the export on the engine's host, as "
        f"its user"
    )


def _not_fp8(weights: EngineWeights) -> list[str]:
    """The engine's names of the layers that it computes in BF16."""
    return [layer.name for layer in list_layers(weights.model) if layer.format == UNQUANTIZED.name]


def _parts(table: RouteTable, name: str) -> Parts:
    parts: Parts = {}
    for route in table.routes[name]:
        format_ = table.format_of(route)
        for suffix in ("", *format_.suffixes):
            src, dst = (
                format_.companion_region(suffix, region) if suffix else region
                for region in (route.src, route.dst)
            )
            box = view(table.parameters[route.parameter + suffix], dst)
            content = box.to("cpu", copy=True).contiguous().flatten().view(torch.uint8)
            parts.setdefault(suffix, []).append((src, box.dtype, content))
    return parts


def _add(writer: CheckpointWriter, name: str, shape: tuple[int, ...], ranks: list[Parts]) -> None:
    writer.add(_assemble(name, shape, ranks))


def _assemble(name: str, shape: tuple[int, ...], ranks: list[Parts]) -> dict[str, torch.Tensor]:
    """One HF tensor, and its scales, of the boxes of all ranks; several may hold the same box."""
    boxes: dict[str, dict[Region, torch.Tensor]] = {"": {}}
    for parts in ranks:
        for suffix, found in parts.items():
            for region, dtype, content in found:
                values = content.view(dtype).reshape(sizes(region))
                boxes.setdefault(suffix, {})[region] = values
    held = sum(map(numel, boxes[""]))
    if held != math.prod(shape):
        raise ValueError(f"the engine holds {held} of {math.prod(shape)} elements")
    dtype = next(iter(boxes[""].values())).dtype
    specs = {"": TensorSpec(dtype, shape), **format_of(dtype).companions(shape)}
    tensors = {}
    for suffix, spec in specs.items():
        tensors[name + suffix] = whole = torch.empty(spec.shape, dtype=spec.dtype)
        for region, values in boxes[suffix].items():
            view(whole, region).copy_(values)
    return tensors
