"""A stock ``trl.GRPOTrainer`` small enough for a CPU; as a script, one rank of several.

The policy is that of ``examples.trl.tiny_model``. The reward is the share of a completion's tokens
that are even, which it learns within some steps.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import DistributedType, PartialState
from datasets import Dataset
from peft import LoraConfig
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from examples.trl import tiny_model
from trainer_bridge.adapters.trl import attach

FSDP2 = {
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3DecoderLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
"""What ``accelerate launch`` sets for FSDP2."""


LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Adapters as large as the weights, so that adding and subtracting them shows in the last bits.
LORA = LoraConfig(r=8, lora_alpha=64, target_modules=LINEARS, init_lora_weights=False)


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even tokens."""
    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]


def make_trainer(checkpoint: Path, output: Path, peft_config: Any = None, **options: Any) -> Any:
    """A trainer without an engine; ``options`` are of ``GRPOConfig``."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompts = [" ".join(str(8 * i + j) for j in range(2 + i % 5)) for i in range(32)]
    config = GRPOConfig(
        **{
            "output_dir": str(output),
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "gradient_checkpointing": False,
            "logging_steps": 1,
            "max_steps": 3,
            "per_device_train_batch_size": 16,
            "num_generations": 8,
            "max_completion_length": 16,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 2.0,
            **options,
        }
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=even,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tiny_model.tokenizer(),
        peft_config=peft_config,
    )


def steps_of(trainer: Any) -> list[dict[str, float]]:
    """What the trainer logged at each step."""
    return [row for row in trainer.state.log_history if "reward" in row]


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """A copy of all parameters; of those that are sharded, this rank's part."""
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    def local(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    return one.keys() == other.keys() and all(
        torch.equal(local(one[name]), local(other[name])) for name in one
    )


def merged_by_hand(trainer: Any) -> dict[str, torch.Tensor]:
    """BF16 weights by their HF names; nothing of peft but its parameters."""
    tensors: dict[str, torch.Tensor] = {}
    named = dict(trainer.model.named_parameters())
    for name, tensor in named.items():
        plain = name.removeprefix("base_model.model.")
        if ".base_layer." in name:
            a, b = (
                named[name.replace("base_layer", f"lora_{x}.default")].detach() for x in ("A", "B")
            )
            tensor = tensor + (b @ a) * (LORA.lora_alpha / LORA.r)
        if ".lora_" not in name:
            tensors[plain.replace(".base_layer", "")] = tensor.detach().bfloat16()
    return tensors


def is_merged(trainer: Any) -> bool:
    return any(getattr(module, "merged", False) for module in trainer.model.modules())


def main(checkpoint: str, address: str, output: str, options: str) -> None:
    """One rank, under ``torchrun``; rank 0 writes what was logged."""
    given = json.loads(options)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        # accelerate 1.15 shards on accelerators only, and reads here whether there are some
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        given["accelerator_config"] = {"use_configured_state": True}
    peft_config = LORA if given.pop("lora", False) else None
    trainer = make_trainer(Path(checkpoint), Path(output), peft_config, **given)
    attach(trainer, address if os.environ["RANK"] == "0" else None)
    trainer.train()
    frozen = {name: p for name, p in weights_of(trainer).items() if ".lora_" not in name}
    trainer.vllm_generation.sync_weights()
    after = weights_of(trainer)
    if os.environ["RANK"] == "0":
        result = {
            "steps": steps_of(trainer),
            "wrapper": type(trainer.model_wrapped).__name__,
            "sharded": all(isinstance(p, DTensor) for p in after.values()),
            "kept": same({name: after[name] for name in frozen}, frozen),
        }
        Path(output, "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
