"""The measured blocks of README and docs about engines: what each shows of its result file."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tables.markdown import (
    Column,
    Row,
    facts,
    failures,
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


def whole_rollouts(results: Results) -> str:
    """A line for each arm: its time, beside stock BF16, and the tokens that its KV cache holds."""
    rows = with_ratio(results["rows"], "rollout_s", is_reference)
    columns = [
        Column("time", {"rollout_s": _spread}),
        Column("faster", {"faster": "{median:.2f}x"}),
        Column("tokens/s", {"rollout_tokens_s": "{median:,.0f}"}),
        Column("KV tokens", {"kv_tokens": "{median:,.0f}"}),
    ]
    counts = [row["n"] for row in rows if row["metric"] == "rollout_s"]
    return joined(
        table(rows, ["model", "case", "arm"], columns, "rollout"),
        failures(results),
        f"{facts(results['environment'])}. {runs_of_each_arm(min(counts), max(counts))} "
        f"{copies(rows)}",
    )


def _spread(row: Row) -> str:
    least, most = f"{row['min']:.1f}", f"{row['max']:.1f}"
    return f"{row['median']:.1f} s" + (f" ({least} to {most})" if least != most else "")


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
