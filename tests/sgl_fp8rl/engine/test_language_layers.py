"""SGLang's own models, built without weights: FP8 is for the layers of the language model."""

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from sglang.srt.distributed import parallel_state
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.layers.linear import FP8RLLinearMethod
from sgl_fp8rl.engine.layers.quant_config import OUTSIDE, FP8RLConfig, keep_towers_bf16, list_layers

pytestmark = pytest.mark.usefixtures("publish", "one_rank")

NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
# every dimension is a whole number of FP8 blocks
TEXT = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 512,
    **NO_TOKENS,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}
TOWER = {"hidden_size": 256, "intermediate_size": 256, "num_heads": 2}
LAYERS = "language_model.model.layers."

FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    # names that say "visual"
    "qwen2_5_vl": (
        "qwen2_5_vl:Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": TEXT | {"rope_parameters": ROPE},
            "vision_config": TOWER
            | {"depth": 1, "out_hidden_size": 256, "fullatt_block_indexes": [0]},
        },
        "model.layers.",
    ),
    # SGLang gives the layers of these towers no name that is the tower's
    "voxtral": (
        "voxtral:VoxtralForConditionalGeneration",
        {
            "text_config": TEXT | {"model_type": "llama"},
            "audio_config": {
                "hidden_size": 256,
                "intermediate_size": 1024,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
            "hidden_size": 256,
        },
        LAYERS,
    ),
    # its encoder has attention of the decoder's class
    "whisper": (
        "whisper:WhisperForConditionalGeneration",
        {
            **{"vocab_size": 512, "d_model": 256, "decoder_start_token_id": 0},
            **NO_TOKENS,
            **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
            **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
            **{f"{side}_ffn_dim": 256 for side in ("encoder", "decoder")},
        },
        "decoder.layers.",
    ),
}


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One process, BF16, and a plugin that is registered."""
    group = SimpleNamespace(world_size=1, rank_in_group=0, is_first_rank=True, is_last_rank=True)
    kinds = ("tp", "attn_tp", "attn_dp", "attn_cp", "moe_tp", "moe_ep", "pp")
    places = {f"{kind}_rank": 0 for kind in kinds} | {f"{kind}_size": 1 for kind in kinds}
    monkeypatch.setattr(parallel_state, "_PP", group)
    groups = dict.fromkeys(("tp_group", "attn_tp_group", "pp_group"), group)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with get_parallel().override(**places, **groups):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def build(path: str, config: Any) -> nn.Module:
    """As SGLang's loader does it, without memory."""
    module, _, name = path.partition(":")
    made = getattr(importlib.import_module(f"sglang.srt.models.{module}"), name)
    # SGLang adds these to a configuration that has them inside of another, or not at all
    text = config.get_text_config().to_dict()
    for option, value in {**text, **TEXT, "encoder_only": False, "language_only": False}.items():
        if getattr(config, option, None) is None:
            setattr(config, option, value)
    with torch.device("meta"):
        model: nn.Module = made(config=config, quant_config=FP8RLConfig())
    return model


def kept(model: nn.Module, quant_config: Any) -> nn.Module:
    with torch.device("meta"):
        return keep_towers_bf16(lambda *_: model, None, None, quant_config)


def fp8(model: nn.Module) -> set[str]:
    return {layer.name for layer in list_layers(model) if layer.format == "block-fp8"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_is_bf16_whatever_its_layers_are_called(family: str) -> None:
    path, options, decoder = FAMILIES[family]
    model = build(path, transformers.AutoConfig.for_model(family, **options))
    before, biases = fp8(model), [p for n, p in model.named_parameters() if n.endswith("bias")]
    outside = {name for name in before if not name.startswith(decoder)}
    assert outside, "nothing to keep"
    assert fp8(kept(model, FP8RLConfig())) == before - outside != set()
    reasons = {layer.name: layer.reason for layer in list_layers(model)}
    for name in outside:
        layer: Any = model.get_submodule(name)
        assert reasons[name] == OUTSIDE
        assert {n for n, _ in layer.named_parameters()} <= {"weight", "bias"}
        assert layer.weight.dtype == torch.bfloat16
        assert callable(layer.weight.weight_loader)
        assert isinstance(layer.quant_method, compat.UnquantizedLinearMethod)
    after = [p for n, p in model.named_parameters() if n.endswith("bias")]
    assert {*map(id, after)} == {*map(id, biases)}


def test_a_language_model_alone_and_another_quantization_are_left_alone() -> None:
    model = build("qwen2:Qwen2ForCausalLM", transformers.AutoConfig.for_model("qwen2", **TEXT))
    before = fp8(model)
    assert len(before) == 4
    assert fp8(kept(model, FP8RLConfig())) == before
    path, options, _ = FAMILIES["voxtral"]
    model = build(path, transformers.AutoConfig.for_model("voxtral", **options))
    before = fp8(model)
    assert fp8(kept(model, None)) == before


def test_a_model_that_attends_elsewhere_is_fp8_as_a_whole() -> None:
    """SGLang keeps the attention of transformers' own models beside their layers."""
    config = transformers.AutoConfig.for_model("qwen2", **TEXT)
    model: Any = build("qwen2:Qwen2ForCausalLM", config)
    before = fp8(model)
    del model.model.layers[0].self_attn.attn
    assert fp8(kept(model, FP8RLConfig())) == before
    linear = model.model.layers[0].mlp.down_proj
    assert isinstance(linear.quant_method, FP8RLLinearMethod)
