"""What is told of an engine's layers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.layers import linear, moe
from sgl_fp8rl.engine.layers.quant_config import FP8RLConfig, LayerFormat, list_layers
from sgl_fp8rl.formats.weight_format import WeightFormat
from tests.experts_fakes import E, Experts, H, I


def test_layers_are_listed_with_what_they_keep() -> None:
    assert list_layers(nn.ModuleDict({"mlp": Experts(), "head": nn.Linear(4, 2)})) == [
        LayerFormat("mlp", "block-fp8", None, (E, 2 * I, H)),
        LayerFormat(
            "head",
            "bf16",
            "router or other layer that the model builds without quantization",
            (2, 4),
        ),
    ]


def test_a_format_is_served_by_its_line_in_the_tables(
    other_format: WeightFormat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Method(SimpleNamespace):
        def __init__(self, config: Any, prefix: str) -> None:
            super().__init__(prefix=prefix)

    config, a_linear = FP8RLConfig(), compat.LinearBase.__new__(compat.LinearBase)
    vars(a_linear).update(params_dtype=torch.get_default_dtype())
    experts = compat.FusedMoE.__new__(compat.FusedMoE)
    sizes = {"intermediate_size_per_partition": 128, "hidden_size": 128}
    plain = {"with_bias": False, "moe_runner_config": SimpleNamespace(is_gated=True)}
    vars(experts).update(sizes | plain, use_triton_kernels=False, use_flashinfer_trtllm_moe=False)
    assert isinstance(config.get_quant_method(a_linear, "a"), linear.FP8RLLinearMethod)
    assert isinstance(config.get_quant_method(experts, "b"), moe.FP8RLMoEMethod)

    config.formats = [other_format]
    monkeypatch.setitem(linear.METHODS, other_format.name, Method)
    assert config.get_quant_method(a_linear, "a") == Method(None, "a")
    method = config.get_quant_method(experts, "b")
    assert isinstance(method, compat.UnquantizedFusedMoEMethod)
    assert experts.fp8rl_reason == f"no layer of experts computes in {other_format.name}"
    monkeypatch.setitem(moe.METHODS, other_format.name, Method)
    assert config.get_quant_method(experts, "b") == Method(None, "b")


def test_what_mla_absorbs_stays_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    config, layer = FP8RLConfig(), compat.LinearBase.__new__(compat.LinearBase)
    vars(layer).update(params_dtype=torch.get_default_dtype())
    method = config.get_quant_method(layer, "model.layers.0.self_attn.kv_b_proj")
    assert isinstance(method, compat.UnquantizedLinearMethod)
    assert "absorbs" in layer.fp8rl_reason
    other = config.get_quant_method(layer, "model.layers.0.self_attn.q_b_proj")
    assert isinstance(other, linear.FP8RLLinearMethod)
