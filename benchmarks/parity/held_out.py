"""Evaluate a seed's finished runs of a model by one BF16 engine, on the same held-out problems.

    python -m benchmarks.parity.held_out --model dense --seed 0 --state runs/parity

An arm's own evaluations have its engine's precision in them; here only the weights differ that the
arms have learned. What was evaluated is not evaluated again. Seed 0 comes with the weights that all
runs began with.
"""

import argparse
import json
import os

from benchmarks.parity import models, sampling
from benchmarks.parity.arms import ALL_BF16, ARMS
from benchmarks.parity.run_log import FINAL, FINISHED, HELD_OUT
from benchmarks.parity.settings import Study, add_options, open_study
from examples.grpo.engine import running_engine
from trainer_bridge import update

# 4096 problems at once, and few engines on a GPU by then
ENGINE = {
    "cpu": {},
    "cuda": {
        "max_total_tokens": 1 << 19,
        "max_running_requests": 1024,
        "cuda_graph_bs_decode": [1, 32, 128, 256, 512, 768, 1024],
    },
}


def evaluate(study: Study, model: str, seed: int) -> None:
    """Write HELD_OUT beside each run's log, and beside the weights that all began with."""
    start = study.start_folder(model)
    runs = [study.run_folder(arm.name, seed) for arm in ARMS.values() if arm.model == model]
    weights = {folder: folder / FINAL for folder in runs if (folder / FINISHED).exists()}
    if seed == 0:
        weights[start] = start
    missing = [folder for folder in weights if not (folder / HELD_OUT).exists()]
    task = sampling.task_of(model, start)
    keywords, count = study.engine(ENGINE[study.device.type]), study.settings.held_out_problems
    with running_engine(start, ALL_BF16, 0, keywords) as engine:
        for version, folder in enumerate(missing):
            update(models.load(weights[folder], study.device), engine, version=version)
            found = {"problems": count, **sampling.evaluate(engine, task, count, version)}
            (folder / HELD_OUT).write_text(json.dumps(found))
            print(f"{folder.name}  {json.dumps(found)}", flush=True)


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description="Evaluate a seed's runs by one BF16 engine.")
    add_options(parser)
    parser.add_argument("--model", choices=(*models.MODELS, models.PRETRAINED), required=True)
    parser.add_argument("--seed", type=int, required=True, help="whose runs")
    args = parser.parse_args()
    evaluate(open_study(args), args.model, args.seed)


if __name__ == "__main__":
    main()
