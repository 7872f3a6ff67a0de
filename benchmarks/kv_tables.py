"""The blocks of docs about the FP8 KV cache, from results/kv.json."""

import json
from typing import Any

Found = dict[tuple[str, str, str], dict[str, Any]]
"""Rows by arm, case and metric."""


def speed(text: str) -> str:
    """Capacity and speed of whole engines."""
    facts, rows, found = _read(text)
    copies = [row["median"] for row in rows if row["metric"] == "copy_tb_s"]
    return _joined(
        _table(
            "| engine | KV tokens | of what fits | prefill 64 x 8192 | step 128 x 512 "
            "| step 64 x 8192 | faster than stock BF16 |",
            [_engine(found, arm) for arm in _arms(rows, "kv_tokens")],
        ),
        _failures(rows, "engine"),
        f"{facts} Medians. KV tokens: what fits is the static memory less the weights, over the "
        f"bytes of a token. Step: of decode alone, sequences x prompt tokens, logprobs returned."
        + (
            f" Each engine had a GPU of one host to itself; these copy {min(copies):.2f} to "
            f"{max(copies):.2f} TB/s."
            if copies
            else ""
        ),
    )


def accuracy(text: str) -> str:
    """Error and time of attention, error of logprobs, what sending scales costs."""
    facts, rows, found = _read(text)
    return _joined(
        _table(
            "| attention, scales | error 64 x 8192 | 64 x 32768 | 64 x 8192, K beyond 448 "
            "| time 64 x 8192 | 64 x 32768 | of floor |",
            [_kernel(found, arm) for arm in _arms(rows, "kv_error")],
        ),
        _table(
            "| logprobs | prefill | decode | prefill, K beyond 448 | decode, K beyond 448 |",
            [_logprobs(found, arm) for arm in _arms(rows, "logprob_error_decode")],
        ),
        _table(
            "| update | time |",
            [
                f"| {row['case'].removeprefix('update, ')} | {row['median']:.2f} ms "
                f"({row['min']:.2f} to {row['max']:.2f}) |"
                for row in rows
                if row["metric"] == "update_wall_ms"
            ],
        ),
        _failures(rows, "attention", "logprobs", "update"),
        f"{facts} Medians. Attention: relative L2 error against float64, time of one layer's "
        f"decode, floor the cache's bytes at the bandwidth of a copy. Logprobs: mean absolute "
        f"difference to prefill over BF16 KV in nats, 6 layers. Update: scales are sent; measuring "
        f"them is not in it.",
    )


def _read(text: str) -> tuple[str, list[dict[str, Any]], Found]:
    """What was run on what, all rows, and the same by arm, case and metric."""
    content = json.loads(text)
    e, rows = content["environment"], content["rows"]
    facts = (
        f"`{e['command']}`: Qwen3-8B shape, random weights, {e['device']}, driver {e['driver']}, "
        f"SGLang {e['sglang']}, torch {e['torch']}, FlashInfer {e['flashinfer']}, {e['date']}, "
        f"commit {e['commit']}."
    )
    return facts, rows, {(row["arm"], row["case"], row["metric"]): row for row in rows}


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def _failures(rows: list[dict[str, Any]], *kinds: str) -> str:
    """What failed among processes of these kinds."""
    return "\n".join(
        f"{row['arm']} ({row['process']}) fails: {row['sentence']}"
        for row in rows
        if row["metric"] == "failure" and row["process"].startswith(kinds)
    )


def _arms(rows: list[dict[str, Any]], metric: str) -> list[str]:
    """Arms that have the metric, in the order of the file."""
    return list(dict.fromkeys(row["arm"] for row in rows if row["metric"] == metric))


def _table(head: str, lines: list[str]) -> str:
    """A table, or nothing where it has no lines."""
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *lines]) if lines else ""


def _line(found: Found, arm: str, cells: list[tuple[str, str, str]]) -> str:
    """An arm's line; a cell is a case, a metric and a form, empty where there is no such row."""
    filled_in = [
        form.format(found[arm, case, metric]["median"]) if (arm, case, metric) in found else ""
        for case, metric, form in cells
    ]
    return f"| {arm} | {' | '.join(filled_in)} |"


def _engine(found: Found, arm: str) -> str:
    tokens = found[arm, "capacity", "kv_tokens"]["median"]
    floor = found[arm, "capacity", "kv_tokens_floor"]["median"]
    long = found.get((arm, "64x8192", "decode_step_ms"))
    faster = long["ratios"].get("stock-bf16, 64x8192") if long else None
    line = _line(
        found,
        arm,
        [
            ("64x8192", "prefill_s", "{:.1f} s"),
            ("128x512", "decode_step_ms", "{:.2f} ms"),
            ("64x8192", "decode_step_ms", "{:.2f} ms"),
        ],
    ).removeprefix(f"| {arm} ")
    return f"| {arm} | {tokens:,.0f} | {tokens / floor:.1%} {line} " + (
        f"{faster:.2f}x |" if faster else "|"
    )


def _kernel(found: Found, arm: str) -> str:
    took = found.get((arm, "64x32768", "attention_us"))
    floor = found.get((arm, "64x32768", "attention_floor_us"))
    line = _line(
        found,
        arm,
        [
            ("64x8192", "kv_error", "{:.4f}"),
            ("64x32768", "kv_error", "{:.4f}"),
            ("64x8192, K beyond 448", "kv_error", "{:.4f}"),
            ("64x8192", "attention_us", "{:.0f} us"),
            ("64x32768", "attention_us", "{:.0f} us"),
        ],
    )
    return f"{line} " + (f"{floor['median'] / took['median']:.0%} |" if took and floor else "|")


def _logprobs(found: Found, arm: str) -> str:
    return _line(
        found,
        arm,
        [
            (f"logprobs, {planted}", metric, "{:.4f}")
            for planted in ("no outliers", "K beyond 448")
            for metric in ("logprob_error", "logprob_error_decode")
        ],
    )
