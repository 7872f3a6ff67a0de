"""What ``python -m benchmarks.frameworks.verl_trainer`` found: verdict and table."""

from statistics import fmean, median

from benchmarks.tables.learning import Row, of, where
from benchmarks.tables.markdown import grid

MARGIN = 0.1
OURS, REFERENCE = "fp8rl", "bf16"
MIB = 1 << 20
NAMES = {
    "bf16": "BF16 (stock verl)",
    "fp8rl": "FP8 weights and KV cache (fp8rl)",
    "stock-fp8": "FP8 weights (stock verl)",
}
Run = tuple[str, int, int]
"""Arm, GPUs and seed."""


def judge(rows: list[Row]) -> Row:
    """What was asked and predicted, of all runs that ended."""
    failed = {_run(row): row["error"] for row in rows if row["kind"] == "failure"}
    steps = {run: mine for run, mine in _by_run(rows, "step").items() if run not in failed}
    updates = _by_run(rows, "memory")
    rewards = {run: fmean(of(mine, "reward")) for run, mine in steps.items()}
    return {
        "failed": failed,
        "mean_reward": rewards,
        "differences": {
            run: rewards[run] - rewards[pair]
            for run in rewards
            if run[0] == OURS and (pair := (REFERENCE, *run[1:])) in rewards
        },
        "first_reward": {run: mine[0]["reward"] for run, mine in steps.items()},
        "last_reward": {run: mine[-1]["reward"] for run, mine in steps.items()},
        "of_the_last_policy": {
            run: all(staleness == 0 for staleness in of(mine, "staleness"))
            for run, mine in steps.items()
        },
        "memory": {run: memory(updates[run]) for run in steps if run in updates},
    }


def memory(updates: list[Row]) -> tuple[int, int]:
    """Bytes that updates take beyond engine and trainer, the most of the GPUs.

    Args:
        updates: of one run.

    Returns:
        what the first update leaves on the device, and the most that a later one takes besides.
    """
    first = min(row["step"] for row in updates)
    kept = max(row["before"] - row["after"] for row in updates if row["step"] == first)
    later = [row["before"] - row["least"] for row in updates if row["step"] != first]
    return kept, max(later, default=0)


def table(lines: list[Row]) -> str:
    """Of results/verl.jsonl, several logs one after the other."""
    environments = [line for line in lines if line["kind"] == "environment"]
    verdict = judge(lines)
    cells = []
    for run, mine in _by_run(lines, "step").items():
        arm, gpus, seed = run
        if run in verdict["failed"]:
            continue
        kept, later = verdict["memory"].get(run, (None, None))
        cells.append(
            [
                NAMES[arm],
                str(gpus),
                str(seed),
                f"{verdict['mean_reward'][run]:.3f}",
                f"{mine[0]['reward']:.2f} to {mine[-1]['reward']:.2f}",
                f"{fmean(of(mine, 'mismatch_kl_k3')):.1e}",
                f"{median(of(mine, 'step_s')):.2f} s",
                f"{1e3 * median(of(mine, 'update_weights_s')):.0f} ms",
                "" if kept is None else f"{kept / MIB:.0f} + {later / MIB:.0f} MiB",
            ]
        )
    head = ["rollouts", "GPUs", "seed", "mean reward", "first to last", "mismatch KL", "step"]
    return "\n\n".join(
        [
            grid([*head, "its update", "memory"], cells),
            *(
                f"{NAMES[arm]}, {gpus} GPUs, failed: `{error.partition(chr(10))[0]}`"
                for (arm, gpus, _), error in verdict["failed"].items()
            ),
            _verdict(verdict, environments),
        ]
    )


def _verdict(verdict: Row, environments: list[Row]) -> str:
    first, *others = environments
    differences = ", ".join(f"{value:+.3f}" for value in verdict["differences"].values())
    within = all(abs(value) <= MARGIN for value in verdict["differences"].values())
    names = ("sglang", "verl", "torch", "transformers", "ray")
    elsewhere = dict.fromkeys(
        f"{each['count']} GPUs: {each['device']}, {each['date']}, commit {each['commit']}."
        for each in others
        if each["commit"] != first["commit"]
    )
    return (
        f"Mean reward, FP8 less BF16, in each pair of runs: {differences}; "
        f"{'all' if within else 'not all'} within {MARGIN}. Buckets of "
        f"{first['bucket_bytes'] / MIB:.0f} MiB. {' '.join([where(first, *names), *elsewhere])}"
    )


def _run(row: Row) -> Run:
    return row["arm"], row["gpus"], row["seed"]


def _by_run(rows: list[Row], kind: str) -> dict[Run, list[Row]]:
    found: dict[Run, list[Row]] = {}
    for row in rows:
        if row["kind"] == kind:
            found.setdefault(_run(row), []).append(row)
    return found
