"""Scales that an update brings: one tensor for all, or single scales by name.

They are tensors of the manifest like any other, but without routes: a session keeps them until
everything else is checked.
"""

import re
from collections.abc import Iterable, Mapping

import torch

from sgl_fp8rl.formats.weight_format import WEIGHT_DTYPES, TensorSpec
from sgl_fp8rl.protocol.kv_schema import KV_SCALE_ROWS, KV_SCALES
from sgl_fp8rl.protocol.manifest import Manifest, ManifestError
from sgl_fp8rl.receiver.kv.quantized import KVScalesError

_SINGLE = re.compile(
    r"\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?:attn\.)?(?P<row>[kv])_scale|(?P<proj>[kv])_proj\.(?P=proj)_scale)$"
)
"""``model.layers.3.self_attn.k_scale``, ``...self_attn.attn.k_scale`` as SGLang renames it, and
``...self_attn.k_proj.k_scale``."""


def names_in(names: Iterable[str]) -> frozenset[str]:
    """The KV scales among these tensors."""
    return frozenset(name for name in names if name == KV_SCALES or _place(name) is not None)


def check(manifest: Manifest, layers: int, kv_heads: int) -> frozenset[str]:
    """Check the KV scales of a manifest against the model, and return their names.

    Raises:
        ManifestError: a shape or dtype is wrong, both forms are present, or layers are missing.
    """
    names = names_in(manifest.tensors)
    if KV_SCALES in names:
        _check_whole(manifest.tensors[KV_SCALES], (layers, len(KV_SCALE_ROWS), kv_heads))
        if len(names) > 1:
            raise ManifestError(
                f"{KV_SCALES} comes with {min(names - {KV_SCALES})}; send one or the other"
            )
        return names
    places: dict[tuple[int, int], str] = {}
    for name in sorted(names):
        place = _place(name)
        assert place is not None
        if place in places:
            raise ManifestError(f"{name} and {places[place]} are the same scale; send one")
        places[place] = name
        spec = manifest.tensors[name]
        if spec.dtype not in WEIGHT_DTYPES or spec.shape not in ((), (1,), (kv_heads,)):
            raise ManifestError(
                f"{name} is {spec.dtype} of shape {spec.shape}; send one FP32 scale, or one for "
                f"each of {kv_heads} KV heads"
            )
    if places:
        needed = {(layer, row) for layer in range(layers) for row in range(len(KV_SCALE_ROWS))}
        if needed - places.keys() or any(layer >= layers for layer, _ in places):
            raise ManifestError(
                f"the update has KV scales of {len({la for la, _ in places})} layers; send K and "
                f"V scales of all {layers}, or none"
            )
    return names


def assemble(held: Mapping[str, torch.Tensor], layers: int, kv_heads: int) -> torch.Tensor:
    """The scales of the update as one FP32 tensor [layers, 2, KV heads] on the CPU.

    A single scale applies to every head of its layer.
    """
    if KV_SCALES in held:
        return held[KV_SCALES].detach().to("cpu", torch.float32)
    scales_L2H = torch.empty(layers, len(KV_SCALE_ROWS), kv_heads, dtype=torch.float32)
    for name, tensor in held.items():
        place = _place(name)
        if place is None:
            raise KVScalesError(f"{name} is not a KV scale")
        scales_L2H[place] = tensor.detach().to("cpu", torch.float32)
    return scales_L2H


def _place(name: str) -> tuple[int, int] | None:
    """(layer, row) from the name of a single scale."""
    match = _SINGLE.search(name)
    if match is None:
        return None
    return int(match["layer"]), KV_SCALE_ROWS.index(match["row"] or match["proj"])


def _check_whole(spec: TensorSpec, shape: tuple[int, ...]) -> None:
    if spec.shape != shape or spec.dtype != torch.float32:
        raise ManifestError(
            f"{KV_SCALES} is {spec.dtype} of shape {spec.shape}; send FP32 of shape {shape}: "
            f"layers, K and V (no longer Q), KV heads of the whole model"
        )
