"""The model that PEFT's adapters make of a trainer's model: what its forward computes with.

Adapters are added to copies of the weights: subtracting them from the trainer's own again would
leave the rounding of both sums there.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sgl_fp8rl.protocol.manifest import ManifestError
from trainer_bridge.sources.hf_names import chain, named_modules, unwrapped

_NOT_WEIGHTS = ("XLORA", "ADAPTION_PROMPT")
"""Kinds of PEFT's that compute with more than weights, as prompts do; others refuse to merge."""


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT's adapters are in a model, or around it."""
    kinds = (
        *_classes("peft", "PeftModel", "PeftMixedModel"),
        *_classes("peft.tuners.tuners_utils", "BaseTunerLayer"),
        *_classes("peft.utils.other", "AuxiliaryTrainingWrapper", "ModulesToSaveWrapper"),
    )
    return any(isinstance(each, kinds) for each in model.modules())


def _classes(module: str, *names: str) -> tuple[Any, ...]:
    """Those that this version of PEFT has; none where nobody has imported it."""
    found = (getattr(sys.modules.get(module), name, None) for name in names)
    return tuple(each for each in found if each is not None)


def merged(model: nn.Module) -> nn.Module:
    """A model without PEFT, with the weights that its forward computes with.

    Active adapters are added; those that were merged before, or are disabled, are left as they are.
    The copy of the adapted layers' weights lives as long as the result. With FSDP2 every rank
    calls it.

    Args:
        model: of any float dtype, with or without adapters and wrappers.

    Returns:
        The model itself, unwrapped, where it has no adapters; else modules that hold its tensors
        and those copies under the names of a model without adapters. They cannot be called.

    Raises:
        ManifestError: adapters of this kind cannot be merged, or make a tied weight two.
    """
    inside = unwrapped(model)
    if not has_adapters(model):
        return inside
    for wrapper in chain(model):
        for config in getattr(wrapper, "peft_config", {}).values():
            if config.is_prompt_learning or config.peft_type in _NOT_WEIGHTS:
                raise ManifestError(
                    f"the model has an adapter of PEFT's kind {config.peft_type.value}, which is "
                    f"more than weights and cannot be sent; train one that can be merged, such as "
                    f"LoRA"
                )
    names = {module: name for name, module in named_modules(model)}
    plain: Any = _Merge(names).plain(inside)
    plain.config = getattr(inside, "config", None)
    return plain  # type: ignore[no-any-return]


