"""Does verl learn on FP8 rollouts what it learns on BF16 rollouts?

``python -m benchmarks.frameworks.verl_parity``: on a CPU, as ``trl_parity``; ``verl_trainer`` asks
it on GPUs. Written down before the run:

- **Arms.** verl 0.9.1's own synchronous trainer, ``verl.trainer.main_ppo`` with FSDP2, configured
  by ``examples/verl/fp8rl.yaml``, on the platform of ``verl_cpu``. ``fp8`` is that file: FP8
  weights and FP8 KV cache. ``bf16`` is the same engine and code, where the quantization ignores
  every layer and the KV cache is BF16: stock SGLang does not run on this CPU. Two seeds, each with
  its start (the policy of ``examples.trl.tiny_model``) and its order of prompts in both arms;
  20 steps of 4 prompts with 8 completions of 16 tokens; token TIS, C = 2. The reward is the share
  of even numbers. Learning rate and steps were chosen from one run of ``fp8`` with seed 100 and
  1e-2, whose mismatch KL reached 0.05, and one with seed 101 and 5e-3, which stayed below 0.0005.
- **Question.** Is a run's mean reward over its 20 steps, which measures how fast it learns, the
  same in both arms within 0.1, with each seed? A run that learns one step later has 0.025 less.
- **Prediction.** Yes. Every run begins near 0.5 and ends above 0.9. The mean ``rollout_corr/k3_kl``
  of ``fp8`` is larger than that of ``bf16``; no step's is above 0.1. Each token is of the last
  policy.
"""

import shutil
import tempfile
from pathlib import Path

from benchmarks.environment import ROOT
from benchmarks.frameworks import command, verl_log, verl_trainer
from benchmarks.frameworks.command import Row
from benchmarks.frameworks.verl_trainer import ROLLOUT
from benchmarks.tables.verl_parity import PICTURE, table

SGLANG = f"{ROLLOUT}.engine_kwargs.sglang"
ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "bf16": ("re:.*", (f"~{SGLANG}.kv_cache_dtype",)),
    "fp8": ("", ()),
}
"""Which layers stay BF16, and what each changes in the configuration of the example."""
SEEDS, STEPS, LEARNING_RATE = 2, 20, 5e-3
PROMPTS, COMPLETIONS = 4, 8
MICRO_BATCH = 16
"""Of samples: half of a step, so that two ranks have one each."""
LIMIT_S = 500.0
"""Of a run, most of which is its start."""
ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "benchmarks.frameworks.verl_cpu",
    "VERL_PLATFORM": "cpu",
    # verl's FSDP2 engine is registered for cuda and npu
    "VERL_ENGINE_DEVICE": "cuda",
    # the threads of several processes on few cores wait for each other
    "OMP_NUM_THREADS": "1",
    # Ray's own, 15, lets anything else on the machine go before verl
    "RAY_worker_niceness": "0",
}
"""Of the process that starts verl; Ray hands it on to all others."""
LOG = ROOT / "benchmarks" / "results" / "verl_parity.jsonl"


def overrides(arm: str, ranks: int, steps: int, seed: int, folder: Path) -> list[str]:
    """Of the example's configuration: those of a run on GPUs, and what is smaller here."""
    return [
        *verl_trainer.overrides(verl_trainer.OURS, ranks, steps, seed, folder),
        *ARMS[arm][1],
        f"data.train_batch_size={PROMPTS}",
        "actor_rollout_ref.model.external_lib=null",
        f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={MICRO_BATCH}",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={MICRO_BATCH}",
        f"{ROLLOUT}.n={COMPLETIONS}",
        f"{ROLLOUT}.max_num_seqs={PROMPTS * COMPLETIONS}",
        f"{ROLLOUT}.agent.num_workers=1",
        # there is nothing to release, and no graph
        f"{ROLLOUT}.free_cache_engine=False",
        f"{ROLLOUT}.enforce_eager=True",
        # without an FP8 KV cache, verl asks for FlashInfer's attention
        f"+{SGLANG}.attention_backend=torch_native",
        f"+{SGLANG}.enable_memory_saver=False",
        f"+{SGLANG}.max_total_tokens=4096",
        f"+{SGLANG}.sleep_on_idle=True",
    ]


def run(arm: str, ranks: int, steps: int, seed: int, folder: Path, *more: str) -> str | None:
    """Train; what verl raised, if it failed. Its logs stay in ``folder``, as of ``verl_log``.

    Args:
        ranks: of the trainer, and TP of the engine, each rank of which gets a core.
        folder: is empty, and has a short path, in which Ray makes sockets.
        more: overrides.
    """
    verl_trainer.prepare(folder, seed, PROMPTS * steps, {})
    arguments = [*overrides(arm, ranks, steps, seed, folder), *more]
    variables = {
        **ENVIRONMENT,
        "FP8RL_IGNORED_LAYERS": ARMS[arm][0],
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks))),
    }
    return verl_trainer.train(False, folder, arguments, LIMIT_S, variables)


def measure() -> list[Row]:
    """All runs, after the environment."""
    how = "python -m benchmarks.frameworks.verl_parity"
    found = [command.environment_row(how, verl_trainer.PACKAGES)]
    for seed in range(SEEDS):
        for arm in ARMS:
            folder = Path(tempfile.mkdtemp(prefix="verl", dir="/tmp"))
            try:
                failure = run(arm, 1, STEPS, seed, folder)
                rows = verl_log.rows(folder, {"arm": arm, "seed": seed}, failure)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            print(verl_log.summary(rows), flush=True)
            if failure is not None:
                raise SystemExit(f"{arm}, seed {seed}: {failure}")
            found += rows
    return found


if __name__ == "__main__":
    command.compare(__doc__, LOG, PICTURE, measure, table)
