"""Evaluate finished runs of a seed and a model by a BF16 engine, on the same held-out problems.

    python -m benchmarks.parity.held_out --model dense --seed 0 --state runs/parity

An arm's own evaluations have its engine's precision in them; here only the weights differ that the
arms have learned. What was evaluated is not evaluated again. The weights that the runs began with
are evaluated, too.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.parity import engines, models, sampling
from benchmarks.parity.arms import ARMS
from benchmarks.parity.dose_arms import ALL_ARMS
from benchmarks.parity.run_log import FINAL, FINISHED, HELD_OUT
from benchmarks.parity.settings import Study, add_options, open_study
from sgl_fp8rl.files import write_whole

# 4096 problems at once, and few engines on a GPU by then
ENGINE = {
    "cpu": {},
    "cuda": {
        "max_total_tokens": 1 << 19,
        "max_running_requests": 1024,
        "cuda_graph_bs_decode": [1, 32, 128, 256, 512, 768, 1024],
    },
}


def weights_of(
    study: Study, model: str, seed: int, names: Sequence[str] | None = None
) -> dict[Path, Path]:
    """Folders to write HELD_OUT into, and the weights that each is about: the start's, then those
    of references, without which no other says anything, then the others'.

    Args:
        names: of the arms whose runs are evaluated, by default all; the start is alone where there
            are none.
    """
    start = study.start_folder(model, study.start_of(seed))
    if names is None:
        names = [arm.name for arm in study.arms.values() if arm.model == model]
    in_order = sorted(names, key=lambda name: ALL_ARMS[name].reference is not None)
    folders = [study.run_folder(name, seed) for name in in_order]
    return {start: start} | {folder: folder / FINAL for folder in folders}


def evaluate(study: Study, model: str, seed: int, names: Sequence[str] | None = None) -> None:
    """Write HELD_OUT beside each finished run's log, and beside the weights that they began with.

    Args:
        names: as for ``weights_of``.
    """
    start = study.start_folder(model, study.start_of(seed))
    weights = {
        folder: checkpoint
        for folder, checkpoint in weights_of(study, model, seed, names).items()
        if folder == start or (folder / FINISHED).exists()
    }
    if all((folder / HELD_OUT).exists() for folder in weights):
        return
    task = sampling.task_of(model, start, study.settings.levels)
    keywords, count = study.engine(ENGINE[study.device.type]), study.settings.held_out_problems
    bf16 = ARMS["bf16"]
    with engines.running(bf16, start, bf16.ignored_layers, 0, keywords) as engine:
        for version, (folder, checkpoint) in enumerate(weights.items()):
            if (folder / HELD_OUT).exists():
                continue
            engine.update(models.load(checkpoint, study.device), version)
            found = {"problems": count, **sampling.evaluate(engine, task, count, version)}
            write_whole(folder / HELD_OUT, json.dumps(found))
            print(f"{folder.name}  {json.dumps(found)}", flush=True)


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description="Evaluate runs of a seed by a BF16 engine.")
    add_options(parser)
    parser.add_argument("--model", choices=(*models.MODELS, models.PRETRAINED), required=True)
    parser.add_argument("--seed", type=int, required=True, help="of the runs")
    parser.add_argument(
        "--arms", nargs="*", choices=ALL_ARMS, help="only runs of these, or the start alone (all)"
    )
    args = parser.parse_args()
    evaluate(open_study(args), args.model, args.seed, args.arms)


if __name__ == "__main__":
    main()
