"""What all runs of a size have in common. It is fixed before the arms run."""

from dataclasses import dataclass
from typing import Any

from benchmarks.parity import tasks
from examples.grpo.arithmetic import END_TOKEN

MARGIN = 0.05
"""Of reward. Two means that differ by less are called the same; see docs/parity.md."""
ALPHA = 0.05
LAST_STEPS = 20
"""Steps of the end whose mean reward is reported."""
START_SEED = 0
"""Of the model that all runs of a model begin with."""


@dataclass(frozen=True)
class Settings:
    """Of the start and of GRPO."""

    demonstrations: int
    """Steps of training on demonstrations, before GRPO, at most."""
    start_reward: float
    """Of held-out problems; demonstrations end when it is reached."""
    demonstration_batch: int
    demonstration_rate: float
    """Learning rates are of the tiny size; ``tiny_model.learning_rate`` brings them to others."""
    prompts: int
    """Problems of a GRPO step."""
    group: int
    """Responses to each."""
    rate: float
    evaluation_problems: int
    """Held-out problems of an evaluation: of the model while it learns from demonstrations, then by
    the arm's own engine."""
    evaluate_every: int
    checkpoint_every: int
    judged_problems: int
    """Held-out problems that the final weights of every run are judged on, by one BF16 engine."""


SETTINGS = {
    "tiny": Settings(
        demonstrations=300,
        start_reward=0.3,
        demonstration_batch=32,
        demonstration_rate=2e-3,
        prompts=4,
        group=4,
        rate=5e-5,
        evaluation_problems=32,
        evaluate_every=25,
        checkpoint_every=25,
        judged_problems=64,
    ),
    "full": Settings(
        demonstrations=3000,
        start_reward=0.3,
        demonstration_batch=128,
        demonstration_rate=2e-3,
        prompts=16,
        group=8,
        rate=5e-5,
        evaluation_problems=256,
        evaluate_every=25,
        checkpoint_every=50,
        judged_problems=4096,
    ),
}

SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "max_new_tokens": tasks.MAX_NEW_TOKENS,
    "stop_token_ids": [END_TOKEN],
    "no_stop_trim": True,  # the end token belongs to the response
}

ENGINE: dict[str, dict[str, Any]] = {
    "cpu": {"max_total_tokens": 16384},
    # 128 responses take 45000 tokens at most. Others share the GPU: the static part is of what they
    # leave free, and what bounds the cache is its number of tokens.
    "cuda": {
        "max_total_tokens": 49152,
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

JUDGE: dict[str, dict[str, Any]] = {
    "cpu": ENGINE["cpu"],
    # 4096 problems at once, and few engines on a GPU by then
    "cuda": ENGINE["cuda"]
    | {
        "max_total_tokens": 1 << 19,
        "max_running_requests": 1024,
        "cuda_graph_bs_decode": [1, 32, 128, 256, 512, 768, 1024],
    },
}
"""The same of the engine that judges."""
