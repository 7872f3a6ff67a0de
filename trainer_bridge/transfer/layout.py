"""What a trainer reads in an engine's layout, and what it must bring for it."""

from typing import Any

import torch

from sgl_fp8rl.formats import BLOCKS, FORMATS, QUANTIZED
from sgl_fp8rl.formats.weight_format import WEIGHT_DTYPES, WeightFormat
from sgl_fp8rl.protocol.kv_schema import (
    E4M3,
    INT8,
    KV_SCALE_ROWS,
    KV_SCALES,
    LARGEST_KV_SCALE,
    LEAST_KV_SCALE,
)
from sgl_fp8rl.protocol.manifest import TIED_HEAD, ManifestError
from sgl_fp8rl.protocol.place import is_place
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.protocol.values import are_names
from trainer_bridge.engines.engine_client import check_fields
from trainer_bridge.sources.parameters import Named, Source, sources


def check_layout(layout: dict[str, Any]) -> None:
    """Check the fields of a layout that an update reads."""
    formats, kv_cache = layout.get("formats"), layout.get("kv_cache")
    sound = {
        "dtype": layout.get("dtype") in [str(d).removeprefix("torch.") for d in WEIGHT_DTYPES],
        "bucket_bytes": type(layout.get("bucket_bytes")) is int and layout["bucket_bytes"] > 0,
        "state": layout.get("state") in [state.value for state in State],
        "fp32": layout.get("fp32", ...) is None or are_names(layout.get("fp32")),
        "gpus": are_names(layout.get("gpus")),
        "visible_gpus": are_names(layout.get("visible_gpus")),
        "skipped": are_names(layout.get("skipped")),
        "tied": layout.get("tied", ...) is None or _is_shape(layout.get("tied")),
        "place": is_place(layout.get("place")),
        "formats": isinstance(formats, dict)
        and formats.keys() <= FORMATS.keys()
        and all(map(are_names, formats.values())),
        "kv_cache": kv_cache is None
        or (
            isinstance(kv_cache, dict)
            and kv_cache.get("format", E4M3) in (E4M3, INT8)
            and all(type(kv_cache.get(size)) is int for size in ("layers", "kv_heads"))
        ),
    }
    check_fields("the engine's layout", layout, sound)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(n) is int for n in value)


def comparable(layout: dict[str, Any], through_host: bool, is_remote: bool) -> dict[str, Any]:
    """The fields of a layout that a plan depends on: engines with equal ones are sent the same."""
    read = ("dtype", "bucket_bytes", "fp32", "formats", "skipped", "tied")
    return {
        **{name: layout[name] for name in read},
        "kv_cache": layout.get("kv_cache"),
        "on_gpus": bool(layout["gpus"]),
        "through_host": through_host,
        "is_remote": is_remote,
    }


def sources_for(named: Named, family: str | None, layout: dict[str, Any]) -> list[Source]:
    """How to read these tensors for an engine of this layout."""
    fp32 = layout["fp32"]
    if fp32 is None:  # not known before the engine's first update: nothing is rounded on the way
        fp32 = [name for name, _ in named]
    as_they_are = [*fp32, KV_SCALES]
    return sources(named, family, getattr(torch, layout["dtype"]), as_they_are, ignored(layout))


def format_of_codes(layout: dict[str, Any]) -> WeightFormat:
    """Which of ``BLOCKS`` an engine has."""
    return next((f for f in BLOCKS if f.name in layout["formats"]), QUANTIZED)


def ignored(layout: dict[str, Any]) -> frozenset[str]:
    """HF tensors that an engine keeps nothing of; an update may bring them or not."""
    return frozenset(layout["skipped"]) | ({TIED_HEAD} if layout["tied"] else frozenset())


def read_by_all(layout: dict[str, Any]) -> dict[str, Any]:
    """The fields that other ranks than the first need; ``formats`` names every tensor in FP8."""
    return {name: layout[name] for name in ("dtype", "fp32", "gpus", "skipped", "tied")}


def gpu_of(named: Named, layout: dict[str, Any]) -> torch.device | None:
    """The GPU through which weights reach an engine on GPUs: the trainer's own, if it has one."""
    if not layout["gpus"]:
        return None
    for _, tensor in named:
        if tensor.is_cuda:
            return torch.device("cuda", tensor.device.index)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def check_kv_scales(scales: Any, kv_cache: dict[str, Any] | None) -> None:
    if kv_cache is None:
        raise ManifestError(
            "kv_scales are for an FP8 KV cache, and the engine has none; start it with "
            "--kv-cache-dtype fp8_e4m3, or update it without kv_scales"
        )
    if kv_cache.get("format") == INT8:
        raise ManifestError(
            "kv_scales are for an E4M3 KV cache, and the engine's INT8 cache needs no scales; "
            "update it without kv_scales"
        )
    shape = kv_cache["layers"], len(KV_SCALE_ROWS), kv_cache["kv_heads"]
    if not isinstance(scales, torch.Tensor) or scales.dtype != torch.float32:
        found = scales.dtype if isinstance(scales, torch.Tensor) else type(scales).__name__
        raise ManifestError(f"kv_scales is {found}; give an FP32 tensor of shape {shape}")
    if scales.shape != shape:
        raise ManifestError(
            f"kv_scales has shape {tuple(scales.shape)}, and the engine's KV cache {shape}; "
            f"calibrate the model that it serves: [layers, K and V (no longer Q), KV heads]"
        )
    values = scales.detach().cpu()
    sound = (values >= LEAST_KV_SCALE) & (values <= LARGEST_KV_SCALE)
    if not bool(sound.all()):
        raise ManifestError(
            f"kv_scales holds {float(values[~sound][0])}, and scales are from {LEAST_KV_SCALE:.1e} "
            f"to {LARGEST_KV_SCALE:.1e}; calibrate again"
        )
