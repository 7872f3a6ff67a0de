"""Weights for the KV cache benchmark: shared ones for speed, and ones whose KV is hard to keep."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.engines import models, weights
from benchmarks.kv.attention_inputs import (
    BEYOND,
    BEYOND_WEIGHT,
    GAIN_SPREAD,
    OUTLIER_CHANNELS,
    OUTLIER_GAIN,
)

K_BEYOND = "K beyond 448"
PLANTED = ("no outliers", K_BEYOND)
"""Sets of weights; the second has K channels that leave E4M3's range."""
SEED = 11
FIRST_LAYER = "model.layers.0."
V_OCTAVES = 3.0
"""V's heads differ by up to so many powers of two."""


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


def module(shape: models.Shape, device: str, planted: str) -> nn.Module:
    """The trainer's model: random, with norms and V as real models have them, the same in every
    process on the same kind of device."""
    torch.manual_seed(SEED)
    made = weights.bf16_module(shape, device)
    for name, parameter in made.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            side = name.split("_norm")[0][-1]
            parameter.normal_(0.0, GAIN_SPREAD).exp_()
            parameter[list(OUTLIER_CHANNELS[side])] *= OUTLIER_GAIN
            if planted == K_BEYOND:
                gain = BEYOND if side == "k" else BEYOND_WEIGHT / BEYOND
                parameter[list(OUTLIER_CHANNELS["k"])] = gain
        elif name.endswith("v_proj.weight"):
            octaves_H = torch.linspace(0, V_OCTAVES, shape.kv_heads, device=parameter.device)
            heads = parameter.unflatten(0, (shape.kv_heads, -1))
            heads *= torch.exp2(-octaves_H)[:, None, None].to(parameter.dtype)
    return made


def trainer_scales(
    given: nn.Module, shape: models.Shape, sequences: list[list[int]]
) -> torch.Tensor:
    """KV scales from transformers' own forward of these weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainer_bridge import KVCalibrator

    config = AutoConfig.for_model(**models.config(shape))
    state: dict[str, Any] = given.state_dict()
    device = next(given.parameters()).device
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(state)
    calibrator = KVCalibrator.of(model)
    with torch.inference_mode(), calibrator.watch(model):
        for sequence in sequences:  # the logits of all at once would be large
            model(torch.tensor([sequence], device=device))
    return calibrator.scales()
