"""The trainer's weights: random, on one device, renewed in place as an optimizer step would."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import nn

from benchmarks.engines.models import Parameter, Shape, parameters
from sgl_fp8rl.ops.reference import FP8_DTYPE, FP8_MAX, quantize_weight
from trainer_bridge.sources import hf_names

STD = 0.02
SCALES = (0.1 * STD / FP8_MAX, 5 * STD / FP8_MAX)
"""Range of the scales that ``renew`` draws; the largest of 16,384 normal values is 4 STD."""
EXPERTS_AT_ONCE = 16
SEED = 11
FIRST_LAYER = "model.layers.0."

Named = list[tuple[str, torch.Tensor]]


def bf16_module(shape: Shape, device: str) -> nn.Module:
    """A module with the parameters of transformers' model in BF16, and no arithmetic."""
    root = nn.Module()
    root.config = SimpleNamespace(model_type=shape.model_type)  # type: ignore[assignment]
    for p in parameters(shape):
        *path, leaf = p.name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        value = nn.Parameter(_random(p, device), requires_grad=False)
        owner.register_parameter(leaf, value)
    return root


def hf_named(module: nn.Module) -> Named:
    """The same memory under the names of a checkpoint: each expert's matrices by themselves."""
    return [
        (name, cut(parameter.detach()))
        for parameter_name, parameter in module.named_parameters()
        for name, cut in split(module, parameter_name, parameter)
    ]


def fp8_named(shape: Shape, device: str) -> Named:
    """Codes with ``<name>_scale_inv`` for what the engine keeps in FP8, BF16 for the rest."""
    return [pair for p in parameters(shape) for pair in _fp8_pairs(p, shape, device)]


def shared(shape: Shape, device: str, form: str = "bf16") -> Named:
    """All tensors of a checkpoint; every layer has the memory of the first, and so takes no room
    beside an engine that fills the device.

    Args:
        form: "bf16", or "fp8" for the same weights as codes and scales.
    """
    one = replace(shape, layers=1)
    torch.manual_seed(SEED)
    named = fp8_named(one, device) if form == "fp8" else hf_named(bf16_module(one, device))
    layer = [pair for pair in named if pair[0].startswith(FIRST_LAYER)]
    begin = [name for name, _ in named].index(layer[0][0])
    layers = [
        (f"model.layers.{number}.{name.removeprefix(FIRST_LAYER)}", tensor)
        for number in range(shape.layers)
        for name, tensor in layer
    ]
    return named[:begin] + layers + named[begin + len(layer) :]


def renew(tensors: Iterable[torch.Tensor]) -> None:
    """New random values in place, without new memory.

    BF16 is drawn again. Codes change their sign and FP32 scales are drawn again, so that every
    weight is a new one without quantizing the model at each update.
    """
    for tensor in tensors:
        if tensor.dtype == FP8_DTYPE:
            tensor.view(torch.uint8).bitwise_xor_(0x80)
        elif tensor.dtype == torch.float32:
            tensor.uniform_(*SCALES)
        else:
            draw(tensor)


def draw(tensor: torch.Tensor) -> torch.Tensor:
    """New random values in place: norms around 1, matrices around 0."""
    return tensor.normal_(1.0 if tensor.dim() == 1 else 0.0, STD)


def split(
    module: nn.Module, name: str, parameter: torch.Tensor
) -> Iterator[tuple[str, hf_names.Cut]]:
    return hf_names.split(name, tuple(parameter.shape), hf_names.model_type(module))


def _fp8_pairs(p: Parameter, shape: Shape, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    weight = _random(p, device)
    if not p.fp8:
        yield p.name, weight
        return
    pieces = weight.split(EXPERTS_AT_ONCE) if weight.dim() == 3 else (weight,)
    quantized = [quantize_weight(piece) for piece in pieces]
    codes, scales = (torch.cat(column) for column in zip(*quantized, strict=True))
    for name, cut in hf_names.split(p.name, tuple(codes.shape), shape.model_type):
        yield name, cut(codes)
    # the rows of gate and up are whole blocks, so their scales are cut as they are
    for name, cut in hf_names.split(p.name, tuple(scales.shape), shape.model_type):
        yield f"{name}_scale_inv", cut(scales)


def _random(p: Parameter, device: str) -> torch.Tensor:
    return draw(torch.empty(p.shape, dtype=torch.bfloat16, device=device))
