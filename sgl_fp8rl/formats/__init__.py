"""The formats that an engine keeps weights in, a file for each kind.

To add one: its file, whose codes have a dtype of their own, a line in ``FORMATS``, its kind of copy
in ``ops/weight_quant_triton.py``, and the layers that compute with it in ``METHODS`` of
``engine/layers/linear.py`` and ``engine/layers/moe.py``.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from sgl_fp8rl.formats.block_fp8 import BlockFP8, BlockFP8UE8M0
from sgl_fp8rl.formats.weight_format import Unquantized, WeightFormat

BLOCK_FP8 = BlockFP8()
BLOCK_FP8_UE8M0 = BlockFP8UE8M0()
UNQUANTIZED = Unquantized()
BLOCKS: tuple[WeightFormat, ...] = (BLOCK_FP8, BLOCK_FP8_UE8M0)
"""What layers can be quantized to: the choices of the option ``format``."""
FORMATS: dict[str, WeightFormat] = {f.name: f for f in (*BLOCKS, UNQUANTIZED)}
"""All of them, by name."""
DTYPES = {str(d).removeprefix("torch."): d for f in FORMATS.values() for d in f.dtypes}
"""What an update can carry, by the names of the manifest."""
HEADERS = {h: d for f in FORMATS.values() for h, d in zip(f.headers, f.dtypes, strict=True)}
"""The same by the names in headers of safetensors files."""
QUANTIZED: WeightFormat = BLOCK_FP8
"""What an engine keeps the weights of its layers in by default, but for those that it leaves
unquantized."""
SUFFIXES = tuple(dict.fromkeys(suffix for f in FORMATS.values() for suffix in f.suffixes))


_BY_DTYPE = {d: f for f in FORMATS.values() if not f.power_of_two_scales for d in f.dtypes}
"""The dtypes of codes tell a weight's format, but for variants."""


def format_of(dtype: torch.dtype) -> WeightFormat:
    """The format whose codes have this dtype; KeyError if none has."""
    return _BY_DTYPE[dtype]


def mark(parameter: torch.Tensor, format_: WeightFormat) -> None:
    """Note that an engine's codes are of a variant, which their dtype does not tell."""
    if format_.power_of_two_scales:
        parameter.fp8rl_format = format_  # type: ignore[attr-defined]


def marked_format(parameter: torch.Tensor) -> WeightFormat | None:
    """The variant of these codes, if they are of one."""
    return getattr(parameter, "fp8rl_format", None)


def stored_format(parameter: torch.Tensor) -> WeightFormat:
    """The format of one of an engine's parameters: told by its mark, or its dtype."""
    return marked_format(parameter) or format_of(parameter.dtype)


def counted(names: Iterable[str]) -> str:
    """How many layers are quantized, by their formats: ``3 of 5 layers are block-fp8``."""
    counts = Counter(names)
    total = counts.total()
    counts.pop(UNQUANTIZED.name, None)
    found = [f"{count} of {total} layers are {name}" for name, count in counts.items()]
    return ", ".join(found) or f"0 of {total} layers are quantized"


def suffixes_of(dtype: torch.dtype) -> tuple[str, ...]:
    """Suffixes of the companions of codes of this dtype; empty where no format has it."""
    return _BY_DTYPE[dtype].suffixes if dtype in _BY_DTYPE else ()


def by_tensor(tensors: Mapping[str, Iterable[str]]) -> dict[str, WeightFormat]:
    """The format of each tensor, of the tensors' names by that of the format."""
    return {name: FORMATS[format_] for format_, names in tensors.items() for name in names}


def split_name(name: str) -> tuple[str, str]:
    """A tensor's name as (the weight that it may be a companion of, suffix or ``""``)."""
    for suffix in SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix), suffix
    return name, ""
