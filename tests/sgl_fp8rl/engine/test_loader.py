"""Which loader an engine gets, and the options that it hands on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.load_config import LoadConfig
from torch import nn

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.control.attached import weights_of
from sgl_fp8rl.engine.startup import loader
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
