"""The console script ``sgl-fp8rl``."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from server_args.args import FORMATS, RAGGED
from sgl_fp8rl.protocol.states import ABORT, IN_FLIGHT
from sgl_fp8rl.tools.doctor import command as doctor
from sgl_fp8rl.tools.layers import read_layers, render_layers
from sgl_fp8rl.tools.plan import command as plan


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    arguments = _parser().parse_args(argv)
    return int(RUN[arguments.command](arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sgl-fp8rl", description="FP8 rollouts for LLM reinforcement learning on SGLang."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    doctor_ = commands.add_parser("doctor", help="check this installation")
    doctor_.add_argument("--json", action="store_true", help="print the findings as JSON")

    layers = commands.add_parser("layers", help="list which layers of a model run in FP8, and why")
    layers.add_argument("model", help="folder of the model; its weights are not read")
    layers.add_argument("--tp", type=int, default=1, help="tensor parallel size (default 1)")
    layers.add_argument("--json", action="store_true", help="print the list as JSON")

    _add_precision(
        commands.add_parser(
            "precision", help="rank layers by how FP8 changes logprobs; make an ignore list"
        )
    )
    plan.add_arguments(
        commands.add_parser("plan", help="predict a rollout: which flags, and how long")
    )
    export = commands.add_parser(
        "export", help="write a block-FP8 checkpoint that SGLang reads without this plugin"
    )
    export.add_argument("source", type=Path, help="folder of a BF16 checkpoint")
    export.add_argument("output", type=Path, help="folder to make")
    export.add_argument(
        "--ignored-layers",
        nargs="+",
        metavar="PATTERN",
        help="layers that stay BF16, as of --fp8rl-ignored-layers",
    )
    export.add_argument(
        "--tp", type=int, default=1, help="leave layers BF16 that an engine of this size does"
    )
    export.add_argument(
        "--format",
        choices=FORMATS,
        default=FORMATS[0],
        help="as of --fp8rl-format (default block-fp8)",
    )

    follow = commands.add_parser(
        "follow", help="keep engines at the newest version of a chain in a folder"
    )
    follow.add_argument("folder", type=Path, help="that a trainer publishes in, or a copy of it")
    follow.add_argument("engines", nargs="+", metavar="ENGINE", help="its http:// address")
    follow.add_argument(
        "--poll-s", type=float, default=1.0, help="seconds between two looks (default 1)"
    )
    follow.add_argument(
        "--in-flight",
        choices=IN_FLIGHT,
        default=ABORT,
        help=f"what happens to running requests (default {ABORT})",
    )
    follow.add_argument("--once", action="store_true", help="end when the engines are up to date")
    return parser


def _add_precision(precision: argparse.ArgumentParser) -> None:
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
    precision.add_argument("--device", choices=["cuda", "cpu"], help="default: a GPU if present")
    precision.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default="float32",
        help="dtype of the arithmetic (default float32); bfloat16 halves the memory and hides the "
        "effect of single layers",
    )
    precision.add_argument("--output", metavar="FILE.json", type=Path, help="save the report")


def _precision(arguments: argparse.Namespace) -> int:
    from sgl_fp8rl.tools.precision import command

    try:
        command.run(arguments)
    except (OSError, ValueError, MemoryError) as error:
        print(f"sgl-fp8rl precision: {command.first_line(error)}", file=sys.stderr)
        return 2
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from safetensors import SafetensorError

    from sgl_fp8rl.tools import export
    from trainer_bridge.engines.engine_client import EngineError

    try:
        given = arguments.ignored_layers, arguments.tp, arguments.format
        print(export.run(arguments.source, arguments.output, *given))
    except (EngineError, ImportError, OSError, ValueError, SafetensorError) as error:
        sys.exit(f"sgl-fp8rl export: {error}")
    return 0


def _follow(arguments: argparse.Namespace) -> int:
    import logging

    from trainer_bridge.chain import ChainError, follow
    from trainer_bridge.engines.engine_client import EngineError

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        follow(
            arguments.folder,
            arguments.engines,
            poll_s=arguments.poll_s,
            once=arguments.once,
            in_flight=arguments.in_flight,
        )
    except KeyboardInterrupt:
        return 130
    except (ChainError, EngineError) as error:
        sys.exit(f"sgl-fp8rl follow: {error}")
    return 0


def _layers(arguments: argparse.Namespace) -> int:
    layers = read_layers(arguments.model, arguments.tp)
    print(json.dumps({"layers": layers}, indent=2) if arguments.json else render_layers(layers))
    return 0


RUN = {
    "doctor": lambda arguments: doctor.run(arguments.json),
    "export": _export,
    "follow": _follow,
    "layers": _layers,
    "plan": plan.run,
    "precision": _precision,
}


if __name__ == "__main__":
    sys.exit(main())
