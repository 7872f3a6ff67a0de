"""verl's own trainer on FP8 rollouts beside BF16.

``python -m benchmarks.frameworks.verl_trainer --arm fp8rl --log FILE``.
Written down before the run:

- **Arms.** Stock ``verl.trainer.main_ppo`` 0.9.1, its synchronous hybrid trainer with FSDP2, its
  memory saver and its token TIS (C = 2), configured by ``examples/verl/fp8rl.yaml``. ``fp8rl`` is
  that file: FP8 weights and FP8 KV cache. ``bf16`` leaves out both keys, ``stock-fp8`` has verl's
  own ``quantization=fp8``; these two run without any plugin of ours. (Since the recorded runs, the
  file also names our trainer: the steps of ``fp8rl`` now compute our metrics, which the two others
  lack.) The rest is the same: a random
  Qwen3 of 8 layers and 127M parameters, GRPO on 16 prompts with 16 completions of 16 tokens, one
  optimizer step a step, FP32 master weights, buckets of 64 MiB. The reward is the share of even
  numbers among the words of a completion.
- **Questions.** Does the trainer run its 20 steps or more, on one GPU and with TP 2 on two? Is the
  mean reward over all steps the same as with BF16 within 0.1, in each pair of runs of one seed and
  as many GPUs? A run that learns one step later has 0.025 less. What memory does an update take
  beyond engine and trainer?
- **Prediction.** Yes and yes; each run begins near 0.5 and ends above 0.9. ``rollout_corr/k3_kl``
  of ``fp8rl`` is larger than that of ``bf16`` and below 0.01. Each token is of the last policy. The
  first update of ``fp8rl`` leaves the bucket, and kernels that it loads, on the device; a later
  one takes at most the bucket beyond that. ``stock-fp8`` does not start with this SGLang, or its
  steps take as long as those of ``fp8rl`` or longer.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.frameworks import command, verl_log
from benchmarks.processes import engine_environment, exception_in

ROLLOUT = "actor_rollout_ref.rollout"
STOCK = (f"~{ROLLOUT}.engine_kwargs.sglang.kv_cache_dtype", "trainer.v1.trainer_mode=sync")
"""Without our plugin: verl has no trainer of our name, and takes its own default."""
ARMS = {
    "bf16": (f"{ROLLOUT}.quantization=null", *STOCK),
    "fp8rl": (),
    "stock-fp8": (f"{ROLLOUT}.quantization=fp8", *STOCK),
}
"""What each changes in the configuration of the example."""
OURS = "fp8rl"
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
NUMBERS = 509
"""Words of the policy. The last three of its 512 tokens are a newline, padding and the end."""
LEARNING_RATE = 1e-3
PROMPTS, COMPLETIONS, TOKENS = 16, 16, 16
BUCKET_MIB = 64
PACKAGES = ("verl", "ray", "transformers", "tensordict")
LOG_LINES = 15
"""Of a run that failed: so many are kept."""


def even(solution_str: str, **_: Any) -> float:
    """The reward, for verl's ``reward.custom_reward_function``: the share of even numbers."""
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


def prepare(folder: Path, seed: int, prompts: int, shape: Mapping[str, int]) -> None:
    """Write the policy, ``model``, and the prompts, ``prompts.parquet`` in verl's columns.

    Args:
        shape: of the policy, beyond ``tiny_model``.
    """
    from datasets import Dataset

    from examples.trl import tiny_model

    path = tiny_model.save(folder / "model", seed, **shape)
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


