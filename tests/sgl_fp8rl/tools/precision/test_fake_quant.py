"""The fake-quantized layers, against what an engine on a CPU runs and against the FP8 oracle."""

import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sgl_fp8rl.formats import BLOCK_FP8, BLOCKS
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.ops.reference import fp8_linear, quantize_weight
from sgl_fp8rl.tools.precision import fake_quant
from sgl_fp8rl.tools.precision.groups import Group, fp8_groups
from tests import oracle
from tests.sgl_fp8rl.tools.precision.conftest import Load

BF16_ROUNDING = 2.0**-8
"""Relative; the reference adds in FP32 and rounds once, the oracle adds in float64."""


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def exact(fmt: WeightFormat, linear: nn.Linear, x_MK: torch.Tensor) -> oracle.F64:
    weight, x = linear.weight.float().detach().numpy(), x_MK.float().numpy()
    bias = None if linear.bias is None else linear.bias.float().detach().numpy()
    power_of_two = fmt.power_of_two_scales
    parts = oracle.quantize_weight(weight, power_of_two=power_of_two)
    return oracle.linear(x, *parts, bias, power_of_two=power_of_two)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("fmt", BLOCKS, ids=lambda fmt: fmt.name)
def test_a_linear(fmt: WeightFormat, has_bias: bool) -> None:
    linear, x = nn.Linear(256, 384, bias=has_bias, dtype=torch.bfloat16), drawn(2, 5, 256)
    before = linear(x)
    with fake_quant.fp8([Group("a", (linear,), fmt)]):
        got = linear(x)
    assert torch.equal(linear(x), before) and not torch.equal(got, before)
    assert "forward" not in vars(linear)
    if fmt is BLOCK_FP8:
        codes, scale = quantize_weight(linear.weight)
        assert torch.equal(got, fp8_linear(x, codes, scale, linear.bias))
    found, wanted = got.float().detach().flatten(0, 1).numpy(), exact(fmt, linear, x.flatten(0, 1))
    error = np.abs(found - wanted)
    assert (error <= BF16_ROUNDING * np.abs(wanted) + 1e-5).all()
    (another,) = (each for each in BLOCKS if each is not fmt)  # the control
    other = exact(another, linear, x.flatten(0, 1))
    assert np.abs(found - other).mean() > 2 * error.mean()


@pytest.mark.parametrize("fmt", BLOCKS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_moe_ragged"])
def test_experts_are_those_of_a_cpu_engine(family: str, fmt: WeightFormat, load: Load) -> None:
    """Padded or not: each half of gate_up is quantized by itself."""
    from sgl_fp8rl.engine.layers.moe import experts_reference

    model = load(family)
    group = next(g for g in fp8_groups(model, fmt) if g.name == "model.layers.1.mlp.experts")
    (experts,) = group.modules
    x = drawn(6, 256)
    ids = torch.tensor([[0, 1], [1, 2], [3, 0], [0, 1], [2, 3], [3, 1]])
    weights = torch.rand(6, 2, generator=torch.Generator().manual_seed(0))
    before = experts(x, ids, weights)
    with fake_quant.fp8([group]):
        got = experts(x, ids, weights)
    assert torch.equal(experts(x, ids, weights), before) and not torch.equal(got, before)
    parameters: Any = dict(experts.named_parameters())
    size = parameters["down_proj"].shape[-1]
    padded = -(-size // 128) * 128
    up, down = torch.zeros(4, 2 * padded, 256), torch.zeros(4, 256, padded)
    for half in range(2):
        rows = parameters["gate_up_proj"][:, half * size :][:, :size]
        up[:, half * padded :][:, :size] = rows.detach()
    down[..., :size] = parameters["down_proj"].detach()
    weights_of = {"w13_weight": fmt.encode(up), "w2_weight": fmt.encode(down)}
    layer = SimpleNamespace(
        **{name + s: part for name, held in weights_of.items() for s, part in held.items()},
        moe_runner_config=SimpleNamespace(
            activation="silu", apply_router_weight_on_input=False, routed_scaling_factor=None
        ),
    )
    power_of_two = fmt.power_of_two_scales
    want = experts_reference(layer, x, weights, ids, power_of_two=power_of_two)
    assert torch.equal(got, want)
    other = experts_reference(layer, x, weights, ids, power_of_two=not power_of_two)
    assert not torch.equal(got, other)  # the control


def test_experts_of_another_form_are_refused(load: Load) -> None:
    model = load("qwen3_moe")
    model.model.layers[0].mlp.experts.is_transposed = True
    refused = pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts.*transposed")
    with refused, fake_quant.fp8(fp8_groups(model)):
        pass
    for module in model.modules():
        assert "forward" not in vars(module)


def test_nan_in_a_weight_is_refused() -> None:
    linear = nn.Linear(128, 128, dtype=torch.bfloat16)
    linear.weight.data[3, 4] = torch.nan
    with pytest.raises(ValueError, match="NaN or Inf"), fake_quant.fp8([Group("a", (linear,))]):
        linear(drawn(2, 128))


def test_codes_of_one_layer_are_held_at_a_time(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    model, held, most = load("qwen3"), weakref.WeakSet[torch.Tensor](), 0
    encode = BLOCK_FP8.encode

    def counted(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        nonlocal most
        encoded = encode(weight)
        held.add(encoded[""])
        most = max(most, len(held))
        return encoded

    monkeypatch.setattr(BLOCK_FP8, "encode", counted)
    with fake_quant.fp8(fp8_groups(model)):
        model(torch.tensor([[1, 2, 3]]))
    assert most == 1
