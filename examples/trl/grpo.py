"""GRPO by TRL on FP8 rollouts: python examples/trl/grpo.py MODEL [--steps N] [--report-to wandb].

MODEL is a folder or a name of the hub, trained in FP32 masters with BF16 arithmetic on a GPU. The
reward is the share of even digits among a completion's characters. What differs from a script of
TRL alone is marked. On several GPUs: accelerate launch examples/trl/grpo.py MODEL, with DDP or
FSDP2 (fsdp_version: 2).
"""

import argparse
import os
from typing import Any

import sglang
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from trainer_bridge.adapters.trl import attach  # added

WORDS = ("ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
PROMPTS = [f"Write {number} even digits :" for number in WORDS]


def even_digits(completions: list[str], **_: Any) -> list[float]:
    """The share of 0, 2, 4, 6 and 8 among the characters but spaces."""
    texts = [text.replace(" ", "") or "-" for text in completions]
    return [sum(character in "02468" for character in text) / len(text) for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--report-to", default="none")
    parser.add_argument("--output", default="build/trl")
    options = parser.parse_args()
    config = GRPOConfig(
        output_dir=options.output,
        max_steps=options.steps,
        learning_rate=options.learning_rate,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=32,
        bf16=torch.cuda.is_available(),
        logging_steps=1,
        report_to=options.report_to,
        vllm_importance_sampling_mode="token_truncate",  # advised: token TIS, C = 2
        vllm_importance_sampling_clip_max=2.0,
    )
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=even_digits,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 8}),
    )
    engine = None  # added: an FP8 engine on rank 0, which takes each step's weights
    if int(os.environ.get("RANK", "0")) == 0:
        engine = sglang.Engine(
            model_path=options.model,
            quantization="fp8rl",
            skip_tokenizer_init=True,
            mem_fraction_static=0.3,  # of a GPU that the trainer shares
            max_total_tokens=16384,
            log_level="error",
        )
    attach(trainer, engine)  # added
    trainer.train()


if __name__ == "__main__":  # SGLang spawns its processes, which import this file again
    main()
