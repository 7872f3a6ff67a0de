"""Which layers are FP8, and what the engine calls them: against the table of the engine tests."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

from sgl_fp8rl.formats import BLOCK_FP8
from sgl_fp8rl.tools.precision.groups import fp8_groups
from tests.engine import models
from tests.engine.test_families import LAYERS
from tests.sgl_fp8rl.tools.precision.conftest import Load

MLA = {
    "deepseek_v2": r"kv_a_proj_with_mqa.*deepseek_v2",
    "deepseek_v3": r"q_a_proj.*deepseek_v3",
}
"""Refused: the layer and the family that are named."""


@pytest.mark.parametrize("family", sorted(LAYERS.keys() - MLA))
def test_as_a_real_engine_has_them(family: str, load: Load) -> None:
    block, _ = LAYERS[family]
    wanted = {f"model.layers.{n}.{name}" for n in (0, 1) for name, why in block.items() if not why}
    names = [group.name for group in fp8_groups(load(family))]
    assert set(names) == wanted
    layers = [name.split(".")[2] for name in names]
    assert layers == sorted(layers)


def test_every_fp8_weight_is_in_one_group(checkpoint: Callable[[str], Any], load: Load) -> None:
    for family in ("qwen3", "qwen3_moe", "mixtral", "phi3", "qwen3_ragged_kv", "smollm2"):
        fp8 = set(models.fp8_names(checkpoint(family)))
        stored = dict(models.named_tensors(checkpoint(family)))
        groups = fp8_groups(load(family))
        assert sum(g.bf16_bytes for g in groups) == 2 * sum(stored[n].numel() for n in fp8)


def test_experts_have_the_name_of_their_family() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
    config = MiniMaxM2Config(
        **sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, vocab_size=128
    )
    model = MiniMaxM2ForCausalLM(config).bfloat16()
    wanted = {"self_attn.qkv_proj", "self_attn.o_proj", "block_sparse_moe.experts"}
    assert {g.name.removeprefix("model.layers.0.") for g in fp8_groups(model)} == wanted


def test_what_padding_makes_as_large_as_bf16_stays_bf16(load: Load) -> None:
    model = load("qwen3_moe_ragged")
    for layer in model.model.layers:
        layer.mlp.experts.down_proj = nn.Parameter(torch.zeros(4, 256, 64))
    assert {group.name for group in fp8_groups(model)} == {
        f"model.layers.{n}.self_attn.{leaf}" for n in (0, 1) for leaf in ("qkv_proj", "o_proj")
    }


def test_ragged_layers_follow_the_engines_option(load: Load) -> None:
    model, ragged = load("qwen3_ragged"), {"qkv_proj", "o_proj"}
    found = {
        option: {g.name.rpartition(".")[2]: g.format.name for g in groups}
        for option in ("pad", "bf16")
        for groups in (fp8_groups(model, ragged=option),)
    }
    assert set(found["pad"].values()) == {BLOCK_FP8.name}
    assert found["pad"].keys() == found["bf16"].keys() | ragged
    assert not found["bf16"].keys() & ragged


@pytest.mark.parametrize("family", MLA)
def test_a_layer_that_is_not_known_is_refused(family: str, load: Load) -> None:
    with pytest.raises(ValueError, match=MLA[family]):
        fp8_groups(load(family))


def test_a_model_without_fp8_layers_is_refused(load: Load) -> None:
    model = load("qwen3")
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, nn.Linear(64, 64))
    with pytest.raises(ValueError, match=r"no layer.* block-fp8"):
        fp8_groups(model)
