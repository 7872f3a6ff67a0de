"""What ``python -m benchmarks.frameworks.verl_parity`` found."""

from benchmarks.environment import ROOT
from benchmarks.tables import learning
from benchmarks.tables.learning import Row

MARGIN = 0.1
PICTURE = ROOT / "docs" / "verl.png"


def judge(rows: list[Row]) -> Row:
    """What was asked and predicted, of all steps."""
    means = learning.mean_rewards(rows)
    differences = [a - b for a, b in zip(means["fp8"], means["bf16"], strict=True)]
    return {
        "mean_reward": means,
        "differences": differences,
        "within": all(abs(difference) <= MARGIN for difference in differences),
        "first_reward": learning.reward_of(rows, 0),
        "last_reward": learning.reward_of(rows, -1),
        "stale_steps": sum(row["staleness"] != 0 for row in rows),
    }


def table(rows: list[Row]) -> str:
    """Of results/verl_parity.jsonl."""
    environment, *steps = rows
    verdict = judge(steps)
    differences = ", ".join(f"{value:+.3f}" for value in verdict["differences"])
    names = ("sglang", "verl", "torch", "transformers", "ray")
    return (
        f"{learning.table(steps)}\n\n"
        f"Mean reward of all steps, FP8 less BF16, of each seed: {differences}; "
        f"{'all' if verdict['within'] else 'not all'} within {MARGIN}. Steps with tokens of an "
        f"older policy: {verdict['stale_steps']} of {len(steps)}. "
        f"{learning.where(environment, *names)}"
    )
