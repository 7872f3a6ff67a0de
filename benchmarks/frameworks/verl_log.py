"""What a run of verl's trainer leaves: its metrics, the memory of its updates, its logs."""

import json
import shutil
from pathlib import Path

from benchmarks.frameworks.command import Row

METRICS, MEMORY, OUTPUT = "metrics.jsonl", "memory.jsonl", "output.log"
MEMORY_VARIABLE = "UPDATE_MEMORY_LOG"
"""Names the file of ``verl_memory``."""
NAMES = {
    "critic/score/mean": "reward",
    "response_length/mean": "tokens",
    "actor/pg_loss": "loss",
    "actor/grad_norm": "grad_norm",
    "rollout_corr/training_log_ppl": "log_ppl",
    "rollout_corr/kl": "mismatch_kl",
    "rollout_corr/k3_kl": "mismatch_kl_k3",
    "rollout_corr/rollout_is_eff_sample_size": "ess",
    "rollout_corr/chi2_seq": "chi2_seq",
    "training/off_policy/trajectory_staleness_worst/max": "staleness",
    "actor/perf/max_memory_allocated_gb": "trainer_peak_gb",
    "timing_s/step": "step_s",
    "timing_s/gen": "gen_s",
    "timing_s/old_log_prob": "old_log_prob_s",
    "timing_s/update_actor": "update_actor_s",
    "timing_s/update_weights": "update_weights_s",
}
"""verl's names of metrics, and ours."""


def rows(folder: Path, run: Row, failure: str | None) -> list[Row]:
    """A row for each step, each update and rank, and for the failure if there is one.

    Args:
        run: what each row says of its run.
    """
    steps = [
        {"kind": "step", **run, "step": line["step"]}
        | {ours: line["data"][name] for name, ours in NAMES.items() if name in line["data"]}
        for line in _lines(folder / METRICS)
    ]
    updates = [{"kind": "memory", **run, **line} for line in _lines(folder / MEMORY)]
    failed = [] if failure is None else [{"kind": "failure", **run, "error": failure}]
    return [*steps, *updates, *failed]


def summary(rows: list[Row]) -> str:
    """A line a step, and what failed, to watch a run."""
    lines = [
        f"step {row['step']}: "
        + ", ".join(f"{name} {row[name]:.4g}" for name in NAMES.values() if name in row)
        for row in rows
        if row["kind"] == "step"
    ]
    return "\n".join([*lines, *(row["error"] for row in rows if row["kind"] == "failure")])


def keep(folder: Path, into: Path) -> None:
    """Copy the trainer's output, its metrics, and Ray's logs of its session."""
    into.mkdir(parents=True, exist_ok=True)
    for name in (METRICS, MEMORY, OUTPUT):
        if (folder / name).exists():
            shutil.copy(folder / name, into)
    for session in (folder / "ray").glob("session_2*"):
        shutil.copytree(session / "logs", into / "ray", dirs_exist_ok=True)


def _lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
