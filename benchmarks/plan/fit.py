"""Fit the costs of a step and of a prefill to measured rows, and predict those left out."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls  # type: ignore[import-untyped]

from benchmarks.engines.models import MODELS, SHAPES, config
from benchmarks.rollout import LOADS
from sgl_fp8rl.plan import gemms, shape, speed, xqa

RESULTS = Path(__file__).parents[1] / "results"
FITTED = ("rollout", "rollout_moe")
"""Result files whose rows are fitted to."""
CHUNK = 16384
"""Tokens of a prefill batch in the benchmarks."""
PROMPT_BATCHES = 4
"""Batches that the prompts of a load come in."""
DATA_SHEET = {
    "read ": 1.0,  # at the bandwidth of a copy
    # 989 and 1979 TFLOP/s, of NVIDIA's data sheet of the H200 SXM
    "compute bf16": 1.0 / 0.989,
    "compute experts bf16": 1.0 / 0.989,
    "compute experts fp8": 1.0 / 1.979,
    # as they are in the table
    "GEMMs": 1.0,
    "prefill GEMMs": 1.0,
}
"""Coefficients by the beginning of their names, from before any step was measured."""
PROFILED = {"stock-bf16": "bf16", "stock-block-fp8-kv8-xqa": "fp8", "fp8rl-kv8": "fp8"}
"""Arms of ``decode_profile.json``, and what their prefill attends with: the other priors are from
there, of another day and commit than the rows of ``rollout.json``."""
SHORT, LONG = "128x512, prefill of 16384 tokens", "64x8192, prefill of 16384 tokens"
ACTIVATIONS = ("SiLU x up", "quantize", "norm", "copies", "QK-norm, RoPE", "KV scales", "KV write")
"""Classes of kernels whose time is in proportion to the tokens."""
PRIOR_WEIGHT = 0.5
"""Of a prior, where a measured row has 1."""
ARMS = {arm.name: arm for arm in speed.ARMS}
LONG_CONTEXT = 4096
"""Tokens from which XQA's time is mostly that of reading."""


@dataclass(frozen=True)
class Row:
    """One measured time and what it is a sum of."""

    arm: str
    model: str
    case: str
    metric: str
    ms: float
    quantities: dict[str, float]


def measured_rows(files: Sequence[str] = FITTED) -> list[dict[str, Any]]:
    """Rows of result files."""
    return [
        row for name in files for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    ]


