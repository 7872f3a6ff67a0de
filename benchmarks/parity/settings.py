"""What all runs of a study have in common, and the folder that keeps them.

STATE/environment.json      device, versions, commit and settings: the same for every run
STATE/start-MODEL/          the weights that runs of a model begin with, and what a scan of it found
STATE/ARM-SEED/             a run, see run_log.py; under STATE/timing/ a timed one
"""

import argparse
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import commit
from benchmarks.parity import models
from benchmarks.parity.arms import Arm
from benchmarks.parity.dose_arms import STUDIES
from benchmarks.parity.run_log import LOG
from benchmarks.parity.tasks import LEVELS, LONG
from examples.grpo.environment import environment
from sgl_fp8rl.files import write_whole

MARGIN = 0.05
"""Of reward. Two means that differ by less are called the same; see docs/parity.md."""
ALPHA = 0.05
LAST_STEPS = 20
"""Steps of the end whose mean reward is reported."""
TIMING_STEPS = 20
ENVIRONMENT = "environment.json"


@dataclass(frozen=True)
class Settings:
    """Of the start and of GRPO; fixed before the arms run."""

    steps: int = 150
    """GRPO steps."""
    demonstrations: int = 3000
    """Steps of training on demonstrations, before GRPO, at most."""
    demonstrations_every: int = 200
    """Steps of it between evaluations, which take as long as dozens of them."""
    start_reward: float = 0.3
    """Of held-out problems; demonstrations end when it is reached."""
    least_start_reward: float = 0.0
    """A start that solves fewer is refused."""
    demonstration_batch: int = 128
    demonstration_tokens: int = 16384
    """Padded tokens of one pass; demonstrations share the GPU with few others."""
    demonstration_rate: float = 2e-3
    """Learning rates are of the tiny size; ``tiny_model.learning_rate`` brings them to others."""
    prompts: int = 16
    """Problems of a GRPO step."""
    group: int = 8
    """Responses to each."""
    levels: list[int] = field(default_factory=lambda: list(LEVELS))
    """Of problems, in demonstrations, training and evaluations."""
    rate: float = 5e-5
    evaluation_problems: int = 256
    """Held-out problems of an evaluation: of the model while it learns from demonstrations, then by
    the arm's own engine."""
    evaluate_every: int = 25
    checkpoint_every: int = 50
    held_out_problems: int = 4096
    """Held-out problems for the final weights of every run, by a BF16 engine."""
    position_problems: int = 0
    """Of each kind, in each part of ``positions.py``; 0: mismatch is not measured by position."""
    kv_tokens: int = 49152
    """Tokens of an engine's KV cache, on a GPU: 128 responses take 45000 at most. Others share it:
    the static part is of what they leave free."""
    seeds_a_start: int | None = None
    """Seeds that begin with the same weights, the next ones with others; None: all."""
    exponents: list[int] = field(default_factory=list)
    """Of the gains that a scan tries."""
    grows_after: int = 20
    """Steps that a growing dose stays as it is; then it doubles, and again ``doubles_every``."""
    doubles_every: int = 10
    engine_args: dict[str, Any] = field(default_factory=dict)
    """More keywords of every ``sglang.Engine``."""


SIZES = {
    "full": Settings(),
    "tiny": Settings(
        demonstrations=300,
        demonstration_batch=32,
        prompts=4,
        group=4,
        evaluation_problems=32,
        checkpoint_every=25,
        held_out_problems=64,
    ),
    # At 5e-5 a step moved this policy by some 0.03 nats a token.
    models.PRETRAINED: Settings(steps=100, rate=2e-5),
    # A checkpoint has 9 GB, so there is none but at the deadline. The rate is that of the other
    # deep model: a policy moves with width and depth.
    models.LARGE: Settings(
        rate=2e-5,
        kv_tokens=1 << 17,
        checkpoint_every=1000,
        engine_args={"mem_fraction_static": 0.6},
    ),
}
OF_STUDY: dict[str, dict[str, Any]] = {
    "parity": {},
    # fixed by a pilot of BF16, which is to end between 0.3 and 0.7: docs/dose_response.md
    "doses": {
        "steps": 80,
        "start_reward": 0.2,
        "levels": [2, 3],
        "evaluate_every": 40,
        "checkpoint_every": 40,
        "seeds_a_start": 2,
        "exponents": list(range(12, 23)),
    },
    # of the second run: docs/long_responses.md
    "long": {
        "steps": 80,
        "least_start_reward": 0.05,
        "levels": [3, LONG],
        "demonstrations": 700,
        "demonstrations_every": 700,
        "evaluate_every": 40,
        "held_out_problems": 2048,
        "position_problems": 64,
    },
}
"""Settings of a study that differ from those of its size."""

ENGINE: dict[str, dict[str, Any]] = {
    "cpu": {"max_total_tokens": 16384, "sleep_on_idle": True},
    "cuda": {
        "attention_backend": "flashinfer",
        "max_running_requests": 128,
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
    name: str = "parity"
    """One of ``STUDIES``."""

    @property
    def arms(self) -> dict[str, Arm]:
        """Those of the study whose models come in its size."""
        known = models.models_of(self.size)
        return {name: arm for name, arm in STUDIES[self.name].items() if arm.model in known}

    def start_of(self, seed: int) -> int:
        """Which start a seed's runs begin with."""
        return seed // self.settings.seeds_a_start if self.settings.seeds_a_start else 0

    def start_folder(self, model: str, start: int = 0) -> Path:
        """Of the weights that runs of a model begin with."""
        return self.state / f"start-{model}{f'-{start}' if start else ''}"

    def run_folder(self, arm: str, seed: int, is_timed: bool = False) -> Path:
        """Of one run."""
        return (self.state / "timing" if is_timed else self.state) / f"{arm}-{seed}"

    def engine(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """All keywords of an engine, given an arm's."""
        settings = self.settings
        cache = {"max_total_tokens": settings.kv_tokens} if self.device.type == "cuda" else {}
        return ENGINE[self.device.type] | cache | keywords | settings.engine_args


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that all scripts of the study share."""
    size = "full" if torch.cuda.is_available() else "tiny"
    parser.add_argument("--study", choices=STUDIES, default="parity", help="which arms (parity)")
    parser.add_argument("--state", type=Path, default=Path("runs/parity"), help="study's folder")
    parser.add_argument("--size", choices=SIZES, default=size, help=f"of models ({size})")
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
    settings = replace(SIZES[args.size], **OF_STUDY[args.study] | args.settings)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = asdict(settings) | {"size": args.size, "study": args.study}
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
    return Study(args.state, args.size, settings, device, args.study)