def overrides(arm: str, gpus: int, steps: int, seed: int, folder: Path) -> list[str]:
    """Of the example's configuration, as hydra reads them."""
    actor, sglang = "actor_rollout_ref.actor", f"{ROLLOUT}.engine_kwargs.sglang"
    return [
        *ARMS[arm],
        f"hydra.run.dir={folder}/hydra",
        f"data.train_files={folder}/prompts.parquet",
        f"data.val_files={folder}/prompts.parquet",
        f"data.seed={seed}",
        f"data.train_batch_size={PROMPTS}",
        f"data.max_prompt_length={TOKENS}",
        f"data.max_response_length={TOKENS}",
        "data.dataloader_num_workers=0",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        f"reward.custom_reward_function.name={even.__name__}",
        "reward.num_workers=1",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.model.external_lib=benchmarks.frameworks.verl_memory",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"{actor}.optim.lr={LEARNING_RATE}",
        f"{actor}.ppo_mini_batch_size={PROMPTS}",
        f"{actor}.ppo_micro_batch_size_per_gpu=64",
        # compiling would take longer than the run
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{ROLLOUT}.n={COMPLETIONS}",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=64",
        f"{ROLLOUT}.tensor_model_parallel_size={gpus}",
        # runs may share a GPU
        f"{ROLLOUT}.gpu_memory_utilization=0.2",
        f"{ROLLOUT}.max_num_seqs=64",
        f"{ROLLOUT}.agent.num_workers=2",
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes={BUCKET_MIB}",
        f"+{sglang}.cuda_graph_max_bs_decode=64",
        f"+{sglang}.cuda_graph_backend_prefill=disabled",
        f"+{sglang}.grammar_backend=none",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"trainer.n_gpus_per_node={gpus}",
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
        f"+ray_kwargs.ray_init.num_gpus={gpus}",
        "ray_kwargs.ray_init.num_cpus=16",
    ]


def train(
    stock: bool, folder: Path, arguments: list[str], limit_s: float, more: Mapping[str, str]
) -> str | None:
    """Run verl's trainer; what it raised, if it failed. Logs stay in ``folder``.

    Args:
        stock: whether verl and SGLang are to load no plugin.
        more: variables of its environment.
    """
    environ = engine_environment(
        stock,
        {
            "VERL_USE_EXTERNAL_PLUGINS": "none" if stock else OURS,
            "VERL_FILE_LOGGER_PATH": str(folder / verl_log.METRICS),
            verl_log.MEMORY_VARIABLE: str(folder / verl_log.MEMORY),
            "FP8RL_BUCKET_BYTES": f"{BUCKET_MIB}MiB",
            "HF_HUB_OFFLINE": "1",
            "HYDRA_FULL_ERROR": "1",
            "RAY_COLOR_PREFIX": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray ends workers by what the machine has now, and a virtual one grows as it is used
            "RAY_memory_monitor_refresh_ms": "0",
            **more,
        },
    )
    example = ROOT / "examples" / "verl"
    words = [sys.executable, "-m", "verl.trainer.main_ppo"]
    words += [f"--config-path={example}", "--config-name=fp8rl", *arguments]
    log = folder / verl_log.OUTPUT
    with log.open("wb") as out:
        try:
            subprocess.run(words, stdout=out, stderr=out, env=environ, timeout=limit_s, check=True)
            return None
        except subprocess.TimeoutExpired:
            how = f"did not end within {limit_s:.0f} s"
        except subprocess.CalledProcessError as error:
            how = f"exit status {error.returncode}"
    text = log.read_text(errors="replace")
    end = "\n".join(text.splitlines()[-LOG_LINES:])
    return f"{how}: {exception_in(text) or 'its log names no exception'}\n{end}"


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--gpus", type=int, default=1, help="trainer ranks, and TP of the engine")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=480.0, help="seconds for the run")
    parser.add_argument("--logs", type=Path, help="folder for verl's and Ray's logs")
    offload = "actor_rollout_ref.actor.fsdp_config.param_offload=True"
    parser.add_argument("more", nargs="*", help=f"more overrides of verl's, such as {offload}")
    options = parser.parse_args()
    run = {"arm": options.arm, "gpus": options.gpus, "seed": options.seed}
    flags = [f"--{name} {value}" for name, value in {**run, "steps": options.steps}.items()]
    how = " ".join(["python -m benchmarks.frameworks.verl_trainer", *flags, *options.more])
    # a short path: Ray's sockets are in it
    folder = Path(tempfile.mkdtemp(prefix="verl", dir="/tmp"))
    try:
        prepare(folder, options.seed, PROMPTS * options.steps, SHAPE)
        arguments = overrides(**run, steps=options.steps, folder=folder) + options.more
        failure = train(options.arm != OURS, folder, arguments, options.limit, {})
        nvls = os.environ.get("NCCL_NVLS_ENABLE")
        rows = [
            command.environment_row(how, PACKAGES, nccl_nvls=nvls, bucket_bytes=BUCKET_MIB << 20),
            *verl_log.rows(folder, run, failure),
        ]
        command.write(options.log, rows)
        print(verl_log.summary(rows))
    finally:
        if options.logs is not None:
            verl_log.keep(folder, options.logs)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
