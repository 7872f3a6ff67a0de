"""What a checkpoint of safetensors files holds, read from the headers: no tensor is loaded."""

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open

from sgl_fp8rl.formats import HEADERS
from sgl_fp8rl.formats.weight_format import TensorSpec
from sgl_fp8rl.protocol.manifest import ManifestError

INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold a checkpoint's weights: those of its index, if it has one;
    ValueError if there are none."""
    index = folder / INDEX
    if index.is_file():
        names = json.loads(index.read_text())["weight_map"].values()
        return sorted({folder / name for name in names})
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no safetensors files; pass the folder of a checkpoint")
    return files


def read_headers(files: Iterable[Path | str]) -> dict[str, TensorSpec]:
    """Dtype and shape of each tensor, in the order of the files.

    Raises:
        ManifestError: the dtype of a tensor is that of no format.
    """
    specs: dict[str, TensorSpec] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (safe_open is not a dict)
                header = opened.get_slice(name)
                dtype = HEADERS.get(header.get_dtype())
                if dtype is None:
                    raise ManifestError(
                        f"{name} in {file} has dtype {header.get_dtype()}; load a checkpoint of "
                        f"{', '.join(HEADERS)}"
                    )
                specs[name] = TensorSpec(dtype, tuple(header.get_shape()))
    return specs
