"""Judge a seed's finished runs of a model by one engine: all BF16, the same held-out problems.

    python examples/parity/judge.py --model dense --seed 0 --state runs/parity

An arm's own evaluations have its engine's precision in them; here only the weights differ that the
arms have learned. What was judged is not judged again. Seed 0 comes with the model that all runs
began with.
"""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import result_rows
from benchmarks.parity import options, policies, pretraining, rollouts
from benchmarks.parity.paths import FINAL, FINISHED, JUDGED, run_folder
from benchmarks.parity.settings import JUDGE, SETTINGS
from benchmarks.parity.variants import ALL_BF16, ARMS
from examples.grpo import placement
from trainer_bridge import update


def to_judge(state: Path, model: str, seed: int) -> list[Path]:
    """Folders of a seed's finished runs of a model that have not been judged."""
    folders = [run_folder(state, arm.name, seed) for arm in ARMS.values() if arm.model == model]
    return [path for path in folders if (path / FINISHED).exists() and not (path / JUDGED).exists()]


def judge(args: argparse.Namespace) -> None:
    """Write ``judged.json`` beside each run's log, and beside the model that all began with."""
    device = torch.device(placement.device_type())
    settings = replace(SETTINGS[args.size], **args.settings)
    start = pretraining.start_of(args.state, args.model, args.size, settings, device)
    folders = to_judge(args.state, args.model, args.seed)
    if args.seed == 0 and not (start / JUDGED).exists():
        folders.insert(0, start)
    keywords = placement.engine_keywords(device.type, JUDGE[device.type]) | args.engine_args
    with placement.running_engine(start, ALL_BF16, 0, keywords) as engine:
        for version, folder in enumerate(folders):
            weights = folder if folder == start else folder / FINAL
            update(policies.load(weights, device), engine, version=version)
            found = rollouts.evaluate(engine, settings.judged_problems, version)
            result_rows.write(folder / JUDGED, {"problems": settings.judged_problems, **found})
            print(f"{folder.name}  {json.dumps(found)}", flush=True)


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description="Judge a seed's runs by one BF16 engine.")
    options.add_common(parser)
    parser.add_argument("--model", choices=policies.MODELS, required=True)
    parser.add_argument("--seed", type=int, required=True, help="whose runs")
    judge(parser.parse_args())


if __name__ == "__main__":
    main()
