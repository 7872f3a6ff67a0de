"""The tables of docs/demo.md, from what ``python -m examples.grpo`` logged."""

from collections import defaultdict
from statistics import fmean, median
from typing import Any

Row = dict[str, Any]


def on_cpu(rows: list[Row]) -> str:
    """Of results/grpo.jsonl."""
    e, table = _table(rows)
    return (
        f"{table}\n\n`make demo`, {e['parameters'] / 1e6:.1f} M parameters, two CPU cores, "
        f"{_versions(e)}, {e['date'][:10]}. KL and ESS are means over {e['steps']} steps, times "
        f"are medians. On a CPU FP8 arithmetic is emulated, so FP8 is slower there, not faster."
    )


def on_gpu(rows: list[Row]) -> str:
    """Of results/grpo_gpu.jsonl."""
    e, table = _table(rows)
    arms = _arms(rows)
    later = [step for steps in arms.values() for step in steps[1:]]
    mapped = min(step["mapped_bytes"] / step["update_bytes"] for step in later)
    rates = {arm: median(step["tokens_per_s"] for step in steps) for arm, steps in arms.items()}
    slower = " At this size FP8 rollouts are slower than BF16 ones."
    return (
        f"{table}\n\n`python -m examples.grpo`, trainer and engine on the same device: Qwen3 with "
        f"{e['parameters'] / 1e6:.1f} M parameters, {e['ranks']} FSDP2 rank on {e['device']}, "
        f"{_versions(e)}, {e['date'][:10]}. From the second update on the engine reads "
        f"{mapped:.0%} in the trainer's own memory. KL and ESS are means over {e['steps']} steps, "
        f"times are medians.{slower if rates['fp8'] < rates['bf16'] else ''}"
    )


BLOCKS = {"grpo": ("grpo.jsonl", on_cpu), "grpo_gpu": ("grpo_gpu.jsonl", on_gpu)}
"""The file that each block of docs/demo.md is made from, and how."""


def _table(rows: list[Row]) -> tuple[Row, str]:
    """The environment, and a line an arm."""
    rewards = {row["arm"]: row for row in rows if row["kind"] == "evaluation"}
    lines = [
        "| rollouts | reward before | after | mismatch KL (k3, nats) | ESS | update | rollout |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, steps in _arms(rows).items():
        update_ms = 1e3 * median(step["update_s"] for step in steps)
        cells = [
            arm.upper(),
            f"{rewards[arm]['before']:.2f}",
            f"{rewards[arm]['after']:.2f}",
            f"{fmean(step['mismatch_kl_k3'] for step in steps):.1e}",
            f"{fmean(step['ess'] for step in steps):.4f}",
            f"{update_ms:.{0 if update_ms >= 10 else 1}f} ms",
            f"{median(step['tokens_per_s'] for step in steps):.0f} tokens/s",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return rows[0], "\n".join(lines)


def _arms(rows: list[Row]) -> dict[str, list[Row]]:
    """Steps of each arm."""
    arms: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "step":
            arms[row["arm"]].append(row)
    return arms


def _versions(environment: Row) -> str:
    return ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
