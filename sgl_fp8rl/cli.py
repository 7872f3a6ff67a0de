"""The console script ``sgl-fp8rl``."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from server_args.args import FORMATS, RAGGED
from sgl_fp8rl import compat, doctor
from sgl_fp8rl.dummy_engine import dummy_engine
from sgl_fp8rl.options import current_options
from sgl_fp8rl.plan import command as plan
from sgl_fp8rl.tables import align


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    arguments = _parser().parse_args(argv)
    if arguments.command == "doctor":
        return doctor.run(arguments.json)
    if arguments.command == "kv-report":
        return _kv_report(arguments)
    if arguments.command == "plot":
        return _plot(arguments)
    if arguments.command == "tune":
        return _tune(arguments.model, arguments.tp)
    if arguments.command == "precision":
        return _precision(arguments)
    if arguments.command == "export":
        return _export(arguments)
    if arguments.command == "follow":
        return _follow(arguments)
    if arguments.command == "plan":
        return plan.run(arguments)
    return _print_layers(arguments.model, arguments.tp, arguments.json)


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

    tune = commands.add_parser("tune", help="measure which FP8 kernel is fastest on this GPU")
    tune.add_argument("model", help="folder of the model; its weights are not read")
    tune.add_argument("--tp", type=int, default=1, help="tensor parallel size (default 1)")

    precision = commands.add_parser(
        "precision", help="rank layers by how FP8 changes logprobs; make an ignore list"
    )
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

    plan.add_arguments(
        commands.add_parser("plan", help="predict a rollout: which flags, and how long")
    )
    export = commands.add_parser(
        "export", help="write a block-FP8 checkpoint that SGLang reads without this plugin"
    )
    export.add_argument(
        "source", help="folder of a BF16 checkpoint, or an engine's http:// address"
    )
    export.add_argument("output", type=Path, help="folder to make")
    export.add_argument(
        "--ignored-layers",
        nargs="+",
        metavar="PATTERN",
        help="layers that stay BF16, as of --fp8rl-ignored-layers (of a folder)",
    )
    export.add_argument(
        "--tp", type=int, help="leave layers BF16 that an engine of this size does (of a folder)"
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
        choices=["abort", "finish", "retract"],
        default="abort",
        help="what happens to running requests (default abort)",
    )
    follow.add_argument("--once", action="store_true", help="end when the engines are up to date")

    report = commands.add_parser("kv-report", help="report scales and errors of an FP8 KV cache")
    report.add_argument("source", help="an engine's http:// address, or a file from --json")
    report.add_argument("--json", metavar="FILE", type=Path, help="save the reply and the report")
    report.add_argument("--picture", metavar="FILE.png", type=Path, help="draw it")
    report.add_argument(
        "--observe",
        action="store_true",
        help="print no report; have the engine measure the error of its next prefills",
    )
    plot = commands.add_parser("plot", help="draw the metrics of runs side by side")
    plot.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="JSONL file, or its folder")
    plot.add_argument("--out", metavar="FILE.png", type=Path, default=Path("runs.png"))
    plot.add_argument("--metrics", nargs="+", metavar="NAME", default=[], help="metrics to draw")
    return parser


def _plot(arguments: argparse.Namespace) -> int:
    if find_spec("matplotlib") is None:
        sys.exit("sgl-fp8rl plot needs matplotlib; run pip install matplotlib")
    from trainer_bridge.metrics import draw

    try:
        draw(arguments.runs, arguments.out, arguments.metrics)
    except (OSError, ValueError) as error:
        sys.exit(f"sgl-fp8rl plot: {error}")
    print(arguments.out)
    return 0


def _kv_report(arguments: argparse.Namespace) -> int:
    from sgl_fp8rl.kv_cache import kv_report
    from trainer_bridge.engine_client import EngineError

    if arguments.picture and find_spec("matplotlib") is None:
        sys.exit("kv-report --picture needs matplotlib; run pip install matplotlib")
    try:
        if arguments.observe:
            tokens = kv_report.observe(arguments.source)
            print(f"the next {tokens} prefilled tokens are measured; run kv-report after them")
            return 0
        reply = kv_report.read(arguments.source)
        lines = kv_report.lines_of(reply)
        print(kv_report.render(reply, lines))
        if arguments.json:
            arguments.json.write_text(kv_report.as_json(reply, lines))
        if arguments.picture:
            kv_report.draw(reply, lines, arguments.picture)
    except (EngineError, OSError, ValueError) as error:
        sys.exit(f"sgl-fp8rl kv-report: {error}")
    return 0


def _tune(model: str, tp_size: int) -> int:
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        sys.exit("sgl-fp8rl tune: no Hopper GPU found; run it on one, others need no tuning")
    from sgl_fp8rl.formats import BLOCK_FP8

    layers = [la for la in read_layers(model, tp_size) if la["format"] == BLOCK_FP8.name]

    from sgl_fp8rl.engine.deep_gemm import compiling_only_what_runs
    from sgl_fp8rl.gemm import command
    from sgl_fp8rl.gemm.expert_tiles import ExpertShape

    shapes = sorted({(n, k) for *experts, n, k in (x["shape"] for x in layers) if not experts})
    stacks = [(*layer["shape"], layer["top_k"]) for layer in layers if layer["top_k"]]
    experts = sorted({ExpertShape(E, H, rows // 2, T) for E, rows, H, T in stacks})
    if not shapes and not experts:
        sys.exit(f"sgl-fp8rl tune: {model} has no block-FP8 layers; unset FP8RL_FORMAT")
    try:
        with compiling_only_what_runs():
            command.run(shapes, experts, current_options().tune_cache)
    except (OSError, ValueError, torch.OutOfMemoryError, compat.IncompatibleSGLangError) as error:
        sys.exit(f"sgl-fp8rl tune: {error}")
    return 0


def _precision(arguments: argparse.Namespace) -> int:
    import torch

    from sgl_fp8rl.sensitivity import command

    try:
        options = command.Options(
            model=arguments.model,
            budget_kl=arguments.budget_kl,
            prompts=arguments.prompts,
            tokens=arguments.tokens,
            kv_cache=arguments.kv_cache_dtype is not None,
            device=arguments.device,
            dtype=getattr(torch, arguments.dtype),
            seed=arguments.seed,
            format=arguments.format,
            ragged=arguments.ragged,
        )
        command.run(options, arguments.output)
    except (OSError, ValueError, MemoryError) as error:
        print(f"sgl-fp8rl precision: {command.first_line(error)}", file=sys.stderr)
        return 2
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from safetensors import SafetensorError

    from sgl_fp8rl import export
    from trainer_bridge.engine_client import EngineError

    try:
        print(
            export.run(arguments.source, arguments.output, arguments.ignored_layers, arguments.tp)
        )
    except (EngineError, ImportError, OSError, ValueError, SafetensorError) as error:
        sys.exit(f"sgl-fp8rl export: {error}")
    return 0


def _follow(arguments: argparse.Namespace) -> int:
    import logging

    from trainer_bridge.chain import ChainError, follow
    from trainer_bridge.engine_client import EngineError

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


def _print_layers(model: str, tp_size: int, as_json: bool) -> int:
    layers = read_layers(model, tp_size)
    print(json.dumps({"layers": layers}, indent=2) if as_json else render_layers(layers))
    return 0


def read_layers(model: str, tp_size: int) -> list[dict[str, Any]]:
    """Start an engine with dummy weights, since only SGLang knows a model's layers.

    Returns:
        One ``quant_config.LayerFormat`` as a dictionary for each layer, as the first rank holds it.
    """
    try:
        with dummy_engine(model, tp_size) as engine:
            layers: list[dict[str, Any]] = engine.fp8rl_control({"op": "layers"})["layers"]
    except ImportError as error:
        sys.exit(f"sgl-fp8rl layers needs SGLang ({error}); run {compat.INSTALL}")
    except (OSError, ValueError) as error:  # transformers raises them where the path has no model
        sys.exit(f"sgl-fp8rl layers {model}: {error}")
    return layers


def render_layers(layers: list[dict[str, Any]]) -> str:
    """A plain text table, one line a layer, and a line that counts formats and reasons."""
    header = ("layer", "shape", "format", "reason or padding")
    rows = [
        (
            layer["name"],
            "x".join(str(size) for size in layer["shape"]),
            layer["format"],
            layer["reason"] or _padding(layer),
        )
        for layer in layers
    ]
    table = align([header, *rows], left=range(len(header)))
    return "\n".join([table, "", _summary(layers)])


def _padding(layer: dict[str, Any]) -> str:
    if not layer["unpadded"]:
        return ""
    size = "x".join(map(str, layer["unpadded"]))
    return f"{size} padded, {layer['padding_bytes'] / 1e6:.2f} MB more"


def _summary(layers: list[dict[str, Any]]) -> str:
    from sgl_fp8rl.formats import UNQUANTIZED, counted

    kept = [layer for layer in layers if layer["format"] == UNQUANTIZED.name]
    reasons = Counter(layer["reason"] or "no reason given" for layer in kept)
    others = "; ".join(f"{number} {reason}" for reason, number in reasons.most_common())
    counts = counted(layer["format"] for layer in layers)
    padding = sum(layer["padding_bytes"] for layer in layers) / 1e6
    counts += f", {padding:.2f} MB of them padding" if padding else ""
    return counts + (f"; not quantized: {others}" if others else "")


if __name__ == "__main__":
    sys.exit(main())
