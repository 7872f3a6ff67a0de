"""One run: GRPO of one arm with one seed, which goes on where it was stopped.

    python -m benchmarks.learning.run --arm kv8-tis --seed 0 --state runs/learning
    python -m benchmarks.learning.run --held-out --seed 0 --state runs/learning

Trainer and engine share a device. Problems are drawn from the seed and the step alone, so nothing
is lost with the process but the engine's own random numbers. Evaluations in a run are of its arm's
engine; ``--held-out`` evaluates a seed's finished runs, and the weights that they began with, by
one BF16 engine, so that only what was learned differs.
"""

import argparse
import fcntl
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from benchmarks.files import write_whole
from benchmarks.learning import sampling, start, study
from benchmarks.learning.learner import Learner, learn
from benchmarks.learning.study import ARMS, LOG, REFERENCE, Arm, Study
from benchmarks.learning.tasks import Task
from benchmarks.pretrained.measured import scaled_blocks
from examples.grpo import tiny_model
from trainer_bridge import connect, fp8_forward, update

CHECKPOINT = "checkpoint.safetensors"
FINISHED = "finished"
"""Empty; exists when the run has come to its end."""
FINAL = "final"
"""Folder of a finished run's weights, in BF16."""
HELD_OUT = "held_out.json"
"""What a BF16 engine found; beside the weights that runs begin with as well."""
STOPPED = 3
"""Exit status of a run whose time was up, and that is to be started again."""
ENGINE_SEEDS = 1_000_003
"""An engine that is started at a later step must not draw the random numbers of the first again."""
# thousands of problems at once, and few engines on a GPU by then
HELD_OUT_ENGINE: dict[str, dict[str, Any]] = {
    "cpu": {},
    "cuda": {
        "max_total_tokens": 1 << 19,
        "max_running_requests": 1024,
        "cuda_graph_bs_decode": [1, 32, 128, 256, 512, 768, 1024],
    },
}
Row = dict[str, Any]


def rows_of(log: Path) -> list[Row]:
    """All rows of a log that are whole."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Be the only process that goes on with the run in ``folder``.

    Raises:
        RuntimeError: another one does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(
                f"another process goes on with the run in {folder}; wait for its end, or end it"
            ) from error
        yield


def save(folder: Path, step: int, state: dict[str, torch.Tensor]) -> None:
    """Replace a run's checkpoint, whole or not at all. ``step``: the one to go on with."""
    unfinished = (folder / CHECKPOINT).with_suffix(".tmp")
    save_file(state, unfinished, metadata={"step": str(step)})
    unfinished.replace(folder / CHECKPOINT)


