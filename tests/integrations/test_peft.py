"""What an update is given of a mixture of experts whose attention has adapters."""

from pathlib import Path

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
