"""What is measured of an engine with a mitigation: its formats, its logprobs, its decode step."""

import random
from collections.abc import Sequence
from typing import Any

from benchmarks.engines import serving
from benchmarks.engines.serving import Load
from benchmarks.mitigations import trainer
from server_args import matches
from sgl_fp8rl.sensitivity.groups import Group
from trainer_bridge.metrics import mismatch_metrics

METRICS = {
    "mismatch_kl_k3": "mismatch_kl_k3",
    "mismatch_kl_k1": "mismatch_kl_k1",
    "mismatch_ess": "ess",
    "logprob_error": "logprob_abs_diff_mean",
}
"""Rows, by what ``mismatch_metrics`` calls them."""


def assert_left(engine: Any, groups: list[Group], patterns: Sequence[str]) -> int:
    """How many layers the engine left in BF16.

    Raises:
        RuntimeError: they are not those that the patterns name.
    """
    formats = {x["name"]: x["format"] for x in engine.fp8rl_control({"op": "layers"})["layers"]}
    named = {group.name for group in groups if any(matches(p, group.name) for p in patterns)}
    left = {group.name for group in groups if formats[group.name] == "bf16"}
    if left != named:
        raise RuntimeError(f"the engine left {sorted(left ^ named)} in another format than named")
    return len(left)


def mismatch(
    engine: Any, model: Any, prompts: list[list[int]], new: int, rollouts: int, *, ends: bool
) -> dict[str, list[float]]:
    """Metrics of each rollout against the trainer's logprobs.

    Args:
        new: the most tokens of a response.
        ends: whether a response may end before its last token.
    """
    import trainer_bridge

    # the first prefill: an engine that measures KV scales does so on other tokens
    serving.generate(engine, prompts_like(prompts), 1)
    serving.assert_calibrated(engine)
    sampling = {"temperature": 1.0, "max_new_tokens": new, "ignore_eos": not ends}
    found: dict[str, list[float]] = {name: [] for name in METRICS}
    for number in range(rollouts):
        # read in deterministic inference alone, where all rollouts would be the same otherwise
        seeded = sampling | {"sampling_seed": number}
        rollout = trainer_bridge.rollout(engine, prompts, seeded, expected_version=0)
        trainer_BT = trainer.response_logprobs(model, rollout)
        metrics = mismatch_metrics(trainer_BT, rollout.logprobs_BT, rollout.mask_BT)
        for name, metric in METRICS.items():
            found[name].append(metrics[metric])
    return found


def prompts_like(prompts: list[list[int]]) -> list[list[int]]:
    """Other prompts of the same lengths and tokens: each token is the next one in the list."""
    every = [token for prompt in prompts for token in prompt]
    shifted = iter([*every[1:], every[0]])
    return [[next(shifted) for _ in prompt] for prompt in prompts]


def fitting(load: Load, model: Any) -> Load:
    """The load, cut to the model's context."""
    context = model.config.get_text_config().max_position_embeddings
    length = min(load.length, context // 4)
    return Load(load.batch, length, min(load.new, context // 4))


def timed(engine: Any, load: Load, model: Any) -> list[float]:
    """Milliseconds of a decode step."""
    vocab = model.config.get_text_config().vocab_size
    rng = random.Random(trainer.SEED)
    prompts = [rng.choices(range(vocab), k=load.length) for _ in range(load.batch)]
    return serving.timed_work(engine, prompts, load.new)["decode_step_ms"]
