"""Judge every finished run of a model by one engine: all BF16, the same held-out problems.

    python examples/parity/judge.py --model dense --state runs/parity

An arm's own evaluations have its engine's precision in them; here only the weights differ that the
arms have learned. A run that was judged is not judged again.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import placement
import rows
import torch
from parity import options, policies, pretraining, rollouts
from parity.layout import FINAL, FINISHED, JUDGED
from parity.settings import ENGINE, SETTINGS
from parity.variants import ALL_BF16, ARMS

from trainer_bridge import update


def to_judge(state: Path, model: str) -> list[Path]:
    """Folders of finished runs of a model that have not been judged."""
    return [
        marker.parent
        for marker in sorted(state.glob(f"*/{FINISHED}"))
        if ARMS[marker.parent.name.rpartition("-")[0]].model == model
        and not (marker.parent / JUDGED).exists()
    ]


def judge(args: argparse.Namespace) -> None:
    """Write ``judged.json`` beside each run's log, and beside the model that all began with."""
    device = torch.device(placement.device_type())
    settings = replace(SETTINGS[args.size], **args.settings)
    start = pretraining.start_of(args.state, args.model, args.size, settings, device)
    folders = [start, *to_judge(args.state, args.model)]
    keywords = placement.engine_keywords(device.type, ENGINE[device.type]) | args.engine_args
    with placement.running_engine(start, ALL_BF16, 0, keywords) as engine:
        for version, folder in enumerate(folders):
            weights = folder if folder == start else folder / FINAL
            update(policies.load(weights, device), engine, version=version)
            found = rollouts.evaluate(engine, settings.judged_problems, version)
            rows.write(folder / JUDGED, {"problems": settings.judged_problems, **found})
            print(f"{folder.name}  {json.dumps(found)}", flush=True)


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description="Judge finished runs by one BF16 engine.")
    options.add_common(parser)
    parser.add_argument("--model", choices=policies.MODELS, required=True)
    judge(parser.parse_args())


if __name__ == "__main__":
    main()
