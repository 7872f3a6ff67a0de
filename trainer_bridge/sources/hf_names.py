"""Names of the HF checkpoint for the parameters of a trainer's model.

transformers 5 keeps the experts of a layer as one 3-D parameter, while checkpoints (and so SGLang)
name each expert's matrices, and it has moved parts of some vision-language models.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from sgl_fp8rl.formats import split_name
from trainer_bridge.sources.wrappers import unwrapped

Cut = Callable[[torch.Tensor], torch.Tensor]
"""Takes one HF tensor out of the parameter that holds it."""

_GATE_UP = ".experts.gate_up_proj"
_DOWN = ".experts.down_proj"
# Families whose checkpoints call an expert's gate, up and down w1, w3 and w2.
_MIXTRAL_STYLE = ("mixtral", "minimax", "minimax_m2")
# Families whose checkpoints, too, hold the experts of a layer as one tensor.
_FUSED = ("gpt_oss", "llama4", "llama4_text")
# Families whose checkpoints have the language model as ``model`` and the vision tower beside it.
_TOWER_BESIDE = ("qwen2_vl", "qwen2_5_vl")


def model_type(model: nn.Module) -> str:
    """``config.model_type`` of a transformers model, wrapped or not; empty for others."""
    return str(getattr(getattr(unwrapped(model), "config", None), "model_type", ""))


def with_experts_of(name: str, family: str) -> str:
    """A name with the family's word for the module of a layer's experts, as the checkpoint and the
    engine have it."""
    return name.replace(".mlp.", ".block_sparse_moe.") if family in _MIXTRAL_STYLE else name


def split(name: str, shape: tuple[int, ...], family: str) -> Iterator[tuple[str, Cut]]:
    """The HF tensors that one parameter holds.

    Args:
        name: the parameter's name in the model without wrappers; that of its scales is the same
            with their suffix, and they are cut as it is.
        shape: its whole shape; fused experts are ``[E, 2I, H]`` (gate rows, then up rows) and
            ``[E, H, I]``.
        family: ``model_type`` of the model.

    Yields:
        The HF name, and how to cut it out of the whole parameter.
    """
    name, suffix = split_name(name)
    for hf_name, cut in _split(name, shape, family):
        yield hf_name + suffix, cut


def _split(name: str, shape: tuple[int, ...], family: str) -> Iterator[tuple[str, Cut]]:
    is_mixtral = family in _MIXTRAL_STYLE
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    name = with_experts_of(name, family)
    if family in _TOWER_BESIDE:
        name = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    if family in _FUSED:
        yield name, lambda whole: whole
    elif name.endswith(_GATE_UP) and len(shape) == 3:
        base, half = name.removesuffix("gate_up_proj"), shape[1] // 2
        for expert in range(shape[0]):
            yield f"{base}{expert}.{gate}.weight", _rows(expert, 0, half)
            yield f"{base}{expert}.{up}.weight", _rows(expert, half, 2 * half)
    elif name.endswith(_DOWN) and len(shape) == 3:
        base = name.removesuffix("down_proj")
        for expert in range(shape[0]):
            yield f"{base}{expert}.{down}.weight", _rows(expert, 0, shape[1])
    else:
        yield name, lambda whole: whole


def _rows(expert: int, start: int, stop: int) -> Cut:
    return lambda whole: whole[expert, start:stop]
