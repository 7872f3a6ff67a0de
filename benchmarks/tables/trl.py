"""What ``python -m benchmarks.frameworks.trl_parity`` found."""

from benchmarks.environment import ROOT
from benchmarks.parity.comparison import compare
from benchmarks.tables import learning
from benchmarks.tables.learning import Row

MARGIN, ALPHA = 0.1, 0.05
PICTURE = ROOT / "docs" / "trl.png"


def judge(rows: list[Row]) -> Row:
    """What was asked and predicted, of all steps."""
    means = learning.mean_rewards(rows)
    result = compare(means["fp8"], means["bf16"], MARGIN, ALPHA)
    return {
        "mean_reward": means,
        "difference": result.mean,
        "interval": result.interval,
        "p_tost": result.p_tost,
        "equivalent": result.p_tost is not None and result.p_tost < ALPHA,
        "first_reward": learning.reward_of(rows, 0),
        "last_reward": learning.reward_of(rows, -1),
        "steps_with_an_alarm": sum(row["alarms"] > 0 for row in rows),
        "versions_are_steps": all(row["policy_version"] == row["step"] for row in rows),
    }


def table(rows: list[Row]) -> str:
    """Of results/trl.jsonl."""
    environment, *steps = rows
    verdict = judge(steps)
    low, high = verdict["interval"]
    names = ("sglang", "torch", "transformers", "trl", "accelerate")
    return (
        f"{learning.table(steps)}\n\n"
        f"Mean reward of all steps, FP8 less BF16: {verdict['difference']:+.3f} (90% interval "
        f"{low:+.3f} to {high:+.3f}), {'' if verdict['equivalent'] else 'not '}equivalent within "
        f"{MARGIN} (TOST, p = {verdict['p_tost']:.1g}). Steps with an alarm: "
        f"{verdict['steps_with_an_alarm']} of {len(steps)}. {learning.where(environment, *names)}"
    )
