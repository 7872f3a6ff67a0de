"""The measured blocks of docs/scale.md about remote engines."""

from collections.abc import Mapping
from typing import Any

from benchmarks.engines.models import MODELS, parameters
from benchmarks.tables.markdown import Column, facts, failures, grid, joined, table

GBITS = (1, 10, 100)
"""Links that updates are computed for."""
SPREAD = "{median:,.0f} ms ({min:,.0f} to {max:,.0f})"


def links(results: Mapping[str, Any]) -> str:
    """A line an update; its time is beside that of the bytes alone."""
    return _table(results, "Medians of {}, BF16 once.")


def far_ranks(results: Mapping[str, Any]) -> str:
    """The same, by how many ranks send."""
    return _table(results, "Medians of {}.")


def _table(results: Mapping[str, Any], last: str) -> str:
    columns = [
        Column("sent", {"network_mb": "{median:.1f} MB"}),
        Column("the link alone", {"link_ms": "{median:,.0f} ms"}),
        Column("update", {"update_wall_ms": SPREAD}),
    ]
    rows = results["rows"]
    made = table(rows, ["case"], columns, f"{rows[0]['model']} parameters")
    runs = max(row["n"] for row in rows)
    return joined(made, failures(results), f"{facts(results['environment'])}. {last.format(runs)}")


def delta(results: Mapping[str, Any]) -> str:
    """A line a model and share of changes; the times of a pass are beside those of the CPU."""
    ms = "{median:,.1f} ms ({min:,.1f} to {max:,.1f})"
    gpu = {"arm": "gpu"}
    columns = [
        Column("records", {"records_mb": "{median:,.0f} MB", "of_image": "{median:.1%}"}),
        Column("quantize", {"quantize_ms": ms}),
        Column("quantize, compare, encode", {"changes_ms": ms}, gpu),
        Column("GPU at work", {"busy_ms": "{median:,.1f} ms"}),
        Column("into the image", {"commit_ms": ms}),
        Column("all, of a pass", {"times_quantize": "{median:.2f}x"}),
        Column("on the engine's GPU", {"engine_ms": "{median:,.1f} ms"}),
        Column("compare on the CPU", {"changes_ms": "{median:,.0f} ms"}, {"arm": "cpu"}),
    ]
    rows = results["rows"]
    made = table(rows, ["model", "case"], columns, "model, bytes that change")
    runs = max((row["n"] for row in rows), default=0)
    end = f"{facts(results['environment'])}. Medians of {runs} (least to most)."
    return joined(made, failures(results), end)


def delta_links(results: Mapping[str, Any]) -> str:
    """Updates over links, computed of what the GPUs took and of the bytes alone."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in results["rows"]:
        if row["arm"] == "gpu":
            found.setdefault((row["model"], row["case"]), {})[row["metric"]] = row["median"]
    lines = []
    for (model, case), values in found.items():
        bf16_mb = sum(2 * each.numel for each in parameters(MODELS[model])) / 1e6
        steps_ms = values["changes_ms"] + values["commit_ms"] + values["engine_ms"]
        for gbits in GBITS:
            ms_of_mb = 8 / gbits
            cells = (
                bf16_mb * ms_of_mb,
                values["quantize_ms"] + values["image_mb"] * ms_of_mb,
                steps_ms + values["records_mb"] * ms_of_mb,
            )
            if case == "0.2%" or gbits == GBITS[-1]:
                name = f"{model}, {case}, {gbits} Gb/s"
                lines.append([name, *(f"{cell / 1e3:,.2f} s" for cell in cells)])
    head = ("model, bytes that change, link", "whole, BF16", "whole, FP8", "what changed")
    return joined(grid(head, lines), f"{facts(results['environment'])}.")


def chain(results: Mapping[str, Any]) -> str:
    """A line for a version that is whole, and for each size of steps."""
    columns = [
        Column("files", {"files_mb": "{median:.1f} MB"}),
        Column("of its tensors", {"of_whole": "{median:.1%}"}),
        Column("publish", {"publish_s": "{median:.2f} s ({min:.2f} to {max:.2f})"}),
        Column("read", {"advance_s": "{median:.2f} s ({min:.2f} to {max:.2f})"}),
    ]
    rows = results["rows"]
    made = table(rows, ["case"], columns, f"{rows[0]['model']} parameters")
    runs = max(row["n"] for row in rows)
    end = f"{facts(results['environment'])}. Medians of {runs}, the whole version once."
    return joined(made, failures(results), end)
