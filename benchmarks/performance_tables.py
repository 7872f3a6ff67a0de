"""The measured blocks of docs/performance.md, from results of the benchmarks."""

import json
from typing import Any

Row = dict[str, Any]
Found = dict[tuple[str, str, str], Row]
"""Rows by arm, case and metric."""

REFERENCE = "stock-bf16"
PICTURE = "performance.png"
KERNELS = 12
"""Classes of a profile that get a line of their own."""


def rollout(text: str) -> str:
    """Decode and prefill of each model, each arm beside stock BF16."""
    return f"![Decode speed of each arm over stock BF16]({PICTURE})\n\n{tables(text)}"


def tables(text: str) -> str:
    """All that a file of rollout.py has, with the environment below."""
    content = json.loads(text)
    e, rows = content["environment"], content["rows"]
    parts: list[str] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        parts += [f"### {model}", *_of_model(mine)]
    parts += [
        f"{row['arm']}, {row['model']}, {row['case']} fails: {row['sentence']}"
        for row in rows
        if row["metric"] == "failure"
    ]
    copies = [row["median"] for row in rows if row["metric"] == "copy_tb_s"]
    card = f"one {e['device']} an arm" + (f" of {e['count']} in the host" if e["count"] > 1 else "")
    parts.append(
        f"`{e['command']}`: {card}, driver {e['driver']}, SGLang {e['sglang']}, torch "
        f"{e['torch']}, FlashInfer {e['flashinfer']}, {e['date']}, commit {e['commit']}. "
        f"{of_runs(rows)} Bandwidth of a copy where the arms ran: {min(copies):.2f} to "
        f"{max(copies):.2f} TB/s."
    )
    return "\n\n".join(part for part in parts if part)


def summary(text: str) -> str:
    """One row a load: stock BF16, the best of stock's other arms, and the best of ours."""
    content = json.loads(text)
    e = content["environment"]
    rows = [row for row in content["rows"] if row["metric"] == "decode_step_ms"]
    lines = []
    for place in dict.fromkeys((row["model"], row["case"]) for row in rows):
        found = {row["arm"]: row for row in rows if (row["model"], row["case"]) == place}
        stock = [row for arm, row in found.items() if arm.startswith("stock") and arm != REFERENCE]
        ours = [row for arm, row in found.items() if arm.startswith("fp8rl")]
        if REFERENCE not in found or not stock or not ours:
            continue
        theirs, mine = (min(some, key=lambda row: row["median"]) for some in (stock, ours))
        lines.append(
            [
                f"{place[0]}, {place[1]}",
                f"{found[REFERENCE]['median']:.2f} ms",
                f"{theirs['median']:.2f} ms ({theirs['arm']})",
                f"{mine['median']:.2f} ms ({mine['arm']}){_faster(mine)}",
            ]
        )
    return (
        _table(
            ["decode step, sequences x prompt", REFERENCE, "best other stock arm", "ours"], lines
        )
        + f"\n\n`{e['command']}`, one {e['device']} an arm, SGLang {e['sglang']}, {e['date']}, "
        f"commit {e['commit']}: medians, logprobs returned, random weights."
    )


def of_runs(rows: list[Row]) -> str:
    """Whether figures are medians."""
    runs = {row["n"] for row in rows if row["metric"] in ("decode_step_ms", "rollout_s")}
    return "One run an arm." if runs == {1} else "Medians."


def decode_profile(text: str) -> str:
    """One table for each case and phase: classes of kernels by arm, in us a step."""
    content = json.loads(text)
    e, profiles = content["environment"], content["profiles"]
    parts = []
    for place in dict.fromkeys((p["model"], p["case"], p["phase"]) for p in profiles):
        group = [p for p in profiles if (p["model"], p["case"], p["phase"]) == place]
        parts += [f"### {place[0]}, {place[1]}, {place[2]}", _profile(group)]
    parts.append(
        f"`{e['command']}`: one {e['device']}, driver {e['driver']}, SGLang {e['sglang']}, torch "
        f"{e['torch']}, FlashInfer {e['flashinfer']}, {e['date']}, commit {e['commit']}. us a step "
        f"(launches a step), means of {max(p['steps'] for p in profiles)} decode steps or of one "
        f"prefill, by torch's profiler, under which a step lasts longer. Idle: no kernel runs."
    )
    return "\n\n".join(parts)


