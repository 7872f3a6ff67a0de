"""The arguments of ``sgl-fp8rl plan``."""

import argparse
import math
import sys
from pathlib import Path

from sgl_fp8rl.tools.plan import report, schedule, shape, speed
from sgl_fp8rl.tools.plan.shape import PlanError

DRAWN = {"samples": 512, "prompt_tokens": 1024, "response_tokens": 4000, "sigma": 0.8}
"""What lengths are drawn by, where no file has them."""
MOST_TOKENS = 20000
BOUNDS = {
    **dict.fromkeys(("gpus", "tp", "samples", "prompt_tokens", "response_tokens"), (1, math.inf)),
    **dict.fromkeys(("max_response_tokens", "chunked_prefill_size"), (1, math.inf)),
    "reserved_gib": (0, 1e6),
    "sigma": (0, 10),  # a larger spread would draw answers longer than any model generates
    "mem_fraction_static": (0.01, 0.99),
}
"""The least and the most of each number."""


def add_arguments(plan: argparse.ArgumentParser) -> None:
    """Those of ``sgl-fp8rl plan``."""
    plan.add_argument("model", help="folder of the model, or its config.json")
    plan.add_argument(
        "--gpu", choices=[speed.H200, speed.H100], default=speed.H200, help="default h200"
    )
    plan.add_argument("--gpus", type=int, default=1, help="GPUs that serve (default 1)")
    plan.add_argument("--tp", type=int, default=1, help="GPUs of an engine (default 1)")
    plan.add_argument("--samples", type=int, help="of a rollout (default 512)")
    plan.add_argument("--prompt-tokens", type=int, help="default 1024")
    plan.add_argument("--response-tokens", type=int, help="median of the answers (default 4000)")
    plan.add_argument("--sigma", type=float, help="of their lognormal lengths (default 0.8)")
    plan.add_argument(
        "--max-response-tokens",
        type=int,
        help=f"max_new_tokens (default {MOST_TOKENS}; with --lengths the longest answer)",
    )
    plan.add_argument(
        "--lengths",
        metavar="FILE.jsonl",
        type=Path,
        help='samples of a run: lines {"prompt_tokens": N, "response_tokens": N}',
    )
    plan.add_argument("--reserved-gib", type=float, default=0.0, help="a trainer's, on each GPU")
    plan.add_argument(
        "--mem-fraction-static",
        type=float,
        help="that engines are given (default: all but what SGLang estimates for activations and "
        "CUDA graphs, of the memory that is free)",
    )
    plan.add_argument("--chunked-prefill-size", type=int, default=8192, help="default 8192")
    plan.add_argument("--json", action="store_true", help="print all figures as JSON")


def check(arguments: argparse.Namespace) -> None:
    """Fill in what lengths are drawn by; check numbers, and what does not go together."""
    given = [name for name in DRAWN if getattr(arguments, name) is not None]
    if arguments.lengths and given:
        option = given[0].replace("_", "-")
        raise PlanError(f"--lengths has the samples of a run; drop --{option}")
    vars(arguments).update({name: DRAWN[name] for name in DRAWN if name not in given})
    for name, (least, most) in BOUNDS.items():
        value = getattr(arguments, name)
        if value is not None and not least <= value <= most:
            at_most = "" if most == math.inf else f" and at most {most:g}"
            option = name.replace("_", "-")
            raise PlanError(f"--{option} is {value}; it must be at least {least}{at_most}")


def run(arguments: argparse.Namespace) -> int:
    """Print the prediction and return the exit code."""
    try:
        check(arguments)
        model = shape.read(arguments.model)
        limit = arguments.max_response_tokens or MOST_TOKENS
        drawn = [*(getattr(arguments, name) for name in DRAWN), limit]
        requests = (
            schedule.logged(arguments.lengths, arguments.max_response_tokens)
            if arguments.lengths
            else schedule.lognormal(*drawn)
        )
        cluster = report.Cluster(
            arguments.gpu,
            speed.idle_bytes(arguments.gpu) - arguments.reserved_gib * speed.GIB,
            arguments.gpus,
            arguments.tp,
            arguments.mem_fraction_static,
            arguments.chunked_prefill_size,
        )
        found = report.predictions(model, requests, cluster)
        if arguments.json:
            print(report.as_json(found))
        else:
            print(report.render(model, requests, cluster, found))
    except PlanError as error:
        sys.exit(f"sgl-fp8rl plan: {error}")
    return 0
