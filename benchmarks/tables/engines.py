"""The measured blocks of README and docs about engines: what each shows of its result file."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tables.markdown import (
    Column,
    Row,
    facts,
    failures,
    grid,
    joined,
    runs_of_each_arm,
    table,
    with_ratio,
    with_share,
)

Results = Mapping[str, Any]

REFERENCE = "stock-bf16"
METRICS = ("decode_step_ms", "prefill_s")
WIDE = 0.12
"""Share of a median that its values may span without being named."""
CLASSES = 12
"""Classes of a profile that get a line of their own."""
TOTALS = ("step", "busy", "idle")


def is_reference(row: Row) -> bool:
    """Whether a row is of stock SGLang in BF16."""
    return bool(row["arm"] == REFERENCE)


def rollout(results: Results) -> str:
    """Decode and prefill of each model, each arm beside stock BF16."""
    rows = with_ratio(results["rows"], "prefill_s", is_reference, "prefill faster")
    rows = with_ratio(rows, "decode_step_ms", is_reference)
    rows = with_share(rows, "decode_floor_ms", "decode_step_ms", "of floor")
    parts = []
    decode = {"decode_step_ms": "{median:.2f} ms", "faster": "{median:.2f}x"}
    decode |= {"of floor": "{median:.0%}"}
    prefill = {"prefill_s": "{median:.3g} s", "prefill faster": "{median:.2f}x"}
    for model in models_of(rows):
        mine = [row for row in rows if row["model"] == model]
        parts.append(f"### {model}")
        for head, metrics in (("decode step, part of floor", decode), ("prefill", prefill)):
            columns = [Column(load, metrics, {"case": load}) for load in loads_of(mine)]
            parts.append(table(mine, ["arm"], columns, head))
    end = f"{facts(results['environment'])}. {_values(results['rows'])} {copies(rows)}"
    return joined(*parts, failures(results), end)


def _values(rows: Sequence[Row]) -> str:
    """What cells are medians of, and which of them have a wide spread."""
    timed = [row for row in rows if row["metric"] in METRICS]
    wide = [row for row in timed if row["max"] - row["min"] > WIDE * row["median"]]
    named = "; ".join(
        f"{row['arm']}, {row['metric'].partition('_')[0]} {row['case']}, {row['min']:.3g} to "
        f"{row['max']:.3g}"
        for row in wide
    )
    counts = {metric: {r["n"] for r in timed if r["metric"] == metric} for metric in METRICS}
    decodes, prefills = (" or ".join(map(str, sorted(counts[metric]))) for metric in METRICS)
    return (
        f"Medians of {decodes} decodes and {prefills} prefills, which span at most {WIDE:.0%} of "
        f"the median" + (f", but for {named}." if named else ".")
    )


def models_of(rows: Sequence[Row]) -> list[str]:
    """Models, in the order of the file."""
    return list(dict.fromkeys(row["model"] for row in rows))


def loads_of(rows: Sequence[Row]) -> list[str]:
    """Cases whose decode was timed, the shortest prompts first."""
    cases = {row["case"] for row in rows if row["metric"] == "decode_step_ms"}
    return sorted(cases, key=lambda case: [int(number) for number in case.split("x")][::-1])


def copies(rows: Sequence[Row]) -> str:
    """Bandwidth of a copy where the arms ran."""
    found = [row["median"] for row in rows if row["metric"] == "copy_tb_s"]
    return f"Bandwidth of a copy: {min(found):.2f} to {max(found):.2f} TB/s." if found else ""


def long_tail(results: Results) -> str:
    """The rollout with a long tail of lengths."""
    columns = [
        Column("tokens/s", {"rollout_tokens_s": "{median:,.0f}"}),
        Column("retractions", {"retractions": "{median:.0f}"}),
        Column("of requests", {"retracted_requests": "{median:.0f}"}),
        Column("running", {"running_requests": "{median:.0f}"}),
        Column("KV tokens", {"kv_tokens": "{median:,.0f}"}),
        Column("KV in use", {"kv_used": "{median:.0%}"}),
        Column("KV demand", {"kv_demand": "{median:.2f}"}),
    ]
    counts = _counts(results)
    return _whole_rollouts(results, columns, runs_of_each_arm(min(counts), max(counts)))


def multi_turn(results: Results) -> str:
    """Conversations of several turns."""
    columns = [
        Column("answers, tokens/s", {"rollout_tokens_s": "{median:,.0f}"}),
        Column("prompt tokens", {"prompt_tokens": "{median:,.0f}"}),
        Column("from the prefix cache", {"cached_share": "{median:.0%}"}),
        Column("KV tokens", {"kv_tokens": "{median:,.0f}"}),
    ]
    each = _counts(results)[0]
    return _whole_rollouts(results, columns, f"Medians of {each} rollouts of one engine.")


def _whole_rollouts(results: Results, more: Sequence[Column], runs: str) -> str:
    """A line for each arm: its time, beside stock BF16, and more columns.

    Args:
        runs: the sentence that says what the times are of.
    """
    rows = with_ratio(results["rows"], "rollout_s", is_reference)
    columns = [
        Column("time", {"rollout_s": _spread}),
        Column("faster", {"faster": "{median:.2f}x"}),
        *more,
    ]
    return joined(
        table(rows, ["model", "case", "arm"], columns, "rollout"),
        failures(results),
        f"{facts(results['environment'])}. {runs} {copies(rows)}",
    )


def _spread(row: Row) -> str:
    least, most = f"{row['min']:.1f}", f"{row['max']:.1f}"
    return f"{row['median']:.1f} s" + (f" ({least} to {most})" if least != most else "")


def _counts(results: Results) -> list[int]:
    """The number of times of each arm."""
    return [row["n"] for row in results["rows"] if row["metric"] == "rollout_s"]


def decode_profile(results: Results) -> str:
    """Two tables for each model, of prefill and decode: us a step of each class of kernels, by load
    and arm."""
    rows = results["rows"]
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    found = {(row["model"], row["case"], row["arm"], row["metric"]): row["median"] for row in rows}
    parts = []
    for model, kind in dict.fromkeys((r["model"], _kind(r["case"])) for r in rows):
        cases = list(dict.fromkeys(k[1] for k in found if k[0] == model and _kind(k[1]) == kind))
        by = [(case, arm) for case in cases for arm in arms]
        mine = {(*k[1:3], k[3].removesuffix(", us")): v for k, v in found.items() if k[0] == model}
        names = {name for case, _, name in mine if case in cases} - {*TOTALS, "steps"}
        names = {name for name in names if not name.endswith(", calls")}
        order = sorted(names, key=lambda name: -max(mine.get((*b, name), 0.0) for b in by))
        groups = [[name] for name in order[:CLASSES]] + [order[CLASSES:]] * (len(order) > CLASSES)
        lines = []
        for group in [*groups, ["idle"], ["step"]]:
            us = [[sum(mine.get((c, arm, n), 0.0) for n in group) for arm in arms] for c in cases]
            lines.append([", ".join(group), *(", ".join(f"{v:.0f}" for v in cell) for cell in us)])
        heads = [c.removesuffix(", decode").replace(", prefill of", ":") for c in cases]
        parts.append(grid([f"{model}, {kind}", *heads], lines))
    steps = max(row["median"] for row in rows if row["metric"] == "steps")
    means = f"Means of {steps:g} decode steps or of one prefill, in us, of {', '.join(arms)}."
    return joined(*parts, failures(results), f"{facts(results['environment'])}. {means}")


def _kind(case: str) -> str:
    return "decode" if case.endswith("decode") else "prefill"


def update(results: Results) -> str:
    """One table a model: how long a full weight update takes, in each arm."""
    rows = with_ratio(results["rows"], "update_wall_ms", is_reference, same=["model"])
    columns = [
        Column("update", {"update_wall_ms": "{median:.1f} ms ({min:.1f} to {max:.1f})"}),
        Column("faster than stock", {"faster": "{median:.2f}x"}),
        Column("begin", {"update_begin_ms": "{median:.1f} ms"}),
        Column("floor", {"update_floor_ms": "{median:.1f} ms"}),
        Column("engine's kernels", {"update_gpu_ms": "{median:.1f} ms"}),
        Column("of copy", {"quantize_copy_fraction": "{median:.0%}"}),
        Column("extra memory", {"peak_extra_gib": "{max:.2f} GiB"}),
    ]
    made = [
        table([r for r in rows if r["model"] == model], ["arm", "case"], columns, model)
        for model in models_of(rows)
    ]
    updates = max(row["n"] for row in rows)
    return joined(
        *made,
        failures(results),
        f"{facts(results['environment'])}. Medians of {updates} (least to most). {copies(rows)}",
    )


def start(results: Results) -> str:
    """How long the start of an engine takes, and what it compiles."""
    columns = [
        Column("`Engine()`", {"start_s": "{median:.1f} s"}),
        Column("of which DeepGEMM's warm-up", {"deep_gemm_s": "{median:.1f} s"}),
        Column("kernels compiled", {"kernels_compiled": "{median:.0f}"}),
        Column("after the start", {"kernels_compiled_after_start": "{median:.0f}"}),
        Column("import of SGLang before", {"import_s": "{median:.1f} s"}),
    ]
    made = table(results["rows"], ["arm", "case"], columns, "start")
    return joined(made, failures(results), f"{facts(results['environment'])}. One start each.")
