"""The arguments of ``sgl-fp8rl precision``; what needs torch is imported when it runs."""

import argparse
import sys
from pathlib import Path

from server_args.args import FORMATS, RAGGED


def add_arguments(precision: argparse.ArgumentParser) -> None:
    """Those of ``sgl-fp8rl precision``."""
    precision.add_argument("model", help="folder or hub name of the model, in BF16")
    precision.add_argument(
        "--budget-kl",
        type=float,
        metavar="NATS",
        help="KL per token that the FP8 layers may cost (default: half of all layers')",
    )
    precision.add_argument(
        "--prompts",
        metavar="FILE.jsonl",
        type=Path,
        help='lines {"prompt": ..., "response": ...}; missing responses are sampled',
    )
    precision.add_argument("--tokens", type=int, help="tokens to measure (default 4096, CPU 1024)")
    precision.add_argument("--seed", type=int, default=0, help="seed of sampling (default 0)")
    precision.add_argument(
        "--format",
        choices=FORMATS,
        default=FORMATS[0],
        help="what the layers are in, as of --fp8rl-format (default block-fp8)",
    )
    precision.add_argument(
        "--ragged",
        choices=RAGGED,
        default=RAGGED[0],
        help="layers whose sizes are not multiples of 128, as of --fp8rl-ragged (default pad)",
    )
    precision.add_argument(
        "--kv-cache-dtype", choices=["fp8_e4m3"], help="measure an FP8 KV cache as well"
    )
    precision.add_argument("--device", choices=["cuda", "cpu"], help="default: a GPU if present")
    precision.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default="float32",
        help="dtype of the arithmetic (default float32); bfloat16 halves the memory and hides the "
        "effect of single layers",
    )
    precision.add_argument("--output", metavar="FILE.json", type=Path, help="save the report")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print, and return the exit code."""
    from sgl_fp8rl.tools.precision import command

    try:
        command.run(arguments)
    except (OSError, ValueError, MemoryError) as error:
        print(f"sgl-fp8rl precision: {command.first_line(error)}", file=sys.stderr)
        return 2
    return 0
