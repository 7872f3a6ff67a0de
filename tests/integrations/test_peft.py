"""What an update is given of a mixture of experts whose attention has adapters."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from sgl_fp8rl.integrations.peft import merged
from tests.engine import models
from trainer_bridge import hf_names
from trainer_bridge.sources import named_tensors, sources


def test_experts_have_the_names_and_values_of_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = models.make_checkpoint("qwen3_moe", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with merged(get_peft_model(model, config)) as view:
        named = named_tensors(view)
        planned = sources(named, hf_names.model_type(view), torch.bfloat16)
        sent = {
            name: cut(tensor).detach().clone()
            for source, (_, tensor) in zip(planned, named, strict=True)
            for name, cut in source.cuts
        }
    wanted = dict(models.named_tensors(checkpoint))
    assert sent.keys() == wanted.keys()
    changed = {name for name in wanted if not torch.equal(sent[name], wanted[name])}
    assert changed == {
        f"model.layers.{layer}.self_attn.{projection}.weight"
        for layer in range(2)
        for projection in ("q_proj", "v_proj")
    }


def test_a_model_without_adapters_is_sent_as_it_is() -> None:
    model = torch.nn.Linear(2, 2)
    with merged(model) as same:
        assert same is model


@pytest.mark.parametrize("kind", ["two adapters that save the head", "trainable tokens"])
def test_other_parts_of_adapters_have_no_names_of_their_own(kind: str, tmp_path: Path) -> None:
    checkpoint = models.make_checkpoint("qwen3", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    adapted = ["q_proj"]
    if kind == "trainable tokens":
        config = LoraConfig(r=4, target_modules=adapted, trainable_token_indices=[1, 3])
        changes = "model.embed_tokens.weight"
        whole = get_peft_model(model, config)
        spoilt = "trainable_tokens_delta"
    else:
        config = LoraConfig(r=4, target_modules=adapted, modules_to_save=["lm_head"])
        changes, spoilt = "lm_head.weight", "lm_head.modules_to_save.default"
        whole = get_peft_model(model, config)
        whole.add_adapter("ref", config)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if spoilt in name:
                parameter.add_(1.0)
    with merged(whole) as view:
        sent = {name: tensor.detach().clone() for name, tensor in named_tensors(view)}
    wanted = dict(models.named_tensors(checkpoint))
    assert sent.keys() == wanted.keys()
    assert {n for n in wanted if not torch.equal(sent[n], wanted[n])} == {changes}
