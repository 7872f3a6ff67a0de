"""HF names of a trainer's parameters, held against what transformers itself saves."""

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.engine import models, vision_models
from tests.trainer_bridge import moe_models
from trainer_bridge.sources import hf_names
from trainer_bridge.sources.parameters import NamedTensors, Source, named_tensors, sources


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text"])
def test_some_families_keep_experts_fused(family: str) -> None:
    fused = torch.zeros(2, 6, 4)
    ((name, cut),) = hf_names.split("l.mlp.experts.gate_up_proj", (2, 6, 4), family)
    assert name == "l.mlp.experts.gate_up_proj"
    assert cut(fused) is fused


OF_ANY: dict[str, Any] = {
    "moe_intermediate_size": 16,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
}
GROUPS = {"n_group": 1, "topk_group": 1}
MLA = {
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **{"v_head_dim": 16, "first_k_dense_replace": 1, **GROUPS},
}


def tiny(family: str, **changes: Any) -> nn.Module:
    model: nn.Module = moe_models.tiny(family, **{**OF_ANY, **changes})
    with torch.no_grad():
        for buffer in model.buffers():  # such as a router's bias, zero at first
            if buffer.is_floating_point():
                buffer.uniform_()
    return model


def saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What ``save_pretrained`` writes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def planned(model_or_named: nn.Module | NamedTensors, dtype: torch.dtype) -> list[Source]:
    """The sources of a module's checkpoint, or of HF tensors, as an update makes them."""
    is_module = isinstance(model_or_named, nn.Module)
    family = hf_names.model_type(model_or_named) if is_module else None  # type: ignore[arg-type]
    return sources(named_tensors(model_or_named), family, dtype)


def streamed(
    model_or_named: nn.Module | NamedTensors, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Each HF tensor as it is sent."""
    pairs = zip(
        planned(model_or_named, dtype), [t for _, t in named_tensors(model_or_named)], strict=True
    )
    found: dict[str, torch.Tensor] = {}
    for source, parameter in pairs:
        whole = source.read(parameter).to(source.sent_as)
        found |= {name: cut(whole) for name, cut in source.cuts}
    return found


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in ("qwen3", "qwen3_moe", "mixtral", "olmoe", "minimax_m2")),
        *((family, {}) for family in ("gpt_oss", "gemma2")),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 16}),
        ("glm4_moe", GROUPS),
        ("deepseek_v3", MLA),
    ],
)
def test_names_and_values_are_those_that_transformers_saves(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    model = tiny(family, **changes)
    expected = saved(model, tmp_path)
    found = streamed(model, torch.float32)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    announced = {
        n: t.shape for s in planned(model, torch.float32) for n, t in s.announce(s.sent_as)
    }
    assert announced == {name: tensor.shape for name, tensor in expected.items()}


@pytest.mark.sglang  # which brings torchvision
@pytest.mark.parametrize("family", list(vision_models.FAMILIES))
def test_names_of_a_vision_language_model(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForImageTextToText

    checkpoint = vision_models.make_checkpoint(family, tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.bfloat16)
    expected = dict(models.named_tensors(checkpoint))
    found = streamed(model, torch.bfloat16)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_walk_keeps_no_module() -> None:
    """A cycle of it would hold the model until Python's garbage collection."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        named_tensors(model)
        del model
        assert gone() is None
    finally:
        gc.enable()
