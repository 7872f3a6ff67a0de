"""The figures of ``sgl-fp8rl plan``, and how far they are off: ``python -m benchmarks.plan``.

Predicts rows that were left out of the fit (each load in turn, each arm in turn, the MoE model from
the dense one) and rollouts that nothing was fitted to. ``--write`` stores the figures, from which
``python -m benchmarks.readme`` makes the tables of docs/plan.md.
"""

import argparse
import json
import subprocess
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import long_tail, result_rows
from benchmarks.engines.keywords import FULL
from benchmarks.engines.models import MODELS, config, save_config
from benchmarks.environment import environment
from benchmarks.plan.fit import (
    ARMS,
    CHUNK,
    FITTED,
    RESULTS,
    Row,
    by_load,
    error,
    fit,
    kernels,
    left_out,
    measured_rows,
    predict,
    ranked_first,
    rows,
)
from benchmarks.rollout import LOADS
from benchmarks.tables.plan import accuracy
from sgl_fp8rl.plan import aiconfigurator, schedule, shape, speed, update_time
from sgl_fp8rl.plan.measured import ON_TWO_GPUS, ROLLOUTS
from sgl_fp8rl.plan.workload import Request

AICONFIGURATOR = RESULTS / "aiconfigurator.json"
WITH_FA3 = ("stock-bf16", "stock-block-fp8")
"""Arms whose kernels it models."""
SHARDED = ("sharded", "sharded_four", "sharded_others", "sharded_each")
FIGURES = Path(speed.__file__).with_name("nvidia-h200.json")


def memory_figures() -> dict[str, float]:
    """Bytes free before an engine starts, and what it takes for itself, of measured capacities."""
    idle, own = [], []
    for (name, model), found in sorted(_capacities().items()):
        arm, of = ARMS[name], shape.of(config(MODELS[model]))
        token = of.kv_token_bytes(arm.kv_cache)
        held = of.weight_bytes(arm.fp8)
        idle.append((found["kv_tokens_floor"] * token + held) / FULL["mem_fraction_static"])
        own.append((found["kv_tokens_floor"] - found["kv_tokens"]) * token)
    return {"idle_bytes": fmean(idle), "engine_bytes": fmean(own)}


def _capacities() -> dict[tuple[str, str], dict[str, float]]:
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in measured_rows():
        if row["case"] == "capacity" and row["arm"] in ARMS:
            found.setdefault((row["arm"], row["model"]), {})[row["metric"]] = row["median"]
    return found


def update_figures() -> dict[str, dict[str, float]]:
    """The line through the updates of both models, over the time of a copy of their bytes."""
    measured = {
        (row["model"], row["case"]): row["median"]
        for row in json.loads((RESULTS / "update.json").read_text())["rows"]
        if row["arm"] == "fp8rl" and row["metric"] == "update_wall_ms"
    }
    found = {}
    for way in update_time.WAYS:
        points = [
            (
                update_time.moved_bytes(shape.of(config(of)), way) / speed.H200_BYTES_MS,
                measured[model, f"from BF16, {way}"],
            )
            for model, of in MODELS.items()
        ]
        floors, walls = zip(*points, strict=True)
        share, fixed = np.polyfit(floors, walls, 1)
        found[way] = {"fixed_ms": float(fixed), "share": float(share)}
    return found | {"host": host_figures()}


