"""Does TRL learn on FP8 rollouts what it learns on BF16 rollouts?

``python -m benchmarks.frameworks.trl_parity``. Written down before the run:

- **Arms.** Stock ``trl.GRPOTrainer`` with ``attach``, the same engine and code: ``fp8``, and
  ``bf16``, where the quantization ignores every layer. Five seeds, each with its start (the policy
  of ``examples.trl.tiny_model``) and its order of prompts in both arms; 12 steps of 2 prompts with
  16 completions of up to 16 tokens; token TIS, C = 2. The reward is the share of even tokens.
- **Question.** Is a run's mean reward over its 12 steps, which measures how fast it learns, the
  same in both arms within 0.1? TOST over pairs of seeds at alpha 0.05. A run that learns one step
  later has 0.04 less.
- **Prediction.** Yes. Every run begins near 0.5 and ends above 0.9. The mismatch KL of ``fp8`` is
  larger than that of ``bf16`` and stays below 0.01; no step has an alarm; each step's batch is of
  the policy version of its number.
"""

import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from benchmarks.environment import ROOT
from benchmarks.frameworks import command
from benchmarks.frameworks.command import Row
from benchmarks.tables.trl import PICTURE, table
from examples.grpo.engine import KEYWORDS, running_engine
from examples.trl import tiny_model
from sgl_fp8rl.integrations.trl import attach

ARMS = {"bf16": "re:.*", "fp8": ""}
"""Which layers stay BF16."""
SEEDS, STEPS, LEARNING_RATE = 5, 12, 1e-2
LOG = ROOT / "benchmarks" / "results" / "trl.jsonl"
NAMES = {"reward": "reward"} | {
    f"fp8rl/{name}": name for name in ("policy_version", "mismatch_kl_k3", "ess", "alarms")
}
PACKAGES = ("trl", "accelerate", "transformers")


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def train(engine: Any, seed: int, folder: Path) -> list[Row]:
    """One run's metrics, a step each."""
    start = tiny_model.save(folder / "start", seed)
    config = GRPOConfig(
        output_dir=str(folder / "output"),
        seed=seed,
        max_steps=STEPS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        per_device_train_batch_size=32,
        num_generations=16,
        max_completion_length=16,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
    )
    prompts = [" ".join(str(8 * i + j) for j in range(2 + i % 5)) for i in range(32)]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(start, dtype="float32"),
        reward_funcs=even,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tiny_model.tokenizer(),
    )
    attach(trainer, engine)
    trainer.train()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    return [{ours: row[theirs] for theirs, ours in NAMES.items()} for row in logged]


def measure() -> list[Row]:
    """All runs, after the environment."""
    rows = [command.environment_row("python -m benchmarks.frameworks.trl_parity", PACKAGES)]
    with tempfile.TemporaryDirectory() as folder:
        served = tiny_model.save(Path(folder) / "served")
        for arm, ignored_layers in ARMS.items():
            with running_engine(served, ignored_layers, 0, KEYWORDS["cpu"]) as engine:
                for seed in range(SEEDS):
                    for step, row in enumerate(train(engine, seed, Path(folder))):
                        rows.append({"step": step, "arm": arm, "seed": seed, **row})
    return rows


if __name__ == "__main__":  # SGLang spawns its processes, which import this file again
    command.compare(__doc__, LOG, PICTURE, measure, table)
