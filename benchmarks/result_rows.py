"""Result files: reports of arms become rows of medians, spreads and ratios."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import traffic
from benchmarks.models import Parameter

Report = dict[str, Any]
Row = dict[str, Any]

UNITS = {
    "update_wall_ms": "ms",
    "update_gpu_ms": "ms",
    "update_floor_ms": "ms",
    "update_gb_s": "GB/s",
    "quantize_tb_s": "TB/s",
    "quantize_copy_fraction": "1",
    "copy_tb_s": "TB/s",
    "peak_extra_gib": "GiB",
    "correction_ms": "ms",
    "correction_launches": "1",
    "start_s": "s",
    "import_s": "s",
    "deep_gemm_s": "s",
    "kernels_compiled": "1",
    "kernels_compiled_after_start": "1",
    "kv_error": "1",
    "kv_error_max": "1",
    "attention_us": "us",
    "attention_floor_us": "us",
    "kernel_us": "us",
    "kernel_floor_us": "us",
    "kv_tokens": "1",
    "kv_tokens_floor": "1",
    "prefill_s": "s",
    "rollout_s": "s",
    "rollout_tokens_s": "tokens/s",
    "retractions": "1",
    "retracted_requests": "1",
    "running_requests": "1",
    "kv_used": "1",
    "kv_demand": "1",
    "logprob_error": "nats",
    "logprob_error_decode": "nats",
    "mismatch_kl_k3": "nats",
    "logprob_abs_diff_mean": "nats",
    "token_mult_prob_error": "1",
    "ess": "1",
    "ratio_mean": "1",
    "ratio_sigmas": "1",
    "kl_of_entropy": "1",
    "rollout_nll": "nats",
    "chi2_token": "1",
    "tokens": "1",
    "mismatch_kl_k1": "nats",
    "mismatch_ess": "1",
    "bf16_layers": "1",
    "precision_kl": "nats",
    "precision_step_bytes": "1",
}
LOWER_IS_BETTER = {
    "update_wall_ms",
    "update_gpu_ms",
    "peak_extra_gib",
    "correction_ms",
    "start_s",
    "kv_error",
    "kv_error_max",
    "attention_us",
    "kernel_us",
    "decode_step_ms",
    "prefill_s",
    "rollout_s",
    "logprob_error",
    "logprob_error_decode",
    "mismatch_kl_k3",
}
HIGHER_IS_BETTER = {"update_gb_s", "quantize_tb_s", "kv_tokens", "rollout_tokens_s"}
NEARLY_ALL = 0.99  # of the payload, so that the kernels hardly wait for the trainer's copies
# Facts of a measured arm that its first row carries, each where its benchmark has it.
FACTS = ("logprob_changed", "policy_version", "mapped_share", "layers", "alarms")


def label(row: Row) -> str:
    """How ratios name an arm."""
    return f"{row['arm']}, {row['case']}"


def rows_of(reports: list[Report]) -> list[Row]:
    """All rows of one run, with ratios between arms that updated the same parameters."""
    rows = [row for report in reports for row in _rows(report)]
    parameters = {(r["model"], label(r)): r.get("parameters") for r in reports}
    for row in rows:
        mine = parameters[row["model"], label(row)]
        row["ratios"] = {
            label(other): _ratio(row, other)
            for other in rows
            if other is not row
            and (other["model"], other["metric"]) == (row["model"], row["metric"])
            and parameters[other["model"], label(other)] == mine
            and _comparable(row, other)
        }
    return rows


def compared(rows: list[Row]) -> list[Row]:
    """The same rows, with ratios between the arms of one model and case."""
    for row in rows:
        row["ratios"] = {
            label(other): _ratio(row, other)
            for other in rows
            if other is not row
            and all(other[key] == row[key] for key in ("model", "case", "metric"))
            and _comparable(row, other)
        }
    return rows


def measured(
    times_ms: list[float], gpu_ms: list[float], parameters: list[Parameter], report: Report
) -> dict[str, list[float]]:
    """The values of each metric from one arm's measured updates.

    Args:
        times_ms: wall time of each update.
        gpu_ms: time of the engine's kernels in each, or empty where the arm does not tell.
        parameters: what was updated.
        report: its ``source``, ``moved_bytes`` (see ``traffic.update_traffic``), ``mapped_share``
            and ``copy_tb_s``.
    """
    copy_tb_s = report["copy_tb_s"]
    moved = report["moved_bytes"]
    payload = traffic.bf16_bytes(parameters)
    values = {
        "update_wall_ms": times_ms,
        "update_gb_s": [payload / ms / 1e6 for ms in times_ms],
        "update_floor_ms": [traffic.floor_ms(moved, copy_tb_s)],
        "copy_tb_s": [copy_tb_s],
    }
    if gpu_ms:
        values["update_gpu_ms"] = gpu_ms
    if gpu_ms and report["source"] == "bf16" and report["mapped_share"] > NEARLY_ALL:
        rates = [moved / ms / 1e9 for ms in gpu_ms]
        values["quantize_tb_s"] = rates
        values["quantize_copy_fraction"] = [rate / copy_tb_s for rate in rates]
    return values


def save(path: Path, environment: dict[str, Any], rows: list[Row], kept: list[Row]) -> None:
    """Write a result file."""
    rows = kept + rows
    copies = [row["median"] for row in rows if row["metric"] == "copy_tb_s"]
    copy = {"copy_tb_s": round(median(copies), 3)} if copies else {}
    content = {"benchmark": path.stem, "environment": environment | copy, "rows": rows}
    write(path, content)


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a file whole, so that a run that is cut leaves a readable one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(path)


def line(row: Row) -> str:
    """What is printed of a row."""
    head = f"{row['model']}, {row['case']}: {row['arm']}: {row['metric']}"
    if row["metric"] == "failure":
        return f"{head}: {row['sentence']}"
    return f"{head} {row['median']} {row['unit']} ({row['min']} to {row['max']}, n {row['n']})"


def kept(path: Path, environment: dict[str, Any], models: list[str]) -> list[Row]:
    """Rows of an earlier run for other models, if it ran the same commit on the same machine."""
    return [row for row in earlier(path, environment, "rows") if row["model"] not in models]


def earlier(path: Path, environment: dict[str, Any], key: str) -> list[Row]:
    """What a file holds under ``key``, if its run was of the same commit on the same machine."""
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    same = setting(content["environment"]) == setting(environment)
    return list(content[key]) if same else []


def identity(row: Row) -> tuple[str, ...]:
    """What a file holds once."""
    return tuple(row[key] for key in ("model", "arm", "case", "metric"))


def merged(
    paths: list[Path], key: str, identity: Callable[[Row], tuple[str, ...]]
) -> tuple[dict[str, Any], list[Row]]:
    """Environment of several files of one run, and what they hold under ``key``.

    Raises:
        ValueError: they are of different machines, boots or commits, or hold something twice.
    """
    contents = [json.loads(path.read_text()) for path in paths]
    facts = contents[0]["environment"]
    for path, content in zip(paths, contents, strict=True):
        if setting(content["environment"]) != setting(facts):
            raise ValueError(
                f"{path.name} is of another machine, boot, commit or command than "
                f"{paths[0].name}; merge files of one run"
            )
    every = [row for content in contents for row in content[key]]
    names = Counter(map(identity, every))
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"more than one file has {', '.join(twice[0])}; measure each arm once")
    return facts, every


def setting(environment: dict[str, Any]) -> dict[str, Any]:
    """What figures depend on: not the day, the mean copy, nor which arms ran beside them."""
    facts = {k: v for k, v in environment.items() if k not in ("date", "copy_tb_s")}
    return facts | {"command": re.sub(r" --arms(?: (?!--)\S+)+", "", facts.get("command", ""))}


def _rows(report: Report) -> list[Row]:
    common = {key: report[key] for key in ("arm", "model", "case")}
    if "failure" in report:
        row = {"metric": "failure", "unit": "", "median": None, "min": None, "max": None, "n": 0}
        return [common | row | {"ratios": {}, "sentence": report["failure"]}]
    rows = [common | _summary(metric, values) for metric, values in report["values"].items()]
    rows[0] |= {fact: report[fact] for fact in FACTS if fact in report}
    return rows


def _summary(metric: str, values: list[float]) -> Row:
    spread = {"median": median(values), "min": min(values), "max": max(values)}
    spread = {name: float(f"{value:.5g}") for name, value in spread.items()}
    return {"metric": metric, "unit": UNITS.get(metric, "ms"), **spread, "n": len(values)}


def _comparable(row: Row, other: Row) -> bool:
    better = row["metric"] in LOWER_IS_BETTER | HIGHER_IS_BETTER
    return better and row["median"] > 0 and other["median"] > 0


def _ratio(row: Row, other: Row) -> float:
    mine, others = row["median"], other["median"]
    ratio = others / mine if row["metric"] in LOWER_IS_BETTER else mine / others
    return float(f"{ratio:.4g}")
