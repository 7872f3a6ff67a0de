"""What ``sgl-fp8rl plan`` prints, and what its arithmetic says of GPUs of 80 GB."""

import argparse
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent
from typing import Any

from benchmarks.engines.keywords import FULL
from benchmarks.engines.models import MODELS, config, save_config
from benchmarks.tables.markdown import grid
from sgl_fp8rl.tools.plan import command, memory, shape
from sgl_fp8rl.tools.plan.speed import ARMS

FLAGS = "--samples 512 --prompt-tokens 1024 --response-tokens 4000 --max-response-tokens 20000"
NAMES = ("stock-bf16", "fp8rl", "fp8rl-kv8")
GPUS = (("one GPU", 1), ("TP 2", 2))


def example(_: Any) -> str:
    """A command and its output, for Qwen3-8B's shape; the figures are those of the package."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()) as printed:
        save_config(MODELS["qwen3-8b"], Path(folder))
        command.run(parser.parse_args([folder, *FLAGS.split()]))
    return indent(f"sgl-fp8rl plan PATH {FLAGS}\n\n{printed.getvalue().rstrip()}", " " * 4)


def capacities(_: Any) -> str:
    """What an engine holds that has the GPU to itself; nothing of it was measured."""
    gpu = memory.gpus()["h100"]
    arms = [arm for arm in ARMS if arm.name in NAMES]
    lines = []
    for model, of in MODELS.items():
        size = shape.of(config(of))
        for where, tp in GPUS:
            fits = [
                memory.kv_tokens(gpu, size, arm, tp, 0.0, FULL["mem_fraction_static"])
                for arm in arms
            ]
            cells = [f"{tokens:,}" if tokens > 0 else "does not fit" for tokens in fits]
            lines.append([f"{model}, {where}", *cells])
    return grid(["KV tokens", *(arm.name for arm in arms)], lines)
