"""Where in a response the mismatch is, by what the engine keeps in FP8 and by kind of problem.

    python -m benchmarks.parity.positions --study long --model dense --state runs/long

Nothing is trained: engines sample with the weights that runs begin with, and the trainer computes
the same tokens. A kind of problem alone tells what late tokens are: of all kinds together, other
problems have long responses than have short ones.
"""

import argparse
import json
import os
from pathlib import Path

from benchmarks.parity import engines, models, sampling
from benchmarks.parity.arms import ALL_BF16, ARMS, KV8, Arm
from benchmarks.parity.learner import mini_batches_of, trainer_logprobs
from benchmarks.parity.run_log import Row
from benchmarks.parity.settings import Settings, Study, add_options, open_study
from benchmarks.parity.tasks import KINDS, Problem, Task
from sgl_fp8rl.files import write_whole
from trainer_bridge import correct

ENGINES = {
    arm.name: arm
    for arm in (
        Arm("bf16-kv8", None, ignored_layers=ALL_BF16, engine=KV8),
        ARMS["bf16"],
        ARMS["fp8"],
        ARMS["fp8-kv8"],
    )
}
"""Weights and KV cache in BF16 or FP8; on two GPUs those go first that tell the two apart."""
POSITIONS = "positions-"
STARTS = (16, 64, 256)
"""First tokens of the ranges of positions, of those that ``trainer_bridge.correct`` reports."""
METRICS = "mismatch_kl_k3", "logprob_abs_diff_mean", "rollout_nll", "tokens"
PARTS = 4
"""Of the responses to a kind, to see how far k3 spreads: it is made by few tokens."""


def path_of(study: Study, model: str, start: int, engine: str) -> Path:
    """File of an engine's rows, beside the weights that it samples with."""
    return study.start_folder(model, start) / f"{POSITIONS}{engine}.jsonl"


def measure(study: Study, model: str, start: int, name: str) -> list[Row]:
    """A row for each kind of problem of the study's highest level: of each of ``METRICS`` and each
    range of positions, by its first token, a value for each part of the responses.

    Raises:
        ValueError: the study measures no problems by position.
    """
    arm, checkpoint, settings = ENGINES[name], study.start_folder(model, start), study.settings
    task = sampling.task_of(model, checkpoint, settings.levels)
    by_kind = problems_of(task, settings)
    trained = models.load(checkpoint, study.device)
    keywords = study.engine(arm.engine)
    with engines.running(arm, checkpoint, arm.ignored_layers, 0, keywords) as engine:
        engine.update(trained, 0)
        batch = sampling.respond(engine, task, [p for mine in by_kind.values() for p in mine], 0)
    found = [
        correct(part, trainer_logprobs(trained, part), "disabled").metrics
        for part in mini_batches_of(batch, len(by_kind) * PARTS)
    ]
    # a range without a token is not reported: it has 0 tokens then
    return [
        {"engine": name, "problems": kind}
        | {
            metric: {
                f"{first}": [
                    part.get(f"position_{first}/{metric}", 0.0) for part in found[at : at + PARTS]
                ]
                for first in STARTS
            }
            for metric in METRICS
        }
        for at, kind in zip(range(0, len(found), PARTS), by_kind, strict=True)
    ]


def problems_of(task: Task, settings: Settings) -> dict[str, list[Problem]]:
    """By kind, as many of the highest level as the study measures."""
    count, level = settings.position_problems * PARTS, max(settings.levels)
    if not count:
        raise ValueError("this study measures nothing by position; give it position_problems")
    found: dict[str, list[Problem]] = {kind: [] for kind in KINDS}
    for problem in task.draw(count * 2 * len(KINDS) * len(settings.levels), "positions"):
        if problem.level == level and len(found[problem.kind]) < count:
            found[problem.kind].append(problem)
    assert {len(mine) for mine in found.values()} == {count}, "too few problems were drawn"
    return found


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description="Measure the mismatch by position in responses.")
    add_options(parser)
    parser.add_argument("--model", choices=models.MODELS, required=True)
    parser.add_argument("--start", type=int, default=0, help="which one (0)")
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=[*ENGINES])
    args = parser.parse_args()
    study = open_study(args)
    for name in args.engines:
        path = path_of(study, args.model, args.start, name)
        if not path.exists():
            rows = measure(study, args.model, args.start, name)
            write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
