"""A stock ``trl.GRPOTrainer`` small enough for a CPU; as a script, one rank of several.

The policy is a random Qwen3 of ``tests.engine.models``, its words are numbers. The reward is the
share of a completion's tokens that are even, which a policy learns within some steps.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from sgl_fp8rl.integrations.trl import attach
from tests.engine.models import VOCAB

PAD, END = VOCAB - 2, VOCAB - 1
FSDP2 = {
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3DecoderLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
"""What ``accelerate launch`` sets for FSDP2."""


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({str(i): i for i in range(VOCAB)}, unk_token=str(PAD)))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=str(END), pad_token=str(PAD), unk_token=str(PAD)
    )


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
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def steps_of(trainer: Any) -> list[dict[str, float]]:
    """What the trainer logged at each step."""
    return [row for row in trainer.state.log_history if "reward" in row]


def main(checkpoint: str, address: str, output: str, options: str) -> None:
    """One rank, under ``torchrun``; rank 0 writes what was logged."""
    trainer = make_trainer(Path(checkpoint), Path(output), **json.loads(options))
    attach(trainer, address if os.environ["RANK"] == "0" else None)
    trainer.train()
    if os.environ["RANK"] == "0":
        kinds = sorted({type(p).__name__ for p in trainer.model.parameters()})
        placed = sorted({type(p.data).__name__ for p in trainer.model.parameters()})
        written = {"steps": steps_of(trainer), "parameters": kinds + placed}
        Path(output, "steps.json").write_text(json.dumps(written))


if __name__ == "__main__":
    main(*sys.argv[1:])
