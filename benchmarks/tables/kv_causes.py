"""The measured blocks about eight bits of K and V, and about sums of 14 bits."""

from typing import Any

from benchmarks.tables.engines import Results
from benchmarks.tables.markdown import Column, Form, Row, facts, failures, joined, table

TEXTS = ("prose", "sums")
EARLY, LATE = "64 to 255", "512 to 767"


def causes(results: Results) -> str:
    """KL of each cause by position, then k3 and bias of early and late tokens; a table a text."""
    rows = [_placed(row) for row in results["rows"] if row["model"] != "drawn"]
    ranges = list(dict.fromkeys(row["range"] for row in rows if " to " in row["range"]))
    made = []
    for text in TEXTS:
        mine = [row for row in rows if row["text"] == text]
        columns = [Column(name, {"kv_kl": _spread}, {"range": name}) for name in ranges]
        made.append(table(mine, ["arm"], columns, f"{text}: KL"))
    metrics: dict[str, Form] = {
        "mismatch_kl_k3": "{median:.0e}",
        "logprob_bias": "{median:+.4f}",
        "logprob_abs_diff_mean": "{median:.4f}",
    }
    columns = [
        Column(f"{text}, {name}", metrics, {"text": text, "range": name})
        for text in TEXTS
        for name in (EARLY, LATE)
    ]
    made.append(table(rows, ["arm"], columns, "k3, bias, mean difference"))
    return joined(*made, failures(results), f"{_facts(results)} Medians of windows.")


def codes(results: Results) -> str:
    """KL of each code, of K and V alone, and with what is planted into K."""
    rows = [_placed(row) for row in results["rows"] if row["model"] != "drawn"]
    names = [row["range"] for row in rows if " to " not in row["range"]]
    kl: dict[str, Form] = {"kv_kl": "{median:.1e}"}
    made = [
        table(
            [row for row in rows if row["text"] == text],
            ["arm"],
            [Column(name, kl, {"range": name}) for name in dict.fromkeys(names)],
            f"{text}: KL, planted",
        )
        for text in TEXTS
    ]
    return joined(*made, f"{_facts(results)} Medians of windows.")


def calibration(results: Results) -> str:
    """Bias of outputs by context and V, simulated."""
    rows = [row for row in results["rows"] if row["model"] == "drawn"]
    bias: dict[str, Form] = {"code_bias": "{median:+.1%}"}
    cases = dict.fromkeys(row["case"] for row in rows)
    columns = [Column(case.removeprefix("1x"), bias, {"case": case}) for case in cases]
    return joined(table(rows, ["arm"], columns, "bias, simulated"), _facts(results))


def biased(results: Results) -> str:
    """Error and bias of decode over FP8 codes: XQA, which multiplies in FP8, beside FA2."""
    rows = [_load(row) for row in results["rows"] if row["arm"] in ("xqa", "fa2")]
    off: dict[str, Form] = {"code_error": "{median:.1%}", "code_bias": "{median:+.1%}"}
    means = {"": "0", "V mean 0.3": "0.3", "V mean 1": "1", "V mean 1, flat": "1, flat softmax"}
    columns = [Column(f"V's mean {name}", off, {"drawn": case}) for case, name in means.items()]
    long = [row for row in rows if not row["load"].startswith(("256x", "1x", "8x"))]
    made = table(long, ["load", "arm"], columns, "sequences x context, kernel: error, bias")
    return joined(made, f"{facts(results['environment'])}. Medians.")


def _spread(row: Row) -> str:
    middle, least, most = (f"{row[name]:.1e}" for name in ("median", "min", "max"))
    return middle if row["n"] == 1 else f"{middle} ({least} to {most})"


def _placed(row: Row) -> Row:
    text, _, place = row["case"].partition(", ")
    return row | {"text": text, "range": place}


def _load(row: Row) -> Row:
    load, _, what = row["case"].partition(", ")
    return row | {"load": load, "drawn": what}


def _facts(results: Results) -> str:
    about: dict[str, Any] = results["environment"]
    kept = {key: about[key] for key in about if key not in ("sglang", "flashinfer")}
    return f"{facts(kept)}."
