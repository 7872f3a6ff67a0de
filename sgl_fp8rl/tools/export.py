"""``sgl-fp8rl export``: a block-FP8 checkpoint that SGLang's ``fp8`` reads as it is.

Its bytes are those of an update: of a BF16 checkpoint that is quantized here, or of a running
engine, which writes them itself. Which layers are FP8 is the engine's decision in both cases.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sgl_fp8rl.formats import FORMATS, QUANTIZED, UNQUANTIZED, by_tensor, format_of
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.protocol.checkpoint_headers import read_headers, weight_files
from sgl_fp8rl.protocol.manifest import Manifest
from sgl_fp8rl.receiver.checkpoint_files import CheckpointWriter, read_tensors
from sgl_fp8rl.tools.layers import dummy_engine
from trainer_bridge.engines.engine_client import connect

CONFIG = "config.json"
STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Readers ask for the parts of a stacked layer, also where the checkpoint itself stacks them."""
WEIGHT_FILES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf")


@dataclass(frozen=True)
class Source:
    """Where everything but the weights comes from."""

    folder: Path
    layers: list[str]
    """The engine's names of its layers that are not FP8."""
    format: str
    """One of ``BLOCKS``."""
    policy: dict[str, Any] = field(default_factory=dict)
    """Run and version of an engine's weights."""


def run(
    source: str,
    output: Path,
    ignored: Sequence[str] | None = None,
    tp_size: int | None = None,
    format_: str | None = None,
) -> str:
    """Write the checkpoint; ``output`` appears when it is complete, or not at all.

    Args:
        source: the folder of a BF16 checkpoint, or an engine's http:// address.
        ignored: patterns of layers that stay BF16; default ``FP8RL_IGNORED_LAYERS``.
        tp_size: of the engine whose layers decide what is FP8; default 1.
        format_: one of ``BLOCKS``; default ``block-fp8``.

    Returns:
        What was written, for the user.

    Raises:
        EngineError: the engine refuses, or cannot be reached.
        ImportError: a folder is to be exported, and SGLang is not installed.
        OSError, SafetensorError: a file cannot be read or written.
        ValueError: the source is not a BF16 checkpoint, or the output exists.
    """
    is_engine = source.startswith(("http://", "https://"))
    if is_engine and (ignored, tp_size, format_) != (None, None, None):
        raise ValueError(
            "the engine has decided which layers are FP8; drop --ignored-layers, --tp, --format"
        )
    with _complete(output) as folder:
        if is_engine:
            found = _from_engine(source, folder)
        else:
            found = _from_checkpoint(
                Path(source), folder, ignored, tp_size or 1, format_ or QUANTIZED.name
            )
        manifest = Manifest(read_headers(weight_files(folder)))
        matrices = {name: spec for name, spec in manifest.weights() if len(spec.shape) > 1}
        bf16 = [n for n, spec in matrices.items() if format_of(spec.dtype) is UNQUANTIZED]
        _copy_files(found.folder, folder)
        config = json.loads((found.folder / CONFIG).read_text())
        config["quantization_config"] = quantization_config(
            [*(name.removesuffix(".weight") for name in bf16), *found.layers],
            FORMATS[found.format],
        )
        if found.policy:
            config["fp8rl"] = found.policy
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    policy = "".join(f", {name} {value}" for name, value in found.policy.items())
    return (
        f"{output}: {len(matrices) - len(bf16)} {found.format} and {len(bf16)} other matrices, "
        f"{manifest.nbytes / (1 << 30):.2f} GiB{policy}"
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


def _from_checkpoint(
    folder: Path, output: Path, ignored: Sequence[str] | None, tp_size: int, format_: str
) -> Source:
    """Quantize tensor by tensor, after an engine without weights has said which."""
    if not (folder / CONFIG).is_file():
        raise ValueError(
            f"{folder} has no {CONFIG}; pass the folder of a BF16 checkpoint, or the http:// "
            f"address of an engine"
        )
    if "quantization_config" in json.loads((folder / CONFIG).read_text()):
        raise ValueError(f"{folder} is quantized; pass the BF16 checkpoint that it was made from")
    files = weight_files(folder)
    manifest = Manifest(read_headers(files)).to_json()
    # SGLang reads no padded layer without this plugin
    options: dict[str, Any] = {"fp8rl_format": format_, "fp8rl_ragged": "bf16"}
    if ignored is not None:
        options["fp8rl_ignored_layers"] = tuple(ignored)
    with dummy_engine(str(folder), tp_size, **options) as engine:
        layout = connect(engine).control({"op": "export_layout", "manifest": manifest})
    formats = by_tensor(layout["formats"])
    if not formats:
        raise ValueError(f"no layer of {folder} would be FP8; sgl-fp8rl layers lists the reasons")
    dtype = getattr(torch, layout["dtype"])
    writer = CheckpointWriter(output)
    for name, tensor in read_tensors(files):
        if name not in formats:
            writer.add({name: tensor})
            continue
        try:
            encoded = formats[name].encode(tensor.to(dtype))
        except ValueError as error:
            raise ValueError(f"{name} {error}") from error
        writer.add({name + suffix: part for suffix, part in encoded.items()})
    writer.finish()
    return Source(folder, layout["layers"], format_)


def _from_engine(address: str, output: Path) -> Source:
    """Have the engine write what it serves."""
    reply = connect(address).control({"op": "export", "folder": str(output.resolve())})
    folder = Path(reply["model"])
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        cached = snapshot_download(str(folder), revision=reply["revision"], local_files_only=True)
        folder = Path(cached)
    policy = {key: reply[key] for key in ("run", "version")}
    return Source(folder, reply["layers"], reply["format"], policy)


def _copy_files(source: Path, target: Path) -> None:
    """Tokenizer, generation config and whatever else lies beside the weights."""
    for file in source.glob("[!.]*"):
        if file.is_file() and file.name != CONFIG and not file.name.endswith(WEIGHT_FILES):
            shutil.copyfile(file, target / file.name)
