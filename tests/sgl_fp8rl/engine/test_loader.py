"""Which loader an engine gets, and the options that it hands on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.load_config import LoadConfig
from torch import nn

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.control.attached import weights_of
from sgl_fp8rl.engine.startup import loader, start_log
from sgl_fp8rl.formats import BLOCK_FP8
from sgl_fp8rl.formats.padding import Shard, fit, pad_storage
from sgl_fp8rl.formats.weight_format import TensorSpec
from sgl_fp8rl.options import current_options


@pytest.mark.parametrize("load_format", ["dummy", "auto"])
def test_a_loader_hands_the_options_on(load_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the KV scales, the bucket of the first write and the model's update state."""
    monkeypatch.setenv("FP8RL_BUCKET_BYTES", "1KiB")
    monkeypatch.setenv("FP8RL_KV_SCHEME", "unit")
    monkeypatch.setenv("FP8RL_KV_SCALES", "scales.json")
    config: Any = SimpleNamespace(quantization="fp8rl", dtype=torch.bfloat16)
    made = loader.choose_loader(None, LoadConfig(load_format=load_format), config)
    model: Any = nn.Linear(2, 2)
    given: list[Any] = []
    monkeypatch.setattr(loader, "attach_kv_scales", lambda *told: given.append(told[2].kv_scheme))
    monkeypatch.setattr(loader, "load_kv_scales", lambda scales, path: given.append(path))
    if load_format == "dummy":
        base = loader.FP8RLDummyLoader.__base__
        monkeypatch.setattr(base, "load_model", lambda self, **_: model)
        made.load_model(model_config=config, device_config=None)
    else:
        source = SimpleNamespace(model_or_path="", revision=None)
        headers = {"weight": TensorSpec(torch.bfloat16, (2, 2))}
        monkeypatch.setattr(made.Source, "init_new", lambda config, model: source)
        monkeypatch.setattr(made, "_prepare_weights", lambda *_: ("", [], False), raising=False)
        monkeypatch.setattr(loader, "read_headers", lambda files: headers)
        monkeypatch.setattr(
            loader.FP8RLModelLoader,
            "_load",
            lambda self, weights, m, _: given.append(m.chunk_bytes),
        )
        made._model_config = config
        made.load_weights_and_postprocess(model, None, None)
    assert given == ["unit", *([512] if load_format == "auto" else []), "scales.json"]
    weights = weights_of(model)
    assert weights is not None and weights.options is current_options()


def test_a_start_says_what_is_padded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Module()
    monkeypatch.setattr(compat, "get_tp_group", lambda: SimpleNamespace(rank_in_group=0))
    for index in range(2):
        padding, _ = fit(BLOCK_FP8, [Shard(576), Shard(192), Shard(192)], Shard(576))
        assert padding is not None
        layer = nn.Module()
        for name, dtype in (("weight", torch.float8_e4m3fn), ("weight_scale_inv", torch.float32)):
            empty = torch.zeros(960, 576).to(dtype)
            layer.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        pad_storage(*layer.parameters(), padding, BLOCK_FP8.block)
        model.add_module(f"layers_{index}", nn.Module())
        model.get_submodule(f"layers_{index}").add_module("qkv_proj", layer)
    model.add_module("down_proj", nn.Linear(4, 4))
    with caplog.at_level("INFO"):
        start_log.log_start(model)
    (said,) = (record.message for record in caplog.records if "padded" in record.message)
    # 1152 * 640 - 960 * 576 bytes each
    for word in ("2 layers", "0.4 MB", "2 x qkv_proj 960x576 in 1152x640"):
        assert word in said


def verified(architecture: str, attention: str = "MLA", **fields: Any) -> None:
    config = SimpleNamespace(
        quantization="fp8rl",
        attention_arch=compat.AttentionArch[attention],
        hf_config=SimpleNamespace(architectures=[architecture], **fields),
    )
    loader.verify_model(lambda _: None, config)


@pytest.mark.parametrize(
    ("architecture", "fields", "why"),
    [
        ("MiniCPM3ForCausalLM", {}, r"MiniCPM3ForCausalLM.*stale"),
        ("DeepseekV32ForCausalLM", {"index_topk": 2048}, r"\(DSA\)"),
        ("DeepseekV3ForCausalLM", {"index_topk": 2048}, r"\(DSA\)"),
    ],
)
def test_models_with_mla_that_are_served_or_not(architecture: str, fields: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        verified(architecture, **fields)
    for served in loader.MLA_MODELS:
        verified(served)
        verified(served, index_topk=None)
    verified("MiniCPM3ForCausalLM", attention="MHA")
