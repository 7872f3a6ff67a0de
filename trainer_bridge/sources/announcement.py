"""What a stream will bring, known before its first tensor comes: names, dtypes and shapes."""

from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from sgl_fp8rl.formats.weight_format import WEIGHT_DTYPES
from sgl_fp8rl.protocol.manifest import Manifest, ManifestError, parse_spec, wrong_shape
from trainer_bridge.engines.engine_client import EngineClient, check_fields
from trainer_bridge.sources.parameters import Named, plain

Announcement = str | PathLike[str] | Iterable[tuple[str, torch.dtype, Sequence[int]]]
"""The folder of an HF checkpoint that has the stream's names and shapes, looked at where the engine
does not know them; or (name, dtype, shape) of each tensor. In any order."""


def announced(
    announcement: Announcement | None, client: EngineClient, dtype: torch.dtype, fp32: list[str]
) -> Named:
    """The tensors of a stream, as meta tensors.

    Without an announcement they are those of the checkpoint that the engine loaded.

    Args:
        dtype: the engine's; what a checkpoint holds is sent in it.
        fp32: the HF tensors that the engine keeps in FP32; they are sent in FP32.

    Raises:
        EngineError: the engine cannot be reached, or is of another version.
        ManifestError: the tensors are not known, as with an engine of dummy weights; or the folder
            holds no checkpoint.
    """
    shapes = _read(client.control({"op": "tensors"}))
    if announcement is None or isinstance(announcement, str | PathLike):
        if shapes is None:
            if announcement is None:
                raise ManifestError(
                    "the engine has dummy weights and does not know the tensors of a checkpoint; "
                    "pass announce=, the folder of the HF checkpoint that was trained from"
                )
            shapes = _shapes_in(Path(announcement))
        kept = frozenset(fp32)
        announcement = [
            (name, torch.float32 if name in kept else dtype, shape)
            for name, shape in shapes.items()
        ]
    return [
        (name, torch.empty(tuple(shape), dtype=each, device="meta"))
        for name, each, shape in announcement
    ]


def as_announced(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: torch.Size
) -> torch.Tensor:
    """A tensor of a stream in the dtype in which it was announced, contiguous."""
    if tensor.shape != shape:
        raise ManifestError(wrong_shape(name, tensor.shape, shape))
    if tensor.dtype != dtype:
        if not {tensor.dtype, dtype} <= set(WEIGHT_DTYPES):
            raise ManifestError(
                f"{name} is {tensor.dtype} in the stream, and {dtype} was announced; announce the "
                f"dtypes of the stream"
            )
        tensor = tensor.to(dtype)
    tensor = plain(tensor)
    # most tensors are as they are sent, and each call of torch that does nothing takes 2 us
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes in a checkpoint's headers; of FP8 codes the weights, without their scales."""
    try:
        from sgl_fp8rl.protocol.checkpoint_headers import read_headers, weight_files
    except ImportError as error:
        raise ManifestError(
            f"the headers of {folder} cannot be read ({error}); pip install safetensors"
        ) from error
    specs = read_headers(weight_files(folder))
    return {name: spec.shape for name, spec in Manifest(specs).weights()}


def _read(reply: dict[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """What an engine answers: the shapes of its tensors, if it knows them."""
    shapes: Any = reply.get("shapes", ...)
    check_fields("the engine's reply", reply, {"shapes": isinstance(shapes, dict | None)})
    if shapes is None:
        return None
    return {name: parse_spec(name, ["bfloat16", s]).shape for name, s in shapes.items()}
