"""What runs have in common: model, arms, settings, and the folder that keeps them.

STATE/environment.json      device, versions, commit and settings: the same for every run
STATE/start/                the weights that runs begin with
STATE/ARM-SEED/             a run: its log, checkpoint and weights, see run.py
"""

import argparse
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from benchmarks.environment import commit
from benchmarks.files import write_whole
from benchmarks.learning.tasks import LEVELS, LONG
from examples.grpo import tiny_model
from examples.grpo.environment import environment

CORRECTED, UNCORRECTED = "decoupled_token_is", "disabled"
"""Token TIS, C = 2, as the published FP8 runs have it; and none."""
ALL_BF16 = "re:.*"
"""Pattern of layers that stay BF16: every one."""
# No backend is named: the plugin chooses what serves an FP8 KV cache.
KV8: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3", "attention_backend": None}
REFERENCE, CONTROL = "bf16", "scales-off"
"""What arms are compared with, and what has to lose."""
ENVIRONMENT, LOG = "environment.json", "log.jsonl"


@dataclass(frozen=True)
class Arm:
    """One kind of run: its engine, and what the trainer makes of the engine's mismatch."""

    name: str
    ignored_layers: str = ""
    """Which layers the engine keeps in BF16."""
    engine: dict[str, Any] = field(default_factory=dict)
    """More keywords of ``sglang.Engine``."""
    correction: str = CORRECTED
    """Preset of ``trainer_bridge.correct``."""
    fp8_forward: bool = False
    """Whether the trainer computes with the engine's codes."""
    off: float = 0.0
    """By which factor, up or down, the engine's weights are wrong, block by block."""


ARMS = {
    arm.name: arm
    for arm in (
        Arm(REFERENCE, ALL_BF16),
        Arm("fp8-none", correction=UNCORRECTED),
        Arm("fp8-tis"),
        Arm("fp8-fp8-forward", correction=UNCORRECTED, fp8_forward=True),
        Arm("kv8-none", engine=KV8, correction=UNCORRECTED),
        Arm("kv8-tis", engine=KV8),
        Arm("kv8-fp8-forward", engine=KV8, correction=UNCORRECTED, fp8_forward=True),
        Arm(CONTROL, engine=KV8, off=0.5),
    )
}
DEFAULT_ARMS = (REFERENCE, "kv8-none", "kv8-tis", "kv8-fp8-forward", CONTROL)

PRETRAINED = "smollm2"
"""The size of a published checkpoint (``benchmarks.pretrained``); the others begin from scratch."""
CONTEXT = 1024
"""Positions; the longest prompt with its response takes 785."""
# Four query heads a KV head, as in Qwen3-8B: XQA is compiled for each such number.
SHAPES = {
    "tiny": tiny_model.SIZES["tiny"],
    "full": {**tiny_model.SIZES["small"], "num_key_value_heads": 4},
    "large": {  # as deep as Qwen3-0.6B and Qwen3-1.7B, and between them in width
        "hidden_size": 1536,
        "intermediate_size": 4608,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 3,
        "head_dim": 128,
    },
}


def build(size: str, seed: int) -> PreTrainedModel:
    """A random Qwen3 in FP32. Every FP8 matrix has sides that are multiples of 128."""
    model = tiny_model.build_model(seed, "tiny", other=SHAPES[size])
    model.config.max_position_embeddings = CONTEXT
    return model


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write a BF16 checkpoint as Hugging Face has it."""
    disable_progress_bar()
    model.to(torch.bfloat16).save_pretrained(folder)


def dtype_of(device: torch.device) -> torch.dtype:
    """What a trainer computes in: on CPUs without AVX-512 torch multiplies BF16 by plain loops."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def load(folder: Path, device: torch.device) -> PreTrainedModel:
    """A BF16 checkpoint, as the trainer has it."""
    disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype_of(device)).to(device)


