"""``sgl-fp8rl plan``: what it prints, and how far it is off."""

import argparse
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent
from typing import Any

from benchmarks.engines.models import MODELS, save_config
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
