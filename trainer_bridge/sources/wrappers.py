"""What wraps a trainer's model, in any order: torch.compile, DDP, FSDP2, activation checkpointing,
DataParallel, AveragedModel and PEFT.

Wrappers are taken off to read names, parameters and the config. A forward goes through all of them.
"""

import sys
from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_OF_PARTS = ("_orig_mod", "_checkpoint_wrapped_module")
"""What torch.compile and activation checkpointing, which wrap parts of a model too, call those."""


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
