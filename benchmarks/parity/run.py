"""One run of the study: GRPO of one arm with one seed, which goes on where it was stopped.

    python -m benchmarks.parity.run --arm fp8-kv8 --seed 0 --state runs/parity

Trainer and engine share a device. Problems are drawn from the seed and the step alone, so nothing
is lost with the process but the engine's own random numbers.
"""

import argparse
import math
import os
import sys
import time
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.parity import models, sampling, start
from benchmarks.parity.arms import ARMS, Arm
from benchmarks.parity.learner import Learner, learn
from benchmarks.parity.run_log import FINAL, RunLog
from benchmarks.parity.settings import TIMING_STEPS, Settings, Study, add_options, open_study
from benchmarks.parity.tasks import Task
from examples.grpo import tiny_model
from examples.grpo.engine import running_engine
from trainer_bridge import connect, update

STOPPED = 3
"""Exit status of a run whose time was up, and that is to be started again."""
ENGINE_SEEDS = 1_000_003
"""An engine that is started at a later step must not draw the random numbers of the first again."""


def run(study: Study, arm: Arm, seed: int, until: float, is_timed: bool = False) -> bool:
    """Go on with a run; returns whether it is finished now, or else its time was up."""
    run_log = RunLog(study.run_folder(arm.name, seed, is_timed))
    if run_log.is_finished:
        return True
    settings = study.settings
    steps = TIMING_STEPS if is_timed else settings.steps
    weights = start.start_of(study, arm.model)
    task = sampling.task_of(arm.model, weights)
    model = models.load(weights, study.device)
    frozen = models.plant(model) if arm.planted else []
    learner = Learner(model, tiny_model.learning_rate(settings.rate, model), frozen)
    keywords = study.engine(arm.engine)
    step, state = run_log.resume()
    if state:
        learner.restore(state)
    else:
        about = {"parameters": model.num_parameters(), "engine": keywords}
        run_log.add("run", arm=arm.name, seed=seed, **about)
    engine_seed = seed + ENGINE_SEEDS * step
    with running_engine(weights, arm.ignored_layers, engine_seed, keywords) as engine:
        formats = [row["format"] for row in connect(engine).control({"op": "layers"})["layers"]]
        counts = {"matrices": len(formats), "fp8_matrices": formats.count("fp8")}
        run_log.add("engine", step=step, **counts)
        while step < steps:
            if time.time() > until:
                if step:
                    run_log.save(step, learner.state())
                return False
            updated = update(model, engine, version=step)
            if step % settings.evaluate_every == 0:
                evaluate(engine, task, run_log, step, settings)
            row = take_step(engine, task, learner, arm, seed, step, settings)
            run_log.add("step", step=step, update_s=updated.seconds["total"], **row)
            print(
                f"{arm.name}  step {step}  reward {row['reward']:.3f}  "
                f"mismatch KL {row['mismatch_kl_k3']:.1e}  ESS {row['ess']:.4f}  "
                f"{row['response_tokens']:.0f} tokens, entropy {row['entropy']:.3f}  "
                f"rollout {row['rollout_s']:.2f} s  training {row['learn_s']:.2f} s  "
                f"alarms {[alarm['metric'] for alarm in row['alarms']]}",
                flush=True,
            )
            step += 1
            if step % settings.checkpoint_every == 0 or step == steps:
                run_log.save(step, learner.state())
        update(model, engine, version=step)
        evaluate(engine, task, run_log, step, settings)
    models.save(model, run_log.folder / FINAL)
    run_log.finish()
    return True


def evaluate(engine: Any, task: Task, run_log: RunLog, step: int, settings: Settings) -> None:
    """Evaluate on held-out problems, by the arm's own engine."""
    found = sampling.evaluate(engine, task, settings.evaluation_problems, version=step)
    run_log.add("evaluation", step=step, **found)
    print(f"step {step}  held-out {found['reward']:.3f}", found["by_kind"], flush=True)


def take_step(
    engine: Any, task: Task, learner: Learner, arm: Arm, seed: int, step: int, settings: Settings
) -> dict[str, Any]:
    """Sample from the engine, and learn; returns the step's row."""
    started = time.perf_counter()
    problems = task.draw(settings.prompts, f"{seed} step {step}")
    batch = sampling.respond(engine, task, problems, step, settings.group)
    sampled = time.perf_counter()
    rewards = torch.tensor(sampling.rewards_of(task, problems, batch))
    rewards_PG = rewards.view(settings.prompts, settings.group)
    correction, gradient_norm = learn(learner, batch, rewards_PG, arm.correction)
    return {
        "reward": rewards.mean().item(),
        **sampling.shape_of(batch),
        "gradient_norm": gradient_norm,
        "rollout_s": sampled - started,
        "learn_s": time.perf_counter() - sampled,
        **correction.metrics,
        "alarms": [asdict(alarm) for alarm in correction.alarms],
    }


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning")  # SGLang's, of missing libraries
    parser = argparse.ArgumentParser(description="GRPO of one arm with one seed; it resumes.")
    add_options(parser)
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of problems and of sampling (0)")
    parser.add_argument("--timing", action="store_true", help="a few steps, kept apart")
    parser.add_argument(
        "--until", type=float, default=math.inf, metavar="UNIX_TIME", help="stop then, to resume"
    )
    args = parser.parse_args()
    finished = run(open_study(args), ARMS[args.arm], args.seed, args.until, args.timing)
    sys.exit(0 if finished else STOPPED)


if __name__ == "__main__":
    main()
