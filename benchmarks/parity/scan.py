"""How large the mismatch of a start is for each planted gain, and which gain makes a dose.

    python -m benchmarks.parity.scan --study doses --model dense --state runs/doses

One engine, updated with one planted model after the other, responds once to the same problems. A
dose is the gain whose k3 is nearest in logarithm, the mildest of those equally near. So doses are
of the device at hand, and each start has its own. Beside it: what is left of k3 where the trainer
computes with the engine's codes, whose kernels for the runs are compiled here.
"""

import argparse
import json
import math
import os
from dataclasses import asdict
from pathlib import Path

from benchmarks.parity import engines, models, sampling, start
from benchmarks.parity.arms import Arm
from benchmarks.parity.learner import Learner, trainer_logprobs
from benchmarks.parity.planting import Planting, input_outliers, plantings
from benchmarks.parity.run_log import Row, rows_of
from benchmarks.parity.settings import Study, add_options, open_study
from sgl_fp8rl.files import write_whole
from trainer_bridge import correct, fp8_forward

SCAN = "scan.jsonl"
"""In the folder of a start; its first row is of the unplanted model."""
METRICS = "mismatch_kl_k3", "ess", "logprob_abs_diff_max", "rollout_nll", "tokens"
"""Of each row; with the prefix ``fp8_forward/`` those that this leaves."""


def dose_of(study: Study, arm: Arm, which: int) -> Planting | None:
    """What is planted at an arm's first step; None where nothing is."""
    if arm.dose is None:
        return None
    row = nearest(rows_of(scan_of(study, arm.model, which)), arm.dose)
    return Planting(row["exponent"], row["every"])


def nearest(rows: list[Row], dose: float) -> Row:
    """The row whose k3 is nearest to ``dose``, in logarithm."""
    planted = [row for row in rows if row["exponent"]]
    return min(planted, key=lambda row: abs(math.log(max(row["mismatch_kl_k3"], 1e-12) / dose)))


def scan_of(study: Study, model: str, which: int) -> Path:
    """File of a start's scan; made here if there is none yet."""
    path = study.start_folder(model, which) / SCAN
    if not path.exists():
        checkpoint = start.start_of(study, model, which)
        rows = scan(study, model, checkpoint)
        write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
    return path


def scan(study: Study, model: str, checkpoint: Path) -> list[Row]:
    """A row for each planting, in the engine of the model's planted arms."""
    mine = [arm for arm in study.arms.values() if arm.model == model]
    arm = next(arm for arm in mine if arm.dose is not None)
    settings = study.settings
    task = sampling.task_of(model, checkpoint, settings.levels)
    problems = task.draw(settings.prompts, "scan")
    trainer, in_fp8 = (
        Learner(models.load(checkpoint, study.device), learning_rate=0.0) for _ in range(2)
    )
    rows = []
    keywords = study.engine(arm.engine)
    with engines.running(arm, checkpoint, arm.ignored_layers, 0, keywords) as engine:
        learners = {"": trainer}
        if any(arm.fp8_forward for arm in mine):
            fp8_forward(in_fp8.model, like=engine.handle)
            learners["fp8_forward/"] = in_fp8
        for version, planting in enumerate([Planting(0, 1), *plantings(settings.exponents)]):
            for learner in learners.values():
                learner.plant(input_outliers(learner.model, planting))
            engine.update(trainer.model, version)
            batch = sampling.respond(engine, task, problems, version, settings.group)
            row = asdict(planting)
            for prefix, learner in learners.items():
                found = correct(batch, trainer_logprobs(learner.model, batch), "disabled").metrics
                row |= {prefix + name: found[name] for name in METRICS}
            rows.append(row)
            print(f"{model}  {json.dumps(rows[-1])}", flush=True)
    return rows


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description="Measure the mismatch of each planted gain.")
    add_options(parser)
    parser.add_argument("--model", choices=models.MODELS, required=True)
    parser.add_argument("--start", type=int, default=0, help="which one (0)")
    args = parser.parse_args()
    study = open_study(args)
    rows = rows_of(scan_of(study, args.model, args.start))
    mine = [arm.dose for arm in study.arms.values() if arm.model == args.model]
    for dose in sorted({dose for dose in mine if dose is not None}):
        print(f"{dose:g} nats: {json.dumps(nearest(rows, dose))}")


if __name__ == "__main__":
    main()
