"""Responses of an engine to problems, and their rewards."""

from collections import defaultdict
from contextlib import AbstractContextManager
from statistics import fmean
from typing import Any

from benchmarks.learning import tasks
from benchmarks.learning.study import PRETRAINED, Arm, Study
from benchmarks.learning.tasks import Problem, Task
from benchmarks.pretrained import chat_task
from examples.grpo.engine import running_engine
from trainer_bridge import Rollout, rollout


def task_of(study: Study) -> Task:
    """What its runs are to learn."""
    if study.size == PRETRAINED:
        return chat_task.task(study.start)
    return tasks.worked_out(study.settings.levels)


def engine_of(study: Study, arm: Arm, seed: int, **keywords: Any) -> AbstractContextManager[Any]:
    """An arm's engine over the weights that runs begin with, shut down at the end.

    Args:
        keywords: more of ``sglang.Engine``.
    """
    return running_engine(
        study.start, arm.ignored_layers, seed, study.engine(arm.engine | keywords)
    )


def respond(
    engine: Any, task: Task, problems: list[Problem], version: int | None, n: int = 1
) -> Rollout:
    """``n`` responses to each problem, by policy ``version``; None: by what the engine has."""
    prompts = [task.encode(problem.prompt) for problem in problems]
    sampling = {
        "temperature": 1.0,
        "max_new_tokens": task.max_new_tokens,
        "stop_token_ids": [task.end_token],
        "no_stop_trim": True,  # the end token belongs to the response
        "n": n,
    }
    return rollout(engine, prompts, sampling, expected_version=version)


def rewards_of(task: Task, problems: list[Problem], batch: Rollout) -> list[float]:
    """Reward of each response; those to one problem stand side by side."""
    n = len(batch.tokens) // len(problems)
    repeated = [problem for problem in problems for _ in range(n)]
    return [
        task.reward(problem, task.decode(tokens))
        for problem, tokens in zip(repeated, batch.tokens, strict=True)
    ]


def shape_of(batch: Rollout) -> dict[str, float]:
    """How long responses are, how many did not end, and the policy's entropy, nats a token.

    The entropy is the mean of -logprob over what was sampled, whose expectation it is.
    """
    return {
        "response_tokens": fmean(map(len, batch.tokens)),
        "unfinished": fmean(reason == "length" for reason in batch.finish_reasons),
        "entropy": -fmean(value for row in batch.logprobs for value in row),
    }


def evaluate(engine: Any, task: Task, count: int, version: int) -> dict[str, Any]:
    """Mean reward of one response to each of ``count`` held-out problems, in all and by kind.

    The problems are the same for every run and every step.
    """
    problems = task.draw(count, "evaluation", held_out=True)
    batch = respond(engine, task, problems, version)
    rewards = rewards_of(task, problems, batch)
    groups: dict[str, list[float]] = defaultdict(list)
    for problem, reward in zip(problems, rewards, strict=True):
        groups[f"{problem.kind} {problem.level}"].append(reward)
    by_kind = {name: round(fmean(found), 4) for name, found in sorted(groups.items())}
    return {"reward": fmean(rewards), **shape_of(batch), "by_kind": by_kind}
