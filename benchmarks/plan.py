"""Fit the figures of ``sgl-fp8rl plan``, with their errors: ``python -m benchmarks.plan``.

The coefficients of each arm are fitted to the five loads of ``rollout_decode.json``. What was not
fitted is predicted: each load from the other ones, a whole rollout, and another model.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks import long_tail
from benchmarks.engines.keywords import ENGINE, FULL
from benchmarks.engines.models import SHAPES, config
from benchmarks.engines.serving import Load
from benchmarks.rollout import LOADS
from benchmarks.run import RESULTS
from sgl_fp8rl.tools.plan import schedule, speed
from sgl_fp8rl.tools.plan.shape import of

FITTED, MODEL = "rollout_decode", "qwen3-8b"
CHUNK: int = ENGINE["chunked_prefill_size"]
PROMPT_BATCHES = 4
"""Batches that the prompts of a load come in."""
REFERENCE = "stock-bf16"
"""The arm whose kernels are the same in SGLang 0.5.17, of which Qwen3-32B's result file is."""
ARMS = {arm.name: arm for arm in speed.ARMS}
DECODE, PREFILL = "decode_step_ms", "prefill_s"
Medians = dict[tuple[str, str], dict[str, float]]
"""By arm and case, and by metric."""
Row = tuple[dict[str, float], float, float]
"""Quantities, what they took in ms, and what of it is known."""


def medians(file: str, model: str = MODEL) -> Medians:
    """Those of a result file."""
    found: Medians = {}
    for row in json.loads((RESULTS / f"{file}.json").read_text())["rows"]:
        if row["model"] == model:
            found.setdefault((row["arm"], row["case"]), {})[row["metric"]] = row["median"]
    return found


