"""What ``sgl-fp8rl plan`` prints, and what its arithmetic says of GPUs of 80 GB."""

import argparse
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent
from typing import Any

from benchmarks.engines.keywords import FULL
from benchmarks.engines.models import MODELS, config, save_config
from benchmarks.tables.markdown import grid
from sgl_fp8rl.tools.plan import command, shape, speed

FLAGS = "--samples 512 --prompt-tokens 1024 --response-tokens 4000 --max-response-tokens 20000"
NAMES = ("stock-bf16", "fp8rl", "fp8rl-kv8")
METRICS = {"decode_step_ms": "decode step", "prefill_s": "prefill"}
KINDS = {
    "left out": ", a load left out of the fit",
    "other model": " of Qwen3-32B's half, stock-bf16",
}
GPUS = (("one GPU", 1), ("TP 2", 2))


def example(_: Any) -> str:
    """A command and its output, for Qwen3-8B's shape; the figures are those of the package."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()) as printed:
        save_config(MODELS["qwen3-8b"], Path(folder))
        command.run(parser.parse_args([folder, *FLAGS.split()]))
    return indent(f"sgl-fp8rl plan PATH {FLAGS}\n\n{printed.getvalue().rstrip()}", " " * 4)


def errors(figures: Mapping[str, Any]) -> str:
    """How far off what was not fitted is."""
    off = figures["errors"]
    lines = [
        [
            f"{what}{how}",
            f"{each['rows']} rows",
            f"{each['mean']:.1%} in the mean, {each['worst']:.1%} at worst",
        ]
        for kind, how in KINDS.items()
        for metric, what in METRICS.items()
        for each in [off[kind][metric]]
    ]
    for arm, each in off["rollout"].items():
        predicted, measured = each["predicted"], each["measured"]
        both = f"{predicted:.1f} s, measured {measured:.1f}"
        lines.append([f"long tail, {arm}", both, f"{predicted / measured - 1:+.1%}"])
    return grid(["what was predicted", "", "off by"], lines)


def capacities(_: Any) -> str:
    """What an engine holds that has the GPU to itself; nothing of it was measured."""
    free = speed.idle_bytes(speed.H100)
    arms = [arm for arm in speed.ARMS if arm.name in NAMES]
    lines = []
    for model, of in MODELS.items():
        size = shape.of(config(of))
        for where, tp in GPUS:
            fits = [
                speed.kv_tokens(free, size, arm, tp, FULL["mem_fraction_static"]) for arm in arms
            ]
            cells = [f"{tokens:,}" if tokens > 0 else "does not fit" for tokens in fits]
            lines.append([f"{model}, {where}", *cells])
    return grid(["KV tokens", *(arm.name for arm in arms)], lines)