@dataclass(frozen=True)
class Settings:
    """Of the start and of GRPO; fixed before the arms run. Learning rates are of the tiny size;
    ``tiny_model.learning_rate`` brings them to others."""

    start_seed: int = 0  # of random weights and demonstrations
    demonstrations: int = 3000  # steps, at most
    demonstrations_every: int = 200  # steps between evaluations, each as long as dozens of them
    demonstration_batch: int = 128
    start_reward: float = 0.2
    """Of held-out problems; demonstrations end when it is reached. A start that solves less than a
    quarter of it is refused."""
    steps: int = 80  # of GRPO
    prompts: int = 16  # problems of a step
    group: int = 8  # responses to each
    levels: list[int] = field(default_factory=lambda: [2, 3])  # of problems, everywhere
    rate: float = 5e-5
    evaluation_problems: int = 256  # of the start, then by the arm's own engine
    evaluate_every: int = 40
    checkpoint_every: int = 40
    held_out_problems: int = 4096  # for the final weights of every run, by a BF16 engine
    engine_args: dict[str, Any] = field(default_factory=dict)  # more, of every ``sglang.Engine``


SIZES = {
    "tiny": Settings(
        demonstrations=300,
        start_reward=0.0,
        demonstration_batch=32,
        prompts=4,
        group=4,
        levels=list(LEVELS),
        evaluation_problems=32,
        held_out_problems=64,
    ),
    "full": Settings(),  # as in docs/dose_response.md
    # As in docs/long_responses.md. A checkpoint has 9 GB: there is none but at the deadline.
    "large": Settings(
        levels=[3, LONG],
        rate=2e-5,
        demonstrations=700,
        demonstrations_every=700,
        held_out_problems=2048,
        checkpoint_every=1000,
        engine_args={"mem_fraction_static": 0.6},
    ),
    # At 5e-5 a step moved this policy by some 0.03 nats a token.
    PRETRAINED: Settings(steps=100, rate=2e-5),
}
ENGINE: dict[str, dict[str, Any]] = {
    "cpu": {"max_total_tokens": 16384, "sleep_on_idle": True},
    "cuda": {
        "attention_backend": "flashinfer",
        "max_running_requests": 128,
        # Responses of a step take 98,000 at most. Others share the GPU: the static part is of what
        # they leave free.
        "max_total_tokens": 1 << 17,
        "mem_fraction_static": 0.3,
        "fp8rl_bucket_bytes": 256 << 20,
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "cuda_graph_backend_prefill": "disabled",
        "cuda_graph_bs_decode": [1, 8, 16, 32, 64, 96, 128],
    },
}
"""Keywords of ``sglang.Engine`` in every arm, by kind of device."""


@dataclass(frozen=True)
class Study:
    """Runs that differ in arm and seed alone."""

    state: Path
    size: str
    settings: Settings
    device: torch.device

    @property
    def start(self) -> Path:
        """Folder of the weights that runs begin with."""
        return self.state / "start"

    def run_folder(self, arm: str, seed: int) -> Path:
        """Of one run."""
        return self.state / f"{arm}-{seed}"

    def engine(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """All keywords of an engine, given an arm's."""
        return ENGINE[self.device.type] | keywords | self.settings.engine_args


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that all scripts share."""
    size = "full" if torch.cuda.is_available() else "tiny"
    parser.add_argument("--state", type=Path, default=Path("runs/learning"), help="study's folder")
    parser.add_argument("--size", choices=SIZES, default=size, help=f"of the model ({size})")
    parser.add_argument(
        "--settings", type=json.loads, default={}, metavar="JSON", help="settings for a try-out"
    )


def open_study(args: argparse.Namespace) -> Study:
    """The study in ``--state``, which is made if there is none.

    Raises:
        TypeError: ``--settings`` names something unknown.
        ValueError: the folder holds a study of other settings, commit, versions or device. The
            number of steps may change until the first run begins.
    """
    settings = replace(SIZES[args.size], **args.settings)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = asdict(settings) | {"size": args.size}
    facts = environment(device) | {"commit": commit(), "options": options}
    path = args.state / ENVIRONMENT
    before = json.loads(path.read_text()) if path.exists() else {"options": {}}
    ours, theirs = (each | each["options"] for each in (facts, before))
    changed = {name for name in ours if ours[name] != theirs.get(name)} - {"date", "options"}
    if not any(args.state.glob(f"*/{LOG}")):
        changed -= {"steps"}  # a start depends on all settings but this one
    if path.exists() and changed:
        raise ValueError(
            f"{args.state} holds a study with other {', '.join(sorted(changed))}; give the "
            f"same options, or another folder as --state"
        )
    if ours["steps"] != theirs.get("steps"):
        args.state.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(facts))
    return Study(args.state, args.size, settings, device)