def rows(files: Sequence[str] = FITTED, tp: int = 1) -> list[Row]:
    """Decode steps and prefills of every arm that ``plan`` knows."""
    found = []
    for row in measured_rows(files):
        arm = ARMS.get(row["arm"])
        if arm is None or row["metric"] not in ("decode_step_ms", "prefill_s"):
            continue
        model = shape.of(config(SHAPES[row["model"]]))
        load = next(load for load in LOADS[row["model"]] if load.name == row["case"])
        if row["metric"] == "decode_step_ms":
            tokens = load.batch * load.mean_length
            ms = row["median"]
            parts = speed.decode_quantities(arm, model, load.batch, tokens, kernels(), tp)
        else:
            part = load.batch // PROMPT_BATCHES * load.length
            batches = PROMPT_BATCHES * -(-part // CHUNK)
            lengths = [load.length] * load.batch
            ms = 1e3 * row["median"]
            parts = speed.prefill_quantities(arm, model, lengths, batches, kernels(), tp)
        found.append(Row(row["arm"], row["model"], row["case"], row["metric"], ms, parts))
    return found


def fit(known: Iterable[Row]) -> dict[str, float]:
    """Coefficients of at least 0 with the least sum of squared relative errors.

    A prior counts as a row of weight ``PRIOR_WEIGHT``: few loads tell reads from compute.
    """
    known = list(known)
    names = sorted({name for row in known for name in row.quantities})
    matrix = [[row.quantities.get(name, 0.0) / row.ms for name in names] for row in known]
    wanted = [1.0] * len(known)
    for index, name in enumerate(names):
        if (prior := _prior(name)) is not None:
            matrix.append([0.0] * len(names))
            matrix[-1][index] = PRIOR_WEIGHT / prior
            wanted.append(PRIOR_WEIGHT)
    solution, _ = nnls(np.array(matrix), np.array(wanted))
    return dict(zip(names, map(float, solution), strict=True))


def predict(coefficients: dict[str, float], row: Row) -> float:
    """The time of a row, from coefficients of others.

    Raises:
        KeyError: none of them has what this one needs.
    """
    return sum(_find(coefficients, name) * count for name, count in row.quantities.items())


def _find(coefficients: dict[str, float], name: str) -> float:
    found = coefficients.get(name, _prior(name))
    if found is None:
        raise KeyError(name)
    return found


def _prior(name: str) -> float | None:
    known = DATA_SHEET | profiled()
    return next((prior for what, prior in known.items() if name.startswith(what)), None)


@cache
def profiled() -> dict[str, float]:
    """Coefficients by the beginning of their names, from the profile of a prefill."""
    seen: dict[tuple[str, str, str], float] = {
        (row["arm"], row["case"], row["metric"].removesuffix(", us")): row["median"] / 1e3
        for row in json.loads((RESULTS / "decode_profile.json").read_text())["rows"]
    }
    model = shape.of(config(MODELS["qwen3-8b"]))
    found = {}
    for name, attends in PROFILED.items():
        arm = ARMS[name]
        elsewhere = sum(seen.get((name, SHORT, each), 0.0) for each in ACTIVATIONS)
        passes = elsewhere / speed.activations(model, CHUNK)
        for phase in ("prefill ", ""):  # the same kernels
            found[f"{phase}activations {arm.weights}"] = passes
        found[f"prefill layer {arm.stack}"] = seen[name, SHORT, "idle"] / model.layers
        flops = sum(model.attention_flops(8192) for _ in range(CHUNK // 8192))
        found[f"prefill attention {attends}"] = seen[name, LONG, "attention"] / (flops / 1e12)
    return found


@cache
def kernels() -> speed.Kernels:
    """Of single kernels, from benchmarks that ran none of the rows."""
    return speed.Kernels(gemm_lines(), xqa_shares())


def xqa_shares() -> xqa.Shares:
    """Of the kernels' benchmark, which has one floor for both."""
    seen: dict[tuple[int, int], dict[str, float]] = {}
    for row in json.loads((RESULTS / "kernels.json").read_text())["rows"]:
        what, _, place = row["case"].partition(": ")
        if what == "XQA decode" and row["unit"] == "us":
            batch, context = map(int, place.split("x"))
            name = "floor" if row["metric"] == "kernel_floor_us" else row["arm"]
            seen.setdefault((batch, context), {})[name] = row["median"]
    return {
        stack: [
            (batch, us["floor"] / us[stack])
            for (batch, context), us in sorted(seen.items())
            if context >= LONG_CONTEXT
        ]
        for stack in gemms.STACKS
    }


def gemm_lines() -> gemms.Lines:
    """The line through the measured GEMMs of each stack, with the least relative errors."""
    found = {}
    for stack in gemms.STACKS:
        matrix = [
            [1.0 / us, *(each / us for each in gemms.quantities(n, k, m))]
            for (n, k), measured in gemms.table(stack).items()
            for m, us in zip(*measured, strict=True)
        ]
        solution, _ = nnls(np.array(matrix), np.ones(len(matrix)))
        found[stack] = gemms.Line(*map(float, solution))
    return found


def left_out(all_rows: list[Row], key: Callable[[Row], Any]) -> list[tuple[Row, float]]:
    """Each row with its prediction from rows of other keys, where they have what it needs."""
    found = []
    for value in sorted({key(row) for row in all_rows}):
        coefficients = fit(row for row in all_rows if key(row) != value)
        for row in all_rows:
            if key(row) == value:
                try:
                    found.append((row, predict(coefficients, row)))
                except KeyError:
                    continue
    return found


def by_load(row: Row) -> tuple[str, str]:
    return row.model, row.case


def error(row: Row, predicted: float) -> float:
    """Share of the measured time."""
    return predicted / row.ms - 1.0


def ranked_first(predicted: list[tuple[Row, float]]) -> tuple[int, int]:
    """In how many loads the fastest arm is predicted to be fastest, and of how many."""
    loads = sorted({(row.model, row.case) for row, _ in predicted})
    hits = 0
    for load in loads:
        those = [(row, ms) for row, ms in predicted if (row.model, row.case) == load]
        best = min(those, key=lambda pair: pair[0].ms)[0].arm
        hits += min(those, key=lambda pair: pair[1])[0].arm == best
    return hits, len(loads)
