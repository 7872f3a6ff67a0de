"""``verl.trainer.main_ppo`` as a process, on the example's configuration and a tiny policy.

The reward is the share of even numbers among the words of a completion.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.processes import engine_environment, exception_in

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "verl"
ROLLOUT = "actor_rollout_ref.rollout"
SGLANG = f"{ROLLOUT}.engine_kwargs.sglang"
ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "bf16": ("re:.*", (f"~{SGLANG}.kv_cache_dtype",)),
    "fp8": ("", ()),
}
"""Which layers stay BF16, and what each changes in the configuration of the example."""
NUMBERS = 509
"""Words of the policy. The last three of its 512 tokens are a newline, padding and the end."""
PROMPTS, COMPLETIONS, TOKENS = 4, 8, 16
MICRO_BATCH = 16
"""Of samples: half of a step, so that two ranks have one each."""
LIMIT_S = 500.0
"""Of a run, most of which is its start."""
METRICS, OUTPUT = "metrics.jsonl", "output.log"
LOG_LINES = 15
"""Of a run that failed: so many are kept."""
ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "tests.integrations.verl.verl_cpu",
    "VERL_USE_EXTERNAL_PLUGINS": "fp8rl",
    "VERL_PLATFORM": "cpu",
    # verl's FSDP2 engine is registered for cuda and npu
    "VERL_ENGINE_DEVICE": "cuda",
    "FP8RL_BUCKET_BYTES": "64MiB",
    "HF_HUB_OFFLINE": "1",
    "HYDRA_FULL_ERROR": "1",
    # the threads of several processes on few cores wait for each other
    "OMP_NUM_THREADS": "1",
    "RAY_COLOR_PREFIX": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray ends workers by what the machine has now, and a virtual one grows as it is used
    "RAY_memory_monitor_refresh_ms": "0",
    # Ray's own, 15, lets anything else on the machine go before verl
    "RAY_worker_niceness": "0",
}
"""Of the process that starts verl; Ray hands it on to all others."""


def even(solution_str: str, **_: Any) -> float:
    """The reward, for verl's ``reward.custom_reward_function``."""
    words = solution_str.split()
    return sum(int(word) % 2 == 0 for word in words) / max(1, len(words))


def tokenizer() -> Any:
    """Numbers between spaces, and what verl looks for in a Qwen3: ids of a newline and an end."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    newline, pad, end = special = ("\n", "<|endoftext|>", "<|im_end|>")
    words = [*map(str, range(NUMBERS)), *special]
    model = WordLevel({word: i for i, word in enumerate(words)}, unk_token=pad)
    made = Tokenizer(model)
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=end,
        pad_token=pad,
        unk_token=pad,
        additional_special_tokens=[newline],
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )


def prepare(folder: Path, prompts: int) -> None:
    """Write the policy, ``model``, and the prompts, ``prompts.parquet`` in verl's columns."""
    from datasets import Dataset

    from examples.trl import tiny_model

    path = tiny_model.save(folder / "model", 0)
    tokenizer().save_pretrained(path)
    rows = [
        {
            "data_source": "even",
            "prompt": [
                {"role": "user", "content": " ".join(str((8 * i + j) % NUMBERS) for j in range(4))}
            ],
            "ability": "numbers",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": i},
        }
        for i in range(prompts)
    ]
    Dataset.from_list(rows).to_parquet(str(folder / "prompts.parquet"))


def overrides(arm: str, ranks: int, steps: int, folder: Path) -> list[str]:
    """Of the example's configuration, as hydra reads them."""
    actor = "actor_rollout_ref.actor"
    return [
        *ARMS[arm][1],
        f"hydra.run.dir={folder}/hydra",
        f"data.train_files={folder}/prompts.parquet",
        f"data.val_files={folder}/prompts.parquet",
        "data.seed=0",
        f"data.train_batch_size={PROMPTS}",
        f"data.max_prompt_length={TOKENS}",
        f"data.max_response_length={TOKENS}",
        "data.dataloader_num_workers=0",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        f"reward.custom_reward_function.name={even.__name__}",
        "reward.num_workers=1",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"{actor}.ppo_mini_batch_size={PROMPTS}",
        f"{actor}.ppo_micro_batch_size_per_gpu={MICRO_BATCH}",
        # compiling would take longer than the run
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{ROLLOUT}.n={COMPLETIONS}",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={MICRO_BATCH}",
        f"{ROLLOUT}.tensor_model_parallel_size={ranks}",
        f"{ROLLOUT}.gpu_memory_utilization=0.2",
        f"{ROLLOUT}.max_num_seqs={PROMPTS * COMPLETIONS}",
        f"{ROLLOUT}.agent.num_workers=1",
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=64",
        # there is nothing to release, and no graph
        f"{ROLLOUT}.free_cache_engine=False",
        f"{ROLLOUT}.enforce_eager=True",
        f"+{SGLANG}.cuda_graph_max_bs_decode=64",
        f"+{SGLANG}.cuda_graph_backend_prefill=disabled",
        f"+{SGLANG}.grammar_backend=none",
        # without an FP8 KV cache, verl asks for FlashInfer's attention
        f"+{SGLANG}.attention_backend=torch_native",
        f"+{SGLANG}.enable_memory_saver=False",
        f"+{SGLANG}.max_total_tokens=4096",
        f"+{SGLANG}.sleep_on_idle=True",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"trainer.n_gpus_per_node={ranks}",
        f"trainer.total_training_steps={steps}",
        f"trainer.total_epochs={steps}",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=False",
        "trainer.resume_mode=disable",
        # a Ray of its own, beside others on the machine
        "+ray_kwargs.ray_init.address=local",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "+ray_kwargs.ray_init.object_store_memory=1000000000",
        f"+ray_kwargs.ray_init._temp_dir={folder}/ray",
        f"+ray_kwargs.ray_init.num_gpus={ranks}",
        "ray_kwargs.ray_init.num_cpus=16",
    ]


def run(arm: str, ranks: int, steps: int, folder: Path, *more: str) -> str | None:
    """Train; what verl raised, if it failed. Its logs stay in ``folder``.

    Args:
        ranks: of the trainer, and TP of the engine, each rank of which gets a core.
        folder: is empty, and has a short path, in which Ray makes sockets.
        more: overrides.
    """
    prepare(folder, PROMPTS * steps)
    environ = engine_environment(
        False,
        {
            **ENVIRONMENT,
            "VERL_FILE_LOGGER_PATH": str(folder / METRICS),
            "FP8RL_IGNORED_LAYERS": ARMS[arm][0],
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks))),
        },
    )
    words = [sys.executable, "-m", "verl.trainer.main_ppo"]
    words += [f"--config-path={EXAMPLE}", "--config-name=fp8rl"]
    words += [*overrides(arm, ranks, steps, folder), *more]
    log = folder / OUTPUT
    with log.open("wb") as out:
        try:
            subprocess.run(words, stdout=out, stderr=out, env=environ, timeout=LIMIT_S, check=True)
            return None
        except subprocess.TimeoutExpired:
            how = f"did not end within {LIMIT_S:.0f} s"
        except subprocess.CalledProcessError as error:
            how = f"exit status {error.returncode}"
    text = log.read_text(errors="replace")
    end = "\n".join(text.splitlines()[-LOG_LINES:])
    return f"{how}: {exception_in(text) or 'its log names no exception'}\n{end}"