def resume(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """The step to go on with and the learner's state, which is empty at step 0. What the log has of
    later steps is left out of it: they are done again."""
    step, state = 0, {}
    if (folder / CHECKPOINT).exists():
        with safe_open(folder / CHECKPOINT, "pt") as file:
            step = int(file.metadata()["step"])
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    kept = [row for row in rows_of(folder / LOG) if row["step"] < step]
    write_whole(folder / LOG, "".join(json.dumps(row) + "\n" for row in kept))
    return step, state


def run(of: Study, arm: Arm, seed: int, until: float = math.inf) -> bool:
    """Go on with a run; returns whether it is finished now, or else its time was up."""
    folder, settings = of.run_folder(arm.name, seed), of.settings
    with only_writer(folder):
        if (folder / FINISHED).exists():
            return True
        every = settings.checkpoint_every
        start.make(of)
        model = study.load(of.start, of.device)
        learner = Learner(model, tiny_model.learning_rate(settings.rate, model))
        task = sampling.task_of(of)
        step, state = resume(folder)
        if state:
            learner.restore(state)

        def log(kind: str, **values: Any) -> None:
            row = {"kind": kind, "step": step, **values}
            with (folder / LOG).open("a") as file:
                file.write(json.dumps(row) + "\n")

        with sampling.engine_of(of, arm, seed + ENGINE_SEEDS * step) as engine:
            layers = connect(engine).control({"op": "layers"})["layers"]
            found = [layer["format"] for layer in layers]
            log(
                "engine",
                arm=arm.name,
                seed=seed,
                parameters=model.num_parameters(),
                matrices=len(found),
                fp8_matrices=found.count("block-fp8"),
            )
            fp8 = fp8_forward(model, like=engine) if arm.fp8_forward else None

            def evaluate() -> None:
                """By the arm's own engine, which has the weights of this step."""
                if fp8 is not None:
                    fp8.check(engine)
                found = sampling.evaluate(engine, task, settings.evaluation_problems, step)
                log("evaluation", **found)
                print(f"step {step}  held-out {found['reward']:.3f}", found["by_kind"], flush=True)

            while step < settings.steps:
                if time.time() > until:
                    if step:
                        save(folder, step, learner.state())
                    return False
                seconds = bring(engine, arm, model, step)
                if step % settings.evaluate_every == 0:
                    evaluate()
                row = take_step(of, arm, seed, step, task, engine, learner, fp8)
                log("step", update_s=seconds, **row)
                alarms = [alarm["metric"] for alarm in row["alarms"]]
                print(
                    f"{arm.name}  step {step}  reward {row['reward']:.3f}  mismatch KL "
                    f"{row['mismatch_kl_k3']:.1e}  {row['response_tokens']:.0f} tokens  rollout "
                    f"{row['rollout_s']:.2f} s  training {row['learn_s']:.2f} s  alarms {alarms}",
                    flush=True,
                )
                step += 1
                if step % every == 0 or step == settings.steps > every:
                    save(folder, step, learner.state())
            bring(engine, arm, model, step)
            evaluate()
        study.save(model, folder / FINAL)
        (folder / FINISHED).touch()
        (folder / CHECKPOINT).unlink(missing_ok=True)  # it takes room, and is of no more use
        return True


def bring(engine: Any, arm: Arm, model: PreTrainedModel, version: int) -> float:
    """Update the engine to the weights of a step; returns the seconds."""
    sent = scaled_blocks(model, arm.off) if arm.off else model
    return update(sent, engine, version=version).seconds["total"]


def take_step(
    of: Study, arm: Arm, seed: int, step: int, task: Task, engine: Any, learner: Learner, fp8: Any
) -> Row:
    """Sample and learn; returns the step's row: each metric of ``correct``, also by position in
    the response."""
    shape = of.settings.prompts, of.settings.group
    problems = task.draw(shape[0], f"{seed} step {step}")
    began = time.perf_counter()
    batch = sampling.respond(engine, task, problems, step, shape[1])
    rollout_s = time.perf_counter() - began
    if fp8 is not None:
        fp8.sync_kv_scales(engine)
    began = time.perf_counter()
    rewards = torch.tensor(sampling.rewards_of(task, problems, batch))
    correction, norm = learn(learner, batch, rewards.view(shape), arm.correction)
    return {
        "reward": rewards.mean().item(),
        **sampling.shape_of(batch),
        "gradient_norm": norm,
        "rollout_s": rollout_s,
        "learn_s": time.perf_counter() - began,
        **correction.metrics,
        "alarms": [asdict(alarm) for alarm in correction.alarms],
    }


def held_out(of: Study, seed: int) -> None:
    """Write HELD_OUT beside each finished run of a seed that has none, and beside the weights that
    these began with."""
    finished = [path.parent for path in sorted(of.state.glob(f"*-{seed}/{FINISHED}"))]
    weights = {of.start: of.start} | {folder: folder / FINAL for folder in finished}
    left = [folder for folder in weights if not (folder / HELD_OUT).exists()]
    if not left:
        return
    task, count = sampling.task_of(of), of.settings.held_out_problems
    more = HELD_OUT_ENGINE[of.device.type]
    with sampling.engine_of(of, ARMS[REFERENCE], 0, **more) as engine:
        for version, folder in enumerate(left):
            update(study.load(weights[folder], of.device), engine, version=version)
            found = {"problems": count, **sampling.evaluate(engine, task, count, version)}
            write_whole(folder / HELD_OUT, json.dumps(found))
            print(f"{folder.name}  {json.dumps(found)}", flush=True)


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning")  # SGLang's, of missing libraries
    parser = argparse.ArgumentParser(description="GRPO of one arm with one seed; it resumes.")
    study.add_options(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--arm", choices=ARMS)
    what.add_argument("--held-out", action="store_true", help="evaluate finished runs")
    parser.add_argument("--seed", type=int, default=0, help="of problems and of sampling (0)")
    parser.add_argument(
        "--until", type=float, default=math.inf, metavar="UNIX_TIME", help="stop then, to resume"
    )
    args = parser.parse_args()
    of = study.open_study(args)
    if args.held_out:
        held_out(of, args.seed)
    elif not run(of, ARMS[args.arm], args.seed, args.until):
        sys.exit(STOPPED)


if __name__ == "__main__":
    main()
