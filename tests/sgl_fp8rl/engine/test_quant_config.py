"""What is told of an engine's layers."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from server_args import Fp8RLServerArgs
from server_args.args import FORMATS
from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.layers import linear, moe, quant_config
from sgl_fp8rl.engine.layers.quant_config import FP8RLConfig, LayerFormat, list_layers
from sgl_fp8rl.formats import BLOCK_FP8, BLOCK_FP8_UE8M0, BLOCKS
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

    config.format = other_format
    for methods in (linear.METHODS, moe.METHODS):
        monkeypatch.setitem(methods, other_format.name, Method)
    assert config.get_quant_method(a_linear, "a") == Method(None, "a")
    assert config.get_quant_method(experts, "b") == Method(None, "b")


def test_every_choice_has_its_layers() -> None:
    assert tuple(fmt.name for fmt in BLOCKS) == FORMATS
    assert linear.METHODS.keys() == moe.METHODS.keys() == set(FORMATS)


def choose(monkeypatch: pytest.MonkeyPatch, fmt: str) -> FP8RLConfig:
    monkeypatch.setattr(quant_config, "current_options", lambda: Fp8RLServerArgs(format=fmt))
    return FP8RLConfig()


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_gpu_without_kernels_is_refused(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert choose(monkeypatch, fmt).format.name == fmt
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    with pytest.raises(ValueError, match=f"this GPU has no kernels: {fmt} needs SM 8.9 or newer"):
        choose(monkeypatch, fmt)


def test_a_block_fp8_checkpoint_may_have_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    rounded, settings = plain | {"scale_fmt": "ue8m0"}, choose(monkeypatch, "block-fp8-ue8m0")
    assert settings.from_config(rounded).format is BLOCK_FP8_UE8M0
    with pytest.raises(
        ValueError, match=r"ue8m0 .* scale_fmt None; start from the BF16 checkpoint"
    ):
        settings.from_config(plain)
    settings = choose(monkeypatch, "block-fp8")
    for checkpoint in (plain, rounded):  # powers of two are scales like others
        assert settings.from_config(checkpoint).format is BLOCK_FP8


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"intermediate_size_per_partition": 192}, "expert size 192 x 256 .* multiple of 128"),
        ({"hidden_size": 200}, "expert size 128 x 200 .* multiple of 128"),
    ],
    ids=str,
)
def test_experts_without_padding_are_refused_with_a_reason(
    changes: dict[str, Any], reason: str | None
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size_per_partition": 128, "with_bias": False}
    layer = SimpleNamespace(**sizes | changes, moe_runner_config=SimpleNamespace(is_gated=True))
    paddings, said = moe.fit(layer, pads=False)
    assert paddings is None
    assert said is None if reason is None else re.search(reason, str(said))


def test_what_mla_absorbs_stays_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    config, layer = FP8RLConfig(), compat.LinearBase.__new__(compat.LinearBase)
    vars(layer).update(params_dtype=torch.get_default_dtype())
    method = config.get_quant_method(layer, "model.layers.0.self_attn.kv_b_proj")
    assert isinstance(method, compat.UnquantizedLinearMethod)
    assert "absorbs" in layer.fp8rl_reason
    other = config.get_quant_method(layer, "model.layers.0.self_attn.q_b_proj")
    assert isinstance(other, linear.FP8RLLinearMethod)
