"""The measured blocks of docs about the FP8 KV cache."""

from benchmarks.tables.engines import Results
from benchmarks.tables.markdown import (
    Column,
    Form,
    facts,
    failures,
    joined,
    table,
)

UNEVEN = ("256x4096", "128x5504", "64x8192", "32x8192")


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
    times = [
        Column(load, took, {"case": load})
        for load in ("1x8192", "8x8192", *loads, *(f"{load}, uneven" for load in UNEVEN))
    ]
    ours = [row for row in results["rows"] if row["arm"].startswith("paged")]
    return joined(
        table(results["rows"], ["arm"], errors, "error, bias"),
        table(results["rows"], ["arm"], times, "time of a call"),
        table(ours, ["arm"], codes, "error to values before they were codes"),
        failures(results),
        f"{facts(results['environment'])}. Medians.",
    )
