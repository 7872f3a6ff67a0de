"""Names of the HF checkpoint for the parameters of a trainer's model, whatever wraps it.

transformers 5 keeps the experts of a layer as one 3-D parameter, while checkpoints (and so SGLang)
name each expert's matrices, and it has moved parts of some vision-language models.

Wrappers, in any order, are torch.compile, DDP, FSDP2, activation checkpointing, DataParallel,
AveragedModel and PEFT. They are taken off to read names, parameters and the config. A forward goes
through all of them.
"""

import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sgl_fp8rl.formats import split_name

Cut = Callable[[torch.Tensor], torch.Tensor]
"""Takes one HF tensor out of the parameter that holds it."""

# Families whose checkpoints call an expert's gate, up and down w1, w3 and w2.
_MIXTRAL_STYLE = ("mixtral", "minimax", "minimax_m2")
# Families whose checkpoints, too, hold the experts of a layer as one tensor.
_FUSED = ("gpt_oss", "llama4", "llama4_text")
# Families whose checkpoints have the language model as ``model`` and the vision tower beside it.
_TOWER_BESIDE = ("qwen2_vl", "qwen2_5_vl")
_OF_PARTS = ("_orig_mod", "_checkpoint_wrapped_module")
"""What torch.compile and activation checkpointing, which wrap parts of a model too, call those."""


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
    is_mixtral = family in _MIXTRAL_STYLE
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    name = with_experts_of(name, family)
    if family in _TOWER_BESIDE:
        name = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    base, _, last = name.rpartition(".")
    is_experts = base.endswith(".experts") and len(shape) == 3 and family not in _FUSED
    if is_experts and last == "gate_up_proj":
        half = shape[1] // 2
        for expert in range(shape[0]):
            yield f"{base}.{expert}.{gate}.weight{suffix}", _rows(expert, 0, half)
            yield f"{base}.{expert}.{up}.weight{suffix}", _rows(expert, half, 2 * half)
    elif is_experts and last == "down_proj":
        for expert in range(shape[0]):
            yield f"{base}.{expert}.{down}.weight{suffix}", _rows(expert, 0, shape[1])
    else:
        yield name + suffix, whole


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """All of a parameter that is one HF tensor."""
    return parameter


def _rows(expert: int, start: int, stop: int) -> Cut:
    return lambda parameter: parameter[expert, start:stop]


def chain(model: nn.Module) -> Iterator[nn.Module]:
    """A model's wrappers, outermost first, and the model that they wrap."""
    inside: nn.Module | None = model
    while inside is not None:
        yield inside
        inside = _inside(inside)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of all that wraps it as a whole; adapters in its layers stay."""
    *_, inside = chain(model)
    return inside


def group_of(given: object) -> dist.ProcessGroup | None:
    """The ranks of DDP, where it is among the wrappers of a model; None of anything else."""
    wrappers = chain(given) if isinstance(given, nn.Module) else ()
    ddp = (each for each in wrappers if isinstance(each, DistributedDataParallel))
    return next((each.process_group for each in ddp), None)


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As torch lists them, each once and those outside first, under the names of the model without
    wrappers. A wrapper comes before what it wraps, and under the same name."""
    seen: set[nn.Module] = set()
    for wrapper in chain(model):
        root = wrapper
        seen.add(wrapper)
        yield "", wrapper
    yield from _children(root, "", seen)


def _children(
    module: nn.Module, prefix: str, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():
        if child is not None and child not in seen:
            seen.add(child)
            whole = prefix if name in _OF_PARTS else f"{prefix}.{name}" if prefix else name
            yield whole, child
            yield from _children(child, whole, seen)


def _inside(model: nn.Module) -> nn.Module | None:
    """What a module wraps as a whole."""
    children = model._modules
    for name in _OF_PARTS:
        if name in children:
            return children[name]
    peft = sys.modules.get("peft")  # no adapter is there where nobody has imported it
    if peft is not None:
        if isinstance(model, peft.PeftModel | peft.PeftMixedModel):
            return children["base_model"]
        if isinstance(model, peft.tuners.tuners_utils.BaseTuner):
            return children.get("model")
    # of DDP, DataParallel, AveragedModel, and of frameworks
    return children["module"] if [*children] == ["module"] and not model._parameters else None
