"""``sgl-fp8rl plan``: what it prints, and how far it is off."""

import argparse
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from textwrap import indent
from typing import Any

from benchmarks.engines.models import MODELS, save_config
from benchmarks.plan import fit
from benchmarks.tables.markdown import grid, joined
from sgl_fp8rl.plan import command

FLAGS = "--samples 512 --prompt-tokens 1024 --response-tokens 4000 --max-response-tokens 20000"


def example(_: Any) -> str:
    """A command and its output, for Qwen3-8B's shape; the figures are those of the package."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()) as printed:
        save_config(MODELS["qwen3-8b"], Path(folder))
        command.run(parser.parse_args([folder, *FLAGS.split()]))
    return indent(f"sgl-fp8rl plan PATH {FLAGS}\n\n{printed.getvalue().rstrip()}", " " * 4)


def beside_aiconfigurator(results: dict[str, Any]) -> str:
    """Measured steps of stock arms, and two predictions of each."""
    theirs = {(row["model"], row["case"], row["arm"]): row["median"] for row in results["rows"]}
    decode = [row for row in fit.rows() if row.metric == "decode_step_ms"]
    lines = []
    off: list[tuple[float, float]] = []
    for row, ms in fit.left_out(decode, fit.by_load):
        place = row.model, row.case, row.arm
        if place not in theirs:
            continue
        both = ms, theirs[place]
        off.append((fit.error(row, ms), fit.error(row, theirs[place])))
        cells = [
            f"{each:.1f} ms, {missed:+.0%}" for each, missed in zip(both, off[-1], strict=True)
        ]
        lines.append([", ".join(place), f"{row.ms:.1f} ms", *cells])
    mean = [f"{fmean(map(abs, each)):.1%}" for each in zip(*off, strict=True)]
    facts = results["environment"]
    theirs_of = f"AIConfigurator {facts['aiconfigurator']}, {facts['date']}"
    head = ["decode step", "measured", "plan, without this load", theirs_of]
    return grid(head, [*lines, ["mean error", "", *mean]])


def accuracy(figures: dict[str, Any]) -> str:
    """Rows that were left out of the fit, and rollouts that nothing was fitted to."""
    errors = []
    for name, of in figures["errors"].items():
        ours = f"{of['worst of ours']:.1%}" if "worst of ours" in of else "-"
        first = f"{of['best arm first']} of {of['loads']}" if "loads" in of else "-"
        errors.append(
            [name, str(of["rows"]), f"{of['mean']:.1%}", f"{of['worst']:.1%}", ours, first]
        )
    rollouts = [
        [row["arm"], row["metric"], f"{row['predicted']:.1f}", f"{row['measured']:.1f}"]
        for row in figures["rollouts"]
    ]
    head = ["what was predicted", "rows", "mean error", "worst", "worst of ours", "best arm first"]
    return joined(
        grid(head, errors),
        grid(["rollout with a long tail", "figure", "predicted", "measured"], rollouts),
        f"Of {figures['source']}.",
    )
