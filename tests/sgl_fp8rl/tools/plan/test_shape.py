"""Sizes of a model, beside those of the models that transformers builds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.engines import models, traffic
from sgl_fp8rl.formats import BLOCK_FP8
from sgl_fp8rl.ops.kv import STATS, Cache, store_kv
from sgl_fp8rl.ops.paged_decode import pack_token_scales
from sgl_fp8rl.protocol.kv_schema import E4M3, INT8
from sgl_fp8rl.tools.plan import shape
from sgl_fp8rl.tools.plan.shape import BF16, PlanError

SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}
NORMS = 2e-4
"""Of the bytes of all weights, at most: the formula leaves them out."""
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def test_blocks_are_those_of_the_format() -> None:
    (scale,) = BLOCK_FP8.companions(BLOCK_FP8.block).values()
    assert BLOCK_FP8.block == (shape.BLOCK, shape.BLOCK) and scale.nbytes == shape.SCALE_BYTES


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", shape.FAMILIES)
def test_weights_are_those_of_transformers(family: str, tied: bool) -> None:
    more = MOE if family.endswith("moe") else {}
    config = AutoConfig.for_model(family, **(SMALL | more | {"tie_word_embeddings": tied}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    found = shape.of(config.to_dict())
    assert found.weight_bytes(fp8=False) == 2 * matrices
    assert found.kv_token_bytes(BF16) == 2 * 2 * 3 * 2 * 64


@pytest.mark.parametrize("name", models.MODELS)
def test_bytes_are_those_of_the_benchmarks(name: str) -> None:
    of = models.MODELS[name]
    found, parameters = shape.of(models.config(of)), list(models.parameters(of))
    for form in ("bf16", "fp8"):
        held = traffic.payload_bytes(parameters, form)
        assert found.weight_bytes(form == "fp8") == pytest.approx(held, rel=NORMS)
    linears = sum(each.numel for each in parameters if each.fp8)
    assert found.linear_weights == linears
    for cache in (BF16, E4M3, INT8):
        assert found.kv_token_bytes(cache) == traffic.kv_token_bytes(of, cache)


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("tp", [1, 2])
def test_bytes_of_int8_are_those_of_the_store(name: str, tp: int) -> None:
    """Codes, and the scales of K and V in one word, of each token and head of a rank."""
    found = shape.of(models.config(models.MODELS[name]))
    heads, dim, slots = found.kv_heads // tp, found.head_dim, 3
    k, v = torch.zeros((2, slots, heads, dim), dtype=torch.bfloat16).unbind()
    caches = [torch.zeros((slots, heads, dim), dtype=torch.int8) for _ in range(2)]
    scales = pack_token_scales(*torch.ones(2, slots, heads).unbind())
    counts = torch.zeros(STATS, dtype=torch.int64)
    cache = Cache(*caches, token_scales_HS=scales, stats_C=counts)
    store_kv(k, v, torch.arange(slots), cache, read_back=False)
    held = sum(x.numel() * x.element_size() for x in (*caches, scales))
    assert found.kv_token_bytes(INT8, tp) * slots == found.layers * held
    share = 1 + 2 / dim
    assert found.kv_token_bytes(INT8, tp) == pytest.approx(share * found.kv_token_bytes(E4M3, tp))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "deepseek_v3"}, "no formula for model_type 'deepseek_v3'"),
        ({"model_type": None}, "no formula for model_type None"),
        ({"quantization_config": {"quant_method": "fp8"}}, "a quantized checkpoint"),
        ({"mlp_only_layers": [1]}, "with and without experts"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be an integer of at least 1"),
        ({"hidden_size": "256"}, "hidden_size is '256'; it must be"),
        ({"num_attention_heads": None}, "KeyError: 'num_attention_heads'"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads is '8'"),
        ({"num_key_value_heads": -8}, "num_key_value_heads is -8"),
        ({"head_dim": -64}, "head_dim is -64"),
        (MOE | {"num_experts": "128"}, "num_experts is '128'"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"model_type": "qwen3"} | change))
    with pytest.raises(PlanError, match=why):
        shape.read(str(tmp_path))


@pytest.mark.parametrize("text", ["", "[]", '{"model_type": "llama"}', "\udcff"])
def test_what_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(PlanError, match=r"is not the config.json of a model"):
        shape.read(str(path))
    with pytest.raises(PlanError, match=r"absent"):
        shape.read(str(tmp_path / "absent"))
    with pytest.raises(PlanError, match=r"hf download Qwen/Qwen3-8B config\.json"):
        shape.read("Qwen/Qwen3-8B")