def host_figures() -> dict[str, float]:
    """What an update from shards on GPUs of the host takes besides the engine's kernels."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for file in SHARDED:
        for row in measured_rows([file]):
            if row["arm"] == "fp8rl":
                place = file, row["model"], row["case"]
                found.setdefault(place, {})[row["metric"]] = row["median"]
    besides = [each["update_wall_ms"] - each["update_gpu_ms"] for each in found.values()]
    return {"least_ms": min(besides), "most_ms": max(besides)}


def rollouts(coefficients: dict[str, float]) -> list[dict[str, Any]]:
    """Figures of the long tail, to which nothing was fitted, predicted and measured."""
    lengths = long_tail.output_lengths(long_tail.REQUESTS)
    # the benchmark asks each for exactly its length
    requests = [Request(long_tail.PROMPT, length, length) for length in lengths]
    seen: dict[str, dict[str, float]] = {}
    for row in json.loads((RESULTS / "long_tail.json").read_text())["rows"]:
        seen.setdefault(row["arm"], {})[row["metric"]] = row["median"]
    found = []
    for name, measured in seen.items():
        engine = schedule.Engine(
            ARMS[name],
            shape.of(config(MODELS["qwen3-8b"])),
            speed.Speed(coefficients, kernels()),
            int(measured["kv_tokens"]),
            CHUNK,
        )
        outcome = schedule.simulate(engine, requests)
        for metric, predicted in (
            ("rollout_s", outcome.seconds),
            ("running_requests", outcome.mean_running),
            ("retractions", float(outcome.retractions)),
        ):
            both = {"predicted": predicted, "measured": measured[metric]}
            found.append({"arm": name, "metric": metric, **both})
    return found


def by_aiconfigurator() -> dict[str, Any]:
    """AIConfigurator's decode steps of the loads and stock arms that were measured."""
    found = []
    for row in rows():
        if row.metric != "decode_step_ms" or row.arm not in WITH_FA3:
            continue
        load = next(each for each in LOADS[row.model] if each.name == row.case)
        with TemporaryDirectory() as folder:
            save_config(MODELS[row.model], Path(folder))
            of = shape.of(config(MODELS[row.model]))
            place = load.batch, round(load.mean_length)
            ms = aiconfigurator.step_ms(Path(folder), "h200", ARMS[row.arm], of, *place)
        print(row.model, row.case, row.arm, ms, flush=True)
        one = {"arm": row.arm, "model": row.model, "case": row.case}
        found.append(one | {"values": {"aiconfigurator_ms": [ms]}})
    facts = environment("python -m benchmarks.plan --aiconfigurator")
    asked = subprocess.run([aiconfigurator.COMMAND, "version"], capture_output=True, text=True)
    version = asked.stdout.split()[-1]
    return {
        "benchmark": "aiconfigurator",
        "environment": facts | {"aiconfigurator": version},
        "failures": {},
        "rows": result_rows.rows_of(found),
    }


def derive() -> dict[str, Any]:
    """All figures, and how far predictions are off."""
    measured = rows()
    decode = [row for row in measured if row.metric == "decode_step_ms"]
    prefill = [row for row in measured if row.metric == "prefill_s"]
    coefficients = fit(decode) | fit(prefill)
    errors = {}
    on_two: dict[str, list[tuple[Row, float]]] = {}
    for what, those in (("decode", decode), ("prefill", prefill)):
        for left, key in (("a load", by_load), ("an arm", _arm)):
            errors[f"{what}, {left} left out"] = _summary(left_out(those, key))
    moe = [row for row in decode if row.model.endswith("a3b")]
    dense = fit(row for row in decode if row not in moe)
    errors["decode, the MoE from the dense model"] = _summary(
        [(row, predict(dense, row)) for row in moe]
    )
    for row in rows(["rollout_two_gpus"], tp=2):
        what = ON_TWO_GPUS.replace("decode", row.metric.partition("_")[0])
        on_two.setdefault(what, []).append((row, predict(coefficients, row)))
    errors |= {what: _summary(predicted) for what, predicted in on_two.items()}
    tail = rollouts(coefficients)
    times = [each for each in tail if each["metric"] == "rollout_s"]
    errors[ROLLOUTS] = _of([abs(each["predicted"] / each["measured"] - 1.0) for each in times])
    environments = [
        json.loads((RESULTS / f"{name}.json").read_text())["environment"] for name in FITTED
    ]
    return {
        "source": f"{environments[0]['device']}, SGLang {environments[0]['sglang']}, "
        + " and ".join(f"{each['date']}, {each['commit']}" for each in environments),
        "coefficients_ms": coefficients,
        "gemm_lines": {stack: list(line) for stack, line in kernels().lines.items()},
        "xqa_shares": {s: [list(pair) for pair in pairs] for s, pairs in kernels().xqa.items()},
        "memory": memory_figures(),
        "update": update_figures(),
        "errors": errors,
        "rollouts": tail,
    }


def _arm(row: Row) -> str:
    return row.arm


def _summary(predicted: list[tuple[Row, float]]) -> dict[str, float]:
    found = _of([abs(error(row, ms)) for row, ms in predicted])
    ours = [abs(error(row, ms)) for row, ms in predicted if row.arm.startswith("fp8rl")]
    first, loads = ranked_first(predicted)
    return found | {"worst of ours": max(ours), "best arm first": first, "loads": loads}


def _of(errors: list[float]) -> dict[str, float]:
    return {"rows": len(errors), "mean": fmean(errors), "worst": max(errors)}


def rounded(value: Any) -> Any:
    """To six digits, so that another machine writes the same file."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--aiconfigurator", action="store_true", help="record its decode steps beside these"
    )
    arguments = parser.parse_args()
    if arguments.aiconfigurator:
        result_rows.write(AICONFIGURATOR, by_aiconfigurator())
        return
    figures = rounded(derive())
    print(accuracy(figures))
    if arguments.write:
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
