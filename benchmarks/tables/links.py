"""The measured blocks of docs/scale.md about engines that are far away."""

from collections.abc import Mapping
from typing import Any

from benchmarks.tables.markdown import Column, facts, failures, joined, table

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
