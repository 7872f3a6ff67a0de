"""Problems of a step, responses of an engine, their rewards."""

import random
from collections import defaultdict
from statistics import fmean
from typing import Any

from benchmarks.parity import tasks
from benchmarks.parity.settings import SAMPLING
from examples.grpo import arithmetic
from trainer_bridge import Rollout, rollout


def problems_of(count: int, seed: str, held_out: bool = False) -> list[tasks.Problem]:
    """The same ones for the same seed."""
    rng = random.Random(seed)
    return [tasks.make_problem(rng, held_out) for _ in range(count)]


def respond(engine: Any, problems: list[tasks.Problem], version: int, n: int = 1) -> Rollout:
    """``n`` responses to each problem, by policy ``version``."""
    prompts = [arithmetic.encode(problem.prompt) for problem in problems]
    return rollout(engine, prompts, {**SAMPLING, "n": n}, expected_version=version)


def rewards_of(problems: list[tasks.Problem], batch: Rollout) -> list[float]:
    """Reward of each response; those to one problem stand side by side."""
    n = len(batch.tokens) // len(problems)
    repeated = [problem for problem in problems for _ in range(n)]
    return [
        tasks.reward(problem, arithmetic.decode(tokens))
        for problem, tokens in zip(repeated, batch.tokens, strict=True)
    ]


def shape_of(batch: Rollout) -> dict[str, float]:
    """How long responses are, how many did not end, and the policy's entropy, nats a token.

    The entropy is the mean of -logprob over what was sampled, whose expectation it is.
    """
    logprobs = [value for row in batch.logprobs for value in row]
    return {
        "response_tokens": fmean(map(len, batch.tokens)),
        "unfinished": fmean(reason == "length" for reason in batch.finish_reasons),
        "entropy": -fmean(logprobs),
    }


def evaluate(engine: Any, count: int, version: int) -> dict[str, Any]:
    """Mean reward of one response to each of ``count`` held-out problems, in all and by kind.

    The problems are the same for every run and every step.
    """
    problems = problems_of(count, "evaluation", held_out=True)
    batch = respond(engine, problems, version)
    rewards = rewards_of(problems, batch)
    groups: dict[str, list[float]] = defaultdict(list)
    for problem, reward in zip(problems, rewards, strict=True):
        groups[f"{problem.kind} {problem.level}"].append(reward)
    by_kind = {name: round(fmean(found), 4) for name, found in sorted(groups.items())}
    return {"reward": fmean(rewards), **shape_of(batch), "by_kind": by_kind}
