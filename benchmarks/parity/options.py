"""Options that the experiment's scripts share; ``run_all`` hands them on to each job."""

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.parity import policies
from benchmarks.parity.settings import Settings
from examples.grpo import placement

STEPS = 150


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    size = "full" if placement.device_type() == "cuda" else "tiny"
    parser.add_argument("--state", type=Path, default=Path("runs/parity"), help="all runs' folder")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"GRPO steps ({STEPS})")
    parser.add_argument("--size", choices=policies.SIZES, default=size, help=f"of models ({size})")
    parser.add_argument(
        "--settings", type=settings_of, default={}, metavar="JSON", help="other settings: a try-out"
    )
    parser.add_argument(
        "--engine-args",
        type=placement.engine_args,
        default={},
        metavar="JSON",
        help="more keywords of sglang.Engine",
    )


def handed_on(args: argparse.Namespace) -> list[str]:
    """The words that say the same to another script."""
    given = {
        "state": str(args.state),
        "steps": str(args.steps),
        "size": args.size,
        "settings": json.dumps(args.settings),
        "engine-args": json.dumps(args.engine_args),
    }
    return [word for name, value in given.items() for word in (f"--{name}", value)]


def settings_of(text: str) -> dict[str, Any]:
    """Read ``--settings``.

    Raises:
        argparse.ArgumentTypeError: no JSON object, or one with something that is no setting.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    known = {field.name for field in fields(Settings)}
    if not isinstance(value, dict) or (value.keys() - known):
        raise argparse.ArgumentTypeError(f"{text!r} is no object of {', '.join(sorted(known))}")
    return value
