"""What the demo shows: live lines, a JSONL of everything, a table and a PNG at the end."""

import json
import os
import platform
from datetime import datetime, timezone
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

Row = dict[str, Any]

CPU = "CPU"  # the name of a device that is no GPU
COLOURS = {"fp8": "tab:orange", "bf16": "tab:blue"}
WINDOW = 10  # steps of the running mean that is drawn over the single steps
PRETRAINING_LINE_EVERY = 25  # steps


class Log:
    """Rows of kind environment, pretraining, engine, evaluation, step: kept, written, printed."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows: list[Row] = []
        self._file = path.open("w")

    def add(self, kind: str, **values: Any) -> None:
        """Take one row, and print its line if it has one."""
        row = {"kind": kind, **values}
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if line := live_line(row):
            print(line, flush=True)


def environment(parameters: int, device: str, options: Row) -> Row:
    """What the run depends on."""
    packages = ["sgl-fp8rl", "sglang", "torch", "transformers"]
    if device != CPU and find_spec("flashinfer"):
        packages.append("flashinfer-python")
    return {
        "device": device,
        "versions": {name: version(name) for name in packages}
        | {"python": platform.python_version()},
        "parameters": parameters,
        "cores": len(os.sched_getaffinity(0)),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **options,
    }


def live_line(row: Row) -> str | None:
    """The line of one row, or None for one that passes silently."""
    match row["kind"]:
        case "environment":
            versions = ", ".join(f"{name} {v}" for name, v in row["versions"].items())
            return f"{model_and_device(row)}; {versions}"
        case "pretraining" if row["step"] % PRETRAINING_LINE_EVERY == 0:
            return f"demonstrations  step {row['step']:3d}  loss {row['loss']:.3f} nats a token"
        case "engine":
            fp8 = sum(layer["format"] == "fp8" for layer in row["layers"])
            return f"{row['arm']:4s}  {fp8} of {len(row['layers'])} matrices in FP8"
        case "evaluation":
            return f"{row['arm']:4s}  {row['when']} GRPO: reward {row['reward']:.2f}"
        case "step":
            return (
                f"{row['arm']:4s}  step {row['step']:3d}  reward {row['reward']:.2f}"
                f"  mismatch KL {row['mismatch_kl_k3']:.1e}  ESS {row['ess']:.4f}"
                f"  update {milliseconds(row['update_s'])} ms, {way(mapped(row))}"
                f"  {row['tokens_per_s']:.0f} tokens/s  step {row['step_s']:.1f} s"
            )
    return None


def model_and_device(environment: Row) -> str:
    """Such as ``Qwen3 with 1.2 M parameters, 2 FSDP2 ranks on CPU``."""
    ranks = f"{environment['ranks']} FSDP2 rank{'s' if environment['ranks'] > 1 else ''}"
    millions = environment["parameters"] / 1e6
    return f"Qwen3 with {millions:.1f} M parameters, {ranks} on {environment['device']}"


def milliseconds(seconds: float) -> str:
    """Whole ones from 10."""
    return f"{1e3 * seconds:.{0 if seconds >= 0.01 else 1}f}"


def way(mapped: float) -> str:
    """How the weights came."""
    return f"{mapped:.0%} mapped" if mapped else "bucket"


def mapped(step: Row) -> float:
    """The part of an update that the engine read in place; the rest went through the bucket."""
    # the oldest result files lack it: there was only the bucket
    return float(step.get("mapped_bytes", 0) / step["update_bytes"])


def summaries(rows: list[Row]) -> list[Row]:
    """One row an arm: rewards of the evaluations, means of the mismatch, medians of the timings."""
    steps = [row for row in rows if row["kind"] == "step"]
    reward = {(r["arm"], r["when"]): r["reward"] for r in rows if r["kind"] == "evaluation"}
    result = []
    for arm in dict.fromkeys(row["arm"] for row in steps):
        mine = [row for row in steps if row["arm"] == arm]
        result.append(
            {
                "arm": arm,
                "before": reward[arm, "before"],
                "after": reward[arm, "after"],
                "mismatch_kl_k3": fmean(row["mismatch_kl_k3"] for row in mine),
                "ess": fmean(row["ess"] for row in mine),
                "update_s": median(row["update_s"] for row in mine),
                "mapped": median(mapped(row) for row in mine),
                "tokens_per_s": median(row["tokens_per_s"] for row in mine),
                "step_s": median(row["step_s"] for row in mine),
            }
        )
    return result


def table(rows: list[Row]) -> str:
    """The closing table as plain text."""
    lines = [
        "arm   reward  reward  mismatch KL     ESS  update  weights came  rollout     step",
        "      before   after       (nats)             (ms)                (tokens/s)   (s)",
    ]
    for s in summaries(rows):
        lines.append(
            f"{s['arm']:4s}  {s['before']:6.2f}  {s['after']:6.2f}  {s['mismatch_kl_k3']:11.1e}"
            f"  {s['ess']:.4f}  {milliseconds(s['update_s']):>6s}  {way(s['mapped']):>12s}"
            f"  {s['tokens_per_s']:10.0f}  {s['step_s']:4.1f}"
        )
    lines += [
        f"{model_and_device(rows[0])}, beside the engine.",
        "KL (k3, rollout || trainer) and ESS: means over the steps. Timings: medians.",
        "Mapped: read by the engine where the trainer keeps it; the rest came through the bucket.",
    ]
    return "\n".join(lines)


def draw(rows: list[Row], path: Path) -> None:
    """Reward and mismatch KL over steps, both arms, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {"reward": "reward", "mismatch_kl_k3": "mismatch KL (k3, nats a token)"}
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for axis, (metric, label) in zip(axes, panels.items(), strict=True):
        for arm, colour in COLOURS.items():
            mine = [row for row in rows if row["kind"] == "step" and row["arm"] == arm]
            steps, values = [row["step"] for row in mine], [row[metric] for row in mine]
            smooth = [fmean(values[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(values))]
            axis.plot(steps, values, ".", color=colour, alpha=0.35)
            axis.plot(steps, smooth, color=colour, linewidth=2, label=arm.upper() + " rollouts")
        axis.set_xlabel("GRPO step")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylim(0, 1)
    axes[0].legend(loc="lower right")
    axes[1].set_yscale("log")
    first = rows[0]
    versions = ", ".join(f"{name} {v}" for name, v in first["versions"].items())
    figure.suptitle(
        f"GRPO with FP8 and BF16 rollouts: {model_and_device(first)}"
        f"\n{versions}\ndots: steps, lines: mean of the last {WINDOW}",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
