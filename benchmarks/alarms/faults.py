"""Faults that are planted in rollouts, and which alarms fire; healthy rollouts must stay silent.

On the CPU: two small policies, for each a healthy or a faulty engine that samples from itself. A
policy is trained once for each commit, and kept in --work.
"""

import random
from pathlib import Path

import torch

from benchmarks.alarms import arms as alarm_arms
from benchmarks.alarms import tasks as alarm_tasks
from benchmarks.alarms.tasks import Policy, Task
from benchmarks.benchmark import Benchmark, Job, Measurement, Option, Run
from benchmarks.environment import commit
from benchmarks.tables.alarms import FIRED
from trainer_bridge.metrics import check_alarms

SEQUENCES = {"sums": 512, "text": 64}  # of a batch: about 5000 tokens each
BATCHES = 4
SHOWN = (
    "mismatch_kl_k3",
    "token_mult_prob_error",
    "ess",
    "ratio_mean",
    "logprob_abs_diff_mean",
    "rollout_nll",
    "chi2_token",
    "tokens",
)


def measure(task: Task, run: Run) -> list[Measurement]:
    """The metrics of each arm, and which alarms fired."""
    torch.set_num_threads(1)
    work = Path(run.options["work"]) / commit()
    work.mkdir(parents=True, exist_ok=True)
    policy = trained(task, work / f"{task.name}.pt")
    return [
        measurement(task, state, arm.name, batches(policy, arm))
        for state, arms in alarm_arms.STATES.items()
        for arm in arms
    ]


def trained(task: Task, kept: Path) -> Policy:
    """The policy with its history, from ``kept`` if it is there."""
    policy = Policy(task, alarm_tasks.build(task))
    if kept.exists():
        saved = torch.load(kept)
        policy.history, policy.rewards = saved["history"], saved["rewards"]
        return policy
    for step, loss in enumerate(alarm_tasks.teach(task, policy.model, task.steps)):
        if step % 50 == 0:
            print(f"{task.name}: demonstration step {step}, loss {loss:.3f}", flush=True)
    alarm_tasks.reinforce(policy, alarm_tasks.RL_STEPS)
    torch.save({"history": policy.history, "rewards": policy.rewards}, kept)
    return policy


def batches(policy: Policy, arm: alarm_arms.Arm) -> list[dict[str, float]]:
    """The metrics of each batch."""
    task = policy.task
    return [
        alarm_arms.roll_out(
            policy,
            arm,
            task.prompts(random.Random(f"batch {batch}"), SEQUENCES[task.name]),
            torch.Generator().manual_seed(batch),
        ).metrics
        for batch in range(BATCHES)
    ]


def measurement(task: Task, state: str, arm: str, found: list[dict[str, float]]) -> Measurement:
    """Metrics of one arm, batch by batch, and how often each alarm fired."""
    values = {metric: [metrics[metric] for metrics in found] for metric in SHOWN}
    values["kl_of_entropy"] = [m["mismatch_kl_k3"] / m["rollout_nll"] for m in found]
    values["ratio_sigmas"] = [
        (m["ratio_mean"] - 1) / ((m["chi2_token"] + 1 - m["ratio_mean"] ** 2) / m["tokens"]) ** 0.5
        for m in found
    ]
    names = [alarm.metric for metrics in found for alarm in check_alarms(metrics)]
    values |= {f"{FIRED}{name}": [names.count(name)] for name in sorted(set(names))}
    return {"arm": arm, "model": task.name, "case": state, "values": values}


BENCHMARK = Benchmark(
    jobs=tuple(Job(task.name, task) for task in alarm_tasks.TASKS.values()),
    measure=measure,
    limit_s=7200.0,
    options=(Option("work", "folder of policies", Path("runs/alarms"), Path, in_command=False),),
    gpu="unused",
)
