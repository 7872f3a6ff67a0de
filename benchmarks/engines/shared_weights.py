"""Random weights whose layers share memory, for engines that are timed."""

from dataclasses import replace

import torch

from benchmarks.engines import models, weights

SEED = 11
FIRST_LAYER = "model.layers.0."


def shared(shape: models.Shape, device: str, form: str = "bf16") -> weights.Named:
    """All tensors of a checkpoint, where every layer has the memory of the first: it takes no room
    beside an engine that fills the device.

    Args:
        form: "bf16", or "fp8" for the same weights as codes and scales.
    """
    one = replace(shape, layers=1)
    torch.manual_seed(SEED)
    if form == "fp8":
        named = weights.fp8_named(one, device)
    else:
        named = weights.hf_named(weights.bf16_module(one, device))
    layer = [pair for pair in named if pair[0].startswith(FIRST_LAYER)]
    begin = [name for name, _ in named].index(layer[0][0])
    layers = [
        (f"model.layers.{number}.{name.removeprefix(FIRST_LAYER)}", tensor)
        for number in range(shape.layers)
        for name, tensor in layer
    ]
    return named[:begin] + layers + named[begin + len(layer) :]
