"""The measured blocks of docs about the FP8 KV cache."""

from benchmarks.tables.engines import Results, copies, is_reference
from benchmarks.tables.markdown import (
    Column,
    Form,
    Row,
    facts,
    failures,
    joined,
    table,
    with_ratio,
    with_share,
)


def speed(results: Results) -> str:
    """Capacity and speed of whole engines."""
    rows = with_ratio(results["rows"], "decode_step_ms", is_reference)
    rows = with_share(rows, "kv_tokens", "kv_tokens_floor", "of what fits")
    step: dict[str, Form] = {"decode_step_ms": "{median:.2f} ms"}
    long = {"case": "64x8192"}
    columns = [
        Column("KV tokens", {"kv_tokens": "{median:,.0f}"}),
        Column("of what fits", {"of what fits": "{median:.1%}"}),
        Column("prefill 64 x 8192", {"prefill_s": "{median:.1f} s"}, long),
        Column("step 128 x 512", step, {"case": "128x512"}),
        Column("step 64 x 8192", step, long),
        Column("faster than stock BF16", {"faster": "{median:.2f}x"}, long),
    ]
    made = table(rows, ["arm"], columns, "engine")
    copied = copies([row for row in rows if row["case"] == "capacity"])
    end = f"{facts(results['environment'])}. Medians. {copied}"
    return joined(made, failures(results, "engine"), end)


def prefill(results: Results) -> str:
    """Error and bias of a prompt's last tokens, what codes lose, and time of a chunk."""
    off: dict[str, Form] = {"code_error": "{median:.1%}", "code_bias": "{median:+.1%}"}
    lost: dict[str, Form] = {"kv_error": "{median:.1%}"}
    took: dict[str, Form] = {"attention_us": "{median_ms:.2f} ms"}
    rows = [{**row, "median_ms": row["median"] / 1e3} for row in results["rows"]]
    contexts = {"8k": "1x8192", "32k": "1x32768", "128k": "1x131072"}
    kinds = {"V mean 0.3": "mean 0.3", "V mean 1": "mean 1", "V mean 1, flat": "flat, mean 1"}
    errors = [
        Column(f"{name}, {kind}", off, {"case": f"{load}, last 128, {case}"})
        for name, load in contexts.items()
        for case, kind in kinds.items()
    ]
    codes = [
        Column(name, lost, {"case": f"{load}, last 128, V mean 0.3"})
        for name, load in contexts.items()
    ]
    chunks = {
        "16 x 1024": "16x1024, last 1024",
        "16k": "1x16384, last 16384",
        "32k": "1x32768, last 16384",
        "128k": "1x131072, last 16384",
        "128 x 64 after 8192": "128x8256, last 64",
    }
    times = [Column(name, took, {"case": case}) for name, case in chunks.items()]
    return joined(
        table(rows, ["arm"], errors, "error, bias"),
        table(rows, ["arm"], codes, "error to values before they were codes"),
        table(rows, ["arm"], times, "time of the last 16,384 tokens, or of all new ones"),
        failures(results),
        f"{facts(results['environment'])}. Medians.",
    )


def accuracy(results: Results) -> str:
    """Error and time of attention, error of logprobs, what sending scales costs."""
    rows = with_share(results["rows"], "attention_floor_us", "attention_us", "of floor")
    error: dict[str, Form] = {"kv_error": "{median:.4f}"}
    took: dict[str, Form] = {"attention_us": "{median:.0f} us"}
    near, far = {"case": "64x8192"}, {"case": "64x32768"}
    attention = [
        Column("error 64 x 8192", error, near),
        Column("64 x 32768", error, far),
        Column("64 x 8192, K beyond 448", error, {"case": "64x8192, K beyond 448"}),
        Column("time 64 x 8192", took, near),
        Column("64 x 32768", took, far),
        Column("of floor", {"of floor": "{median:.0%}"}, far),
    ]
    logprobs = [
        Column(f"{phase}{head}", {metric: "{median:.4f}"}, {"case": f"logprobs, {weights}"})
        for weights, head in (("no outliers", ""), ("K beyond 448", ", K beyond 448"))
        for phase, metric in (("prefill", "logprob_error"), ("decode", "logprob_error_decode"))
    ]
    updates = [Column("time", {"update_wall_ms": "{median:.2f} ms ({min:.2f} to {max:.2f})"})]
    return joined(
        table(rows, ["arm"], attention, "attention, scales"),
        table(rows, ["arm"], logprobs, "logprobs"),
        table(rows, ["case"], updates, "update"),
        *(failures(results, part) for part in ("attention", "logprobs", "update")),
        f"{facts(results['environment'])}. Medians.",
    )


def decode(results: Results) -> str:
    """Error and bias of decode attention's arithmetic, what codes lose, and the time of a call."""
    took: dict[str, Form] = {"attention_us": "{median:.0f} us"}
    off: dict[str, Form] = {"code_error": "{median:.1%}", "code_bias": "{median:+.1%}"}
    loads = ("128x512", "64x8192", "16x30016", "4x131072")
    kinds = {"V mean 0.3": "mean 0.3", "V mean 1": "mean 1", "V mean 1, flat": "flat, mean 1"}
    errors = [
        Column(f"{load}, {kind}", off, {"case": f"{load}, {case}"})
        for load in loads[1:]
        for case, kind in kinds.items()
    ]
    lost: dict[str, Form] = {"kv_error": "{median:.1%}"}
    codes = [Column(load, lost, {"case": f"{load}, V mean 0.3"}) for load in loads]
    times = [Column(load, took, {"case": load}) for load in ("1x8192", "8x8192", *loads)]
    ours = [row for row in results["rows"] if row["arm"].startswith("paged")]
    return joined(
        table(results["rows"], ["arm"], errors, "error, bias"),
        table(results["rows"], ["arm"], times, "time of a call"),
        table(ours, ["arm"], codes, "error to values before they were codes"),
        failures(results),
        f"{facts(results['environment'])}. Medians.",
    )


def biased(results: Results) -> str:
    """Error and bias of decode over FP8 codes: XQA, which multiplies in FP8, beside FA2."""
    rows = [_load(row) for row in results["rows"] if row["arm"] in ("xqa", "fa2")]
    off: dict[str, Form] = {"code_error": "{median:.1%}", "code_bias": "{median:+.1%}"}
    means = {"": "0", "V mean 0.3": "0.3", "V mean 1": "1", "V mean 1, flat": "1, flat softmax"}
    columns = [Column(f"V's mean {name}", off, {"drawn": case}) for case, name in means.items()]
    long = [row for row in rows if not row["load"].startswith(("256x", "1x", "8x"))]
    made = table(long, ["load", "arm"], columns, "sequences x context, kernel: error, bias")
    return joined(made, f"{facts(results['environment'])}. Medians.")


def _load(row: Row) -> Row:
    load, _, what = row["case"].partition(", ")
    return row | {"load": load, "drawn": what}
