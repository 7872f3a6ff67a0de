"""The arguments of ``sgl-fp8rl plan``."""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from sgl_fp8rl.tools.plan import memory, prediction, report, schedule, shape, workload

DRAWN: dict[str, Any] = {
    "samples": 512,
    "prompt_tokens": 1024,
    "response_tokens": 4000,
    "sigma": 0.8,
}
"""What lengths are drawn by, where no file has them."""
MOST_TOKENS = 20000
MOST_SIGMA = 10.0
"""A larger spread would draw answers longer than any model generates."""


def add_arguments(plan: argparse.ArgumentParser) -> None:
    """Those of ``sgl-fp8rl plan``."""
    plan.add_argument("model", help="folder of the model, or its config.json")
    plan.add_argument("--gpu", choices=["h200", "h100"], default="h200", help="default h200")
    plan.add_argument("--gpus", type=int, default=1, help="GPUs that serve (default 1)")
    plan.add_argument("--tp", type=int, help="GPUs of an engine (default: the fastest of 1 to 8)")
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
    plan.add_argument(
        "--reserved-gib", type=float, default=0.0, help="what a trainer keeps on each GPU"
    )
    plan.add_argument(
        "--mem-fraction-static",
        type=float,
        help="that engines are given (default: all but what SGLang estimates for activations and "
        "CUDA graphs, of the memory that is free)",
    )
    plan.add_argument(
        "--chunked-prefill-size",
        type=int,
        default=8192,
        help="that engines are given (default 8192)",
    )
    plan.add_argument("--train-s", type=float, help="seconds of a training step, if known")
    plan.add_argument("--json", action="store_true", help="print all figures as JSON")
    plan.add_argument(
        "--check", metavar="RUN.json", type=Path, help="compare with the figures of a run"
    )


def check(arguments: argparse.Namespace) -> None:
    """Fill in what lengths are drawn by; check numbers, and what does not go together.

    Raises:
        WorkloadError: one makes no sense.
    """
    given = [name for name in DRAWN if getattr(arguments, name) is not None]
    if arguments.lengths and given:
        option = given[0].replace("_", "-")
        raise workload.WorkloadError(f"--lengths has the samples of a run; drop --{option}")
    vars(arguments).update({name: DRAWN[name] for name in DRAWN if name not in given})
    positive = ("gpus", "samples", "prompt_tokens", "response_tokens", "chunked_prefill_size")
    for name in (*positive, "tp", "max_response_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise workload.WorkloadError(f"--{name.replace('_', '-')} must be at least 1")
    for name, most in (("reserved_gib", math.inf), ("train_s", math.inf), ("sigma", MOST_SIGMA)):
        value = getattr(arguments, name)
        if value is not None and not (0 <= value <= most and math.isfinite(value)):
            at_most = "" if most == math.inf else f" and at most {most:g}"
            raise workload.WorkloadError(f"--{name.replace('_', '-')} must be at least 0{at_most}")
    fraction = arguments.mem_fraction_static
    if fraction is not None and not 0 < fraction < 1:
        raise workload.WorkloadError("--mem-fraction-static is between 0 and 1")
    if arguments.json and arguments.check:
        raise workload.WorkloadError("--json prints predictions alone; drop --check")
    if not arguments.lengths and arguments.response_tokens > _limit(arguments):
        raise workload.WorkloadError(
            f"half of the answers would be cut: --response-tokens is {arguments.response_tokens}; "
            f"give --max-response-tokens more than {_limit(arguments)}"
        )


def _limit(arguments: argparse.Namespace) -> int:
    return arguments.max_response_tokens or MOST_TOKENS


def run(arguments: argparse.Namespace) -> int:
    """Print the prediction and return the exit code."""
    try:
        check(arguments)
        model = shape.read(arguments.model)
        asked = (
            workload.logged(arguments.lengths, arguments.max_response_tokens)
            if arguments.lengths
            else workload.lognormal(
                arguments.samples,
                arguments.prompt_tokens,
                arguments.response_tokens,
                arguments.sigma,
                _limit(arguments),
            )
        )
        cluster = prediction.Cluster(
            memory.gpus()[arguments.gpu],
            arguments.gpus,
            arguments.tp,
            arguments.reserved_gib * memory.GIB,
            arguments.mem_fraction_static,
            arguments.chunked_prefill_size,
        )
        found = prediction.predictions(model, asked, cluster)
        if arguments.check:
            print(report.check(arguments.check, found))
        elif arguments.json:
            print(report.as_json(found))
        else:
            print(report.render(model, asked, cluster, found, arguments.train_s))
    except (
        shape.UnknownModelError,
        workload.WorkloadError,
        schedule.DoesNotFitError,
    ) as error:
        sys.exit(f"sgl-fp8rl plan: {error}")
    return 0