def _of_model(rows: list[Row]) -> list[str]:
    """The tables of one model."""
    found = {(row["arm"], row["case"], row["metric"]): row for row in rows}
    loads = [case for case in cases_of(found) if "x" in case]
    tables = [
        _table(
            ["decode step", *loads],
            [
                [arm, *(_step(found, arm, load) for load in loads)]
                for arm in arms_of(found, "decode_step_ms")
            ],
        ),
        _table(
            ["prefill", *loads],
            [
                [arm, *(_prefill(found, arm, load) for load in loads)]
                for arm in arms_of(found, "prefill_s")
            ],
        ),
    ]
    head = ["faster", "tokens/s", "retractions", "of requests", "running", "KV tokens", "KV in use"]
    for case in dict.fromkeys(case for _, case, metric in found if metric == "rollout_s"):
        demand = found[
            next(a for a, c, m in found if (c, m) == (case, "rollout_s")), case, "kv_demand"
        ]["median"]
        tables.append(
            f"A {case} requests, whose KV at its peak is {demand:.2f} times what stock BF16 may "
            f"hold:\n\n"
            + _table(
                ["rollout", "time", *head],
                [
                    _rollout(found, arm, case)
                    for arm in arms_of(found, "rollout_s")
                    if (arm, case, "rollout_s") in found
                ],
            )
        )
    return tables


def _step(found: Found, arm: str, load: str) -> str:
    row = found.get((arm, load, "decode_step_ms"))
    if row is None:
        return ""
    floor = found[arm, load, "decode_floor_ms"]["median"]
    return f"{row['median']:.2f} ms{_faster(row)}, {floor / row['median']:.0%} of floor"


def _prefill(found: Found, arm: str, load: str) -> str:
    row = found.get((arm, load, "prefill_s"))
    return f"{row['median']:.3g} s{_faster(row)}" if row else ""


def _rollout(found: Found, arm: str, case: str) -> list[str]:
    row = found[arm, case, "rollout_s"]
    value = {metric: r["median"] for (a, c, metric), r in found.items() if (a, c) == (arm, case)}
    return [
        arm,
        f"{row['median']:.0f} s",
        _faster(row).removeprefix(", "),
        f"{value['rollout_tokens_s']:,.0f}",
        f"{value['retractions']:.0f}",
        f"{value['retracted_requests']:.0f}",
        f"{value['running_requests']:.0f}",
        f"{value['kv_tokens']:,.0f}",
        f"{value['kv_used']:.0%}",
    ]


def _faster(row: Row) -> str:
    """How much faster than the reference, in the same file."""
    ratio = row["ratios"].get(f"{REFERENCE}, {row['case']}")
    return f", {ratio:.2f}x" if ratio else ""


def _profile(group: list[Row]) -> str:
    """Of one case and phase, a column an arm."""
    classes: dict[str, float] = {}
    for profile in group:
        for row in profile["classes"]:
            classes[row["class"]] = max(classes.get(row["class"], 0.0), row["us"])
    order = sorted(classes, key=lambda name: -classes[name])
    lines = [[name, *(_class(profile, [name]) for profile in group)] for name in order[:KERNELS]]
    if rest := order[KERNELS:]:
        lines.append([", ".join(rest), *(_class(profile, rest) for profile in group)])
    lines.append(["idle", *(f"{profile['gap_us']:.0f}" for profile in group)])
    lines.append(["step", *(f"{profile['step_us']:.0f}" for profile in group)])
    return _table(["kernels", *(profile["arm"] for profile in group)], lines)


def _class(profile: Row, names: list[str]) -> str:
    mine = [row for row in profile["classes"] if row["class"] in names]
    if not mine:
        return ""
    return f"{sum(row['us'] for row in mine):.0f} ({sum(row['calls'] for row in mine):.3g})"


def arms_of(found: Found, metric: str) -> list[str]:
    return list(dict.fromkeys(arm for arm, _, name in found if name == metric))


def cases_of(found: Found) -> list[str]:
    """The loads, models in the order of the file, of each the shortest prompts first."""
    cases = dict.fromkeys(case for _, case, metric in found if metric == "decode_step_ms")
    models = list(dict.fromkeys(case.rpartition("\n")[0] for case in cases))

    def place(case: str) -> tuple[int, int, int]:
        model, _, load = case.rpartition("\n")
        batch, length = (int(number) for number in load.split("x"))
        return models.index(model), length, batch

    return sorted(cases, key=place)


def _table(head: list[str], lines: list[list[str]]) -> str:
    """A table, or nothing where it has no lines."""
    if not lines:
        return ""
    made = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in made)
