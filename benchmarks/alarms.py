"""Plant faults in rollouts and see which alarms fire; healthy ones must stay silent.

    PYTHONPATH=examples python examples/benchmarks/alarms.py

On the CPU, in an hour on one core: two small policies (alarm_tasks.py), for each a healthy or a
faulty engine (alarm_arms.py) that samples from itself. Policies are kept in --work, and a commit's
metrics in a folder there, so a run that was cut goes on. A policy that an earlier commit trained is
used again, and the figures, which go to results/alarms.json, tell which one did.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import alarm_arms, alarm_tasks, result_rows
from benchmarks.alarm_tasks import Policy
from benchmarks.correction import facts
from benchmarks.environment import commit
from trainer_bridge.metrics import check_alarms

RESULTS = Path(__file__).resolve().parent / "results" / "alarms.json"
COMMAND = "PYTHONPATH=examples python examples/benchmarks/alarms.py"
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


def trained(name: str, work: Path) -> tuple[Policy, str]:
    """The policy with its history, from ``work`` if it is there, and the commit that trained it."""
    task = alarm_tasks.TASKS[name]
    policy, kept = Policy(task, alarm_tasks.build(task)), work / f"{name}.pt"
    if kept.exists():
        saved = torch.load(kept)
        policy.history, policy.rewards = saved["history"], saved["rewards"]
        return policy, saved["commit"]
    trainer = commit()
    for step, loss in enumerate(alarm_tasks.teach(task, policy.model, task.steps)):
        if step % 50 == 0:
            print(f"{name}: demonstration step {step}, loss {loss:.3f}", flush=True)
    alarm_tasks.reinforce(policy, alarm_tasks.RL_STEPS)
    saved = {"history": policy.history, "rewards": policy.rewards, "commit": trainer}
    torch.save(saved, kept)
    return policy, trainer


def measure(name: str, policy: Policy, path: Path) -> dict[str, list[dict[str, float]]]:
    """Of each arm, the metrics of each batch; those that ``path`` has are not measured again."""
    found: dict[str, list[dict[str, float]]] = json.loads(path.read_text()) if path.exists() else {}
    for arm in alarm_arms.ARMS.values():
        if arm.name in found:
            continue
        found[arm.name] = [
            alarm_arms.roll_out(
                policy,
                arm,
                policy.task.prompts(random.Random(f"batch {batch}"), SEQUENCES[name]),
                torch.Generator().manual_seed(batch),
            ).metrics
            for batch in range(BATCHES)
        ]
        result_rows.write(path, found)  # type: ignore[arg-type]
        print(f"{name}: {arm.name}: {fired(found[arm.name])}", flush=True)
    return {arm: found[arm] for arm in alarm_arms.ARMS}


def fired(batches: list[dict[str, float]]) -> dict[str, int]:
    """In how many of the batches a metric has an alarm."""
    names = [alarm.metric for metrics in batches for alarm in check_alarms(metrics)]
    return {name: names.count(name) for name in sorted(set(names))}


def report(name: str, arm: str, batches: list[dict[str, float]]) -> result_rows.Report:
    """One arm's rows; the first tells which alarms fired."""
    values = {metric: [metrics[metric] for metrics in batches] for metric in SHOWN}
    values["kl_of_entropy"] = [m["mismatch_kl_k3"] / m["rollout_nll"] for m in batches]
    values["ratio_sigmas"] = [
        (m["ratio_mean"] - 1) / ((m["chi2_token"] + 1 - m["ratio_mean"] ** 2) / m["tokens"]) ** 0.5
        for m in batches
    ]
    state = next(s for s, arms in alarm_arms.STATES.items() if alarm_arms.ARMS[arm] in arms)
    return {"arm": arm, "model": name, "case": state, "values": values, "alarms": fired(batches)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Alarms on healthy and on faulty rollouts.")
    parser.add_argument("--tasks", nargs="+", choices=SEQUENCES, default=list(SEQUENCES))
    parser.add_argument("--work", type=Path, default=Path("runs/alarms"), help="what is kept")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    environment: dict[str, Any] = facts(COMMAND) | {"policies": {}}
    measured = options.work / environment["commit"]
    measured.mkdir(parents=True, exist_ok=True)
    reports = []
    for name in options.tasks:
        policy, environment["policies"][name] = trained(name, options.work)
        batches = measure(name, policy, measured / f"{name}.json")
        reports += [report(name, arm, each) for arm, each in batches.items()]
    result_rows.save(options.output, environment, result_rows.rows_of(reports), [])
    print(f"{options.output}: {len(reports)} arms", file=sys.stderr)


if __name__ == "__main__":
    main()