def passes(load: Load) -> int:
    """Forward passes of a load's prefill."""
    return PROMPT_BATCHES * -(-(load.batch // PROMPT_BATCHES * load.length) // CHUNK)


def solved(rows: Sequence[Row]) -> dict[str, float]:
    """Coefficients of at least 0 with the least sum of squared relative errors."""
    target = np.array([1 - known / ms for _, ms, known in rows])
    names, found = list(rows[0][0]), dict.fromkeys(rows[0][0], 0.0)
    while True:
        matrix = np.array([[quantities[name] / ms for name in names] for quantities, ms, _ in rows])
        solution = dict(zip(names, map(float, np.linalg.lstsq(matrix, target)[0]), strict=True))
        least = min(solution, key=solution.__getitem__)
        if solution[least] >= 0:
            return found | solution
        names.remove(least)


def fit(
    name: str, found: Medians, bytes_ms: float, without: str = "", of_: str = ""
) -> speed.Speed:
    """One arm's times of ``MODEL``.

    Args:
        without: a load that is left out of the decode steps or the prefills.
        of_: which of the two, as a metric.
    """
    arm, shape = ARMS[name], of(config(SHAPES[MODEL]))
    used = {
        metric: [load for load in LOADS[MODEL] if (metric, load.name) != (of_, without)]
        for metric in (DECODE, PREFILL)
    }
    prefills = [
        (
            speed.prefill_quantities(arm, shape, [load.length] * load.batch, passes(load)),
            1e3 * found[name, load.name][PREFILL],
            0.0,
        )
        for load in used[PREFILL]
    ]
    coefficients = solved(prefills)
    steps = [
        (
            speed.decode_quantities(arm, shape, load.batch, held(load), bytes_ms),
            found[name, load.name][DECODE],
            speed.weights_ms(arm, shape, load.batch, coefficients["compute"], bytes_ms),
        )
        for load in used[DECODE]
    ]
    return speed.Speed(arm, shape, coefficients | solved(steps), bytes_ms)


def held(load: Load) -> float:
    """Tokens of the KV cache in the mean of a timed decode."""
    return load.batch * load.mean_length


def errors_of(times: speed.Speed, found: Medians, loads: Sequence[Load]) -> dict[str, list[float]]:
    """Of a step and of a prefill of each load, shares of what was measured."""
    errors: dict[str, list[float]] = {DECODE: [], PREFILL: []}
    for load in loads:
        seen = found[times.arm.name, load.name]
        step = times.decode_ms(load.batch, held(load))
        prompts = times.prefill_ms([load.length] * load.batch, passes(load))
        errors[DECODE].append(step / seen[DECODE] - 1)
        errors[PREFILL].append(prompts / 1e3 / seen[PREFILL] - 1)
    return errors


def left_out(found: Medians, bytes_ms: float) -> dict[str, list[float]]:
    """Errors of each load, predicted by a fit without it. The prefills of the first load alone
    show what a forward pass costs besides its tokens: they are in each fit."""
    return {
        metric: [
            errors_of(fit(name, found, bytes_ms, load.name, metric), found, [load])[metric][0]
            for name in arms(found)
            for load in LOADS[MODEL][metric == PREFILL :]
        ]
        for metric in (DECODE, PREFILL)
    }


def arms(found: Medians) -> list[str]:
    """Those that were measured."""
    return list(dict.fromkeys(name for name, _ in found))


def long_rollout(measured: Mapping[str, float], times: speed.Speed) -> dict[str, float]:
    """Seconds of a rollout of the long tail, to which nothing was fitted."""
    lengths = long_tail.output_lengths(long_tail.REQUESTS)
    requests = [schedule.Request(long_tail.PROMPT, each, each) for each in lengths]
    engine = schedule.Engine(int(measured["kv_tokens"]), times.decode_ms, times.prefill_ms, CHUNK)
    predicted = schedule.simulate(engine, requests).seconds
    return {"predicted": predicted, "measured": measured["rollout_s"]}


def other_model(times: speed.Speed) -> dict[str, list[float]]:
    """Errors for Qwen3-32B, of which each of two GPUs has half; communication is left out."""
    whole = of(config(SHAPES["qwen3-32b"]))
    halves = ("intermediate", "heads", "kv_heads", "vocab")
    rank = replace(whole, **{name: getattr(whole, name) // 2 for name in halves})
    found = medians("rollout_two_gpus", "qwen3-32b")
    return errors_of(replace(times, shape=rank), found, LOADS["qwen3-32b"])


def figures() -> dict[str, Any]:
    """What ``plan`` ships, and its errors."""
    facts = json.loads((RESULTS / f"{FITTED}.json").read_text())["environment"]
    found = medians(FITTED)
    shape = of(config(SHAPES[MODEL]))
    capacities = {name: found[name, "capacity"] for name in arms(found)}
    bytes_ms = 1e9 * median(each["copy_tb_s"] for each in capacities.values())
    times = {name: fit(name, found, bytes_ms) for name in capacities}
    idle, own = [], {}
    for name, each in capacities.items():
        token, weights = (
            shape.kv_token_bytes(ARMS[name].kv_cache),
            shape.weight_bytes(ARMS[name].fp8),
        )
        idle.append((each["kv_tokens_floor"] * token + weights) / FULL["mem_fraction_static"])
        own[name] = (each["kv_tokens_floor"] - each["kv_tokens"]) * token
    left = left_out(found, bytes_ms)
    scaled, whole = other_model(times[REFERENCE]), medians("long_tail")
    return {
        "source": "{device}, SGLang {sglang}, {date}, {commit}".format(**facts),
        "model": "Qwen3-8B",
        "shape": asdict(shape),
        "longest": max(load.length for load in LOADS[MODEL]),
        "largest": max(load.batch for load in LOADS[MODEL]),
        "bytes_ms": bytes_ms,
        "idle_bytes": fmean(idle),
        "own_bytes": own,
        "arms": {name: each.coefficients for name, each in times.items()},
        "errors": {
            "left out": {metric: _summary(each) for metric, each in left.items()},
            "rollout": {name: long_rollout(each, times[name]) for (name, _), each in whole.items()},
            "other model": {metric: _summary(each) for metric, each in scaled.items()},
        },
    }


def _summary(errors: Sequence[float]) -> dict[str, float]:
    sizes = [abs(each) for each in errors]
    return {"rows": len(sizes), "mean": fmean(sizes), "worst": max(sizes)}


def rounded(value: Any) -> Any:
    """To six digits, so that another machine writes the same file."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    each = [
        f" {json.dumps(name)}: {json.dumps(value)}" for name, value in rounded(figures()).items()
    ]
    speed.FIGURES.write_text("{\n" + ",\n".join(each) + "\n}\n")