class _Merge:
    """Makes the modules of one model without adapters."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self._names = names
        self._plain: dict[nn.Module, nn.Module] = {}
        """What became of each module: some have several places."""
        self._sent: dict[int, tuple[nn.Parameter, nn.Module, str]] = {}
        """What is sent for a parameter of the model without adapters, by its id; of which module,
        and its name."""

    def plain(self, module: nn.Module) -> nn.Module:
        """A module and those inside, without adapters."""
        if module not in self._plain:
            self._plain[module] = self._made(module)
        return self._plain[module]

    def _made(self, module: Any) -> nn.Module:
        peft: Any = sys.modules["peft"]
        if isinstance(module, _classes("peft.utils.other", "TrainableTokensWrapper")):
            self._names[module.token_adapter] = self._names[module]
            return self.plain(module.token_adapter)
        if isinstance(module, peft.utils.other.ModulesToSaveWrapper):
            plain = self.plain(_in_use(module))
            self._check_tied(module, module.original_module, plain)
        elif isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
            plain = self._tree(self._merged(module))
            self._check_tied(module, module.get_base_layer(), plain)
        else:
            plain = self._tree(module)
            self._check_tied(module, module, plain, recurse=False)
        return plain

    def _tree(self, module: nn.Module) -> nn.Module:
        """The same tensors at the same names."""
        tree = nn.Module()
        tree._parameters = dict(module._parameters)
        tree._buffers = dict(module._buffers)
        tree._non_persistent_buffers_set = module._non_persistent_buffers_set
        for name, child in module._modules.items():
            tree._modules[name] = None if child is None else self.plain(child)
        if "fp8_parameters" in vars(module):
            tree.fp8_parameters = module.fp8_parameters
        return tree

    def _merged(self, layer: Any) -> nn.Module:
        """The base layer as a forward of the adapted one computes with it."""
        if not any(map(_is_to_be_changed, _nested(layer))):
            return layer.get_base_layer()  # type: ignore[no-any-return]
        if len({isinstance(parameter, DTensor) for parameter in layer.parameters()}) > 1:
            raise ManifestError(
                f"{self._names[layer]} is sharded, and its adapters are not; add adapters first "
                f"and call fully_shard then"
            )
        try:
            with torch.no_grad():
                copied: Any = _copy(layer)
                layers = [*_nested(copied)]
                before = [[*each.merged_adapters] for each in layers]
                for each in filter(_is_to_be_changed, reversed(layers)):
                    if each.merged:
                        each.unmerge()
                    else:
                        each.merge()
        except Exception as error:
            raise ManifestError(
                f"{self._names[layer]}: PEFT cannot merge its adapters ({type(error).__name__}: "
                f"{error}); train a kind that can be merged into these weights, such as LoRA"
            ) from error
        is_changed = before != [each.merged_adapters for each in layers]
        return (copied if is_changed else layer).get_base_layer()  # type: ignore[no-any-return]

    def _check_tied(
        self, module: nn.Module, without: nn.Module, plain: nn.Module, recurse: bool = True
    ) -> None:
        """Have what is one parameter without adapters be one with them."""
        for name, parameter in nn.Module.named_parameters(without, recurse=recurse):
            path, _, leaf = name.rpartition(".")
            owner = plain.get_submodule(path)
            sent, place = owner.get_parameter(leaf), f"{self._names.get(module, 'adapted')}.{name}"
            first, other, place_of_first = self._sent.setdefault(
                id(parameter), (sent, module, place)
            )
            if first is not sent and _memory(module) != _memory(other):
                raise ManifestError(
                    f"{place_of_first} and {place} are one tensor, tied, and adapters make them "
                    f"two, which an engine of this model cannot hold; adapt both alike by "
                    f"ensure_weight_tying=True of PEFT, or train and serve the model untied"
                )
            owner.register_parameter(leaf, first)


def _in_use(wrapper: Any) -> nn.Module:
    """Which of the modules that PEFT trains whole, beside the original one, a forward calls."""
    active = wrapper.active_adapters
    if wrapper.disable_adapters or not active or not set(active) <= wrapper._adapters:
        return wrapper.original_module  # type: ignore[no-any-return]
    return wrapper.modules_to_save[active[0]]  # type: ignore[no-any-return]


def _nested(layer: Any) -> Iterator[Any]:
    """The adapted layers around a base layer, outermost first."""
    while hasattr(layer, "base_layer"):
        yield layer
        layer = layer.base_layer


def _is_to_be_changed(layer: Any) -> bool:
    """Whether a forward does not take the base layer as it is."""
    return bool(layer.merged if layer.disable_adapters else not layer.merged)


def _copy(module: nn.Module) -> nn.Module:
    """A module with tensors of its own, without its codes; its hooks may refer to all of a model,
    so nothing else is copied deeply."""
    copied: nn.Module = object.__new__(type(module))
    for name, value in vars(module).items():
        if name != "fp8_parameters":
            vars(copied)[name] = value.copy() if type(value) in (dict, list, set) else value
    for name, parameter in copied._parameters.items():
        if parameter is not None:
            copied._parameters[name] = nn.Parameter(parameter.detach().clone(), False)
    for name, buffer in copied._buffers.items():
        copied._buffers[name] = None if buffer is None else buffer.clone()
    for name, child in copied._modules.items():
        copied._modules[name] = None if child is None else _copy(child)
    return copied


def _memory(layer: nn.Module) -> set[int]:
    """Where a layer's weights and adapters lie: two that are tied have the same ones."""
    held = (p.to_local() if isinstance(p, DTensor) else p for p in layer.parameters())
    return {each.data_ptr() for each in held}
