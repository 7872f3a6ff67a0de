"""``sgl-fp8rl export``: a block-FP8 checkpoint that SGLang's ``fp8`` reads as it is.

Its bytes are those of an update with the same weights. Which layers are FP8 is the engine's
decision: one with dummy weights tells.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sgl_fp8rl.formats import FORMATS, QUANTIZED, UNQUANTIZED, by_tensor
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.protocol.checkpoint_headers import INDEX, read_headers, weight_files
from sgl_fp8rl.protocol.manifest import Manifest
from sgl_fp8rl.receiver.checkpoint_files import read_tensors
from sgl_fp8rl.tools.layers import dummy_engine
from trainer_bridge.engines.engine_client import connect

CONFIG = "config.json"
STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Readers ask for the parts of a stacked layer, also where the checkpoint itself stacks them."""
WEIGHT_FILES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf")


def run(
    source: Path,
    output: Path,
    ignored: Sequence[str] | None = None,
    tp_size: int = 1,
    format_: str = QUANTIZED.name,
) -> str:
    """Write the checkpoint; ``output`` appears when it is complete, or not at all.

    Args:
        source: the folder of a BF16 checkpoint.
        ignored: patterns of layers that stay BF16; default ``FP8RL_IGNORED_LAYERS``.
        tp_size: of the engine whose layers decide what is FP8.
        format_: one of ``BLOCKS``.

    Returns:
        What was written, for the user.

    Raises:
        EngineError: the engine refuses.
        ImportError: SGLang is not installed.
        OSError, SafetensorError: a file cannot be read or written.
        ValueError: the source is not a BF16 checkpoint, or the output exists.
    """
    with _complete(output) as folder:
        config = _config_of(source)
        files = weight_files(source)
        manifest = Manifest(read_headers(files))
        # SGLang reads no padded layer without this plugin
        options: dict[str, Any] = {"fp8rl_format": format_, "fp8rl_ragged": "bf16"}
        if ignored is not None:
            options["fp8rl_ignored_layers"] = tuple(ignored)
        with dummy_engine(str(source), tp_size, **options) as engine:
            client = connect(engine)
            kept = client.control({"op": "export_layout", "manifest": manifest.to_json()})
            layers = client.control({"op": "layers"})["layers"]
        formats = by_tensor(kept["formats"])
        if not formats:
            raise ValueError(
                f"no layer of {source} would be FP8; sgl-fp8rl layers lists the reasons"
            )
        nbytes = _write(files, folder, formats, getattr(torch, kept["dtype"]))
        for file in source.glob("[!.]*"):  # tokenizer, generation config and whatever else is there
            if file.is_file() and file.name != CONFIG and not file.name.endswith(WEIGHT_FILES):
                shutil.copyfile(file, folder / file.name)
        matrices = [name for name, spec in manifest.weights() if len(spec.shape) > 1]
        others = [name for name in matrices if name not in formats]
        config["quantization_config"] = quantization_config(
            [
                *(name.removesuffix(".weight") for name in others),
                *(each["name"] for each in layers if each["format"] == UNQUANTIZED.name),
            ],
            FORMATS[format_],
        )
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return (
        f"{output}: {len(matrices) - len(others)} {format_} and {len(others)} other matrices, "
        f"{nbytes / (1 << 30):.2f} GiB"
    )


def quantization_config(
    not_fp8: Iterable[str], format_: WeightFormat = QUANTIZED
) -> dict[str, Any]:
    """What SGLang, vLLM and transformers read in ``config.json``.

    Args:
        not_fp8: names of modules, the checkpoint's and the engine's: readers ask for either.
    """
    names = {"lm_head", *not_fp8}
    for name in list(names):
        base, _, leaf = name.rpartition(".")
        names |= {f"{base}.{part}" for part in STACKED.get(leaf, ())}
    return {**format_.checkpoint, "modules_to_not_convert": sorted(names)}


@contextmanager
def _complete(output: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``output`` where nothing fails."""
    if output.exists() or output.is_symlink():
        raise ValueError(f"{output} exists; remove it, or name a folder that does not")
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        yield folder
        umask = os.umask(0)
        os.umask(umask)
        for path in (folder, *folder.iterdir()):  # they were private until now
            path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        folder.rename(output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _config_of(source: Path) -> dict[str, Any]:
    if not (source / CONFIG).is_file():
        raise ValueError(f"{source} has no {CONFIG}; pass the folder of a BF16 checkpoint")
    config: dict[str, Any] = json.loads((source / CONFIG).read_text())
    if "quantization_config" in config:
        raise ValueError(f"{source} is quantized; pass the BF16 checkpoint that it was made from")
    return config


def _write(
    files: Sequence[Path], folder: Path, formats: dict[str, WeightFormat], dtype: torch.dtype
) -> int:
    """Write these files with codes and scales, one at a time, and their index; bytes of all
    tensors."""
    weight_map: dict[str, str] = {}
    nbytes = 0
    for file in files:
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in read_tensors([file]):
            try:
                parts = formats[name].encode(tensor.to(dtype)) if name in formats else {"": tensor}
            except ValueError as error:
                raise ValueError(f"{name} {error}") from error
            tensors |= {name + suffix: part for suffix, part in parts.items()}
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
        nbytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return nbytes
