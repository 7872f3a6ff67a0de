"""One run of a study: GRPO of one arm with one seed, which goes on where it was stopped.

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

import torch

from benchmarks.parity import engines, models, planting, sampling, scan, start
from benchmarks.parity.arms import Arm
from benchmarks.parity.controlled import Controlled, Fixed
from benchmarks.parity.dose_arms import ALL_ARMS
from benchmarks.parity.learner import Learner
from benchmarks.parity.run_log import FINAL, RunLog, only_writer
from benchmarks.parity.settings import TIMING_STEPS, Study, add_options, open_study
from benchmarks.parity.steps import Steps
from examples.grpo import tiny_model
from sgl_fp8rl.protocol.states import ABORT, RETRACT
from trainer_bridge import FP8Forward, fp8_forward
from trainer_bridge.fp8_forward import convert_layers

STOPPED = 3
"""Exit status of a run whose time was up, and that is to be started again."""
ENGINE_SEEDS = 1_000_003
"""An engine that is started at a later step must not draw the random numbers of the first again."""


def run(study: Study, arm: Arm, seed: int, until: float, is_timed: bool = False) -> bool:
    """Go on with a run; returns whether it is finished now, or else its time was up."""
    folder = study.run_folder(arm.name, seed, is_timed)
    with only_writer(folder):
        run_log = RunLog(folder)
        if run_log.is_finished:
            return True
        this = _Run(study, arm, seed, run_log, TIMING_STEPS if is_timed else study.settings.steps)
        while not this.is_over:
            if not this.go_on(until):
                return False
        this.learner.plant({})
        models.save(this.learner.model, folder / FINAL)
        run_log.finish()
        return True


class _Run:
    """What a run has beside its engine, of which it may need several, one after the other."""

    def __init__(self, study: Study, arm: Arm, seed: int, run_log: RunLog, steps: int) -> None:
        self.study, self.arm, self.seed, self.log, self.steps = study, arm, seed, run_log, steps
        self.is_over = False
        which = study.start_of(seed)
        self.weights = start.start_of(study, arm.model, which)
        self.dose = scan.dose_of(study, arm, which)
        model = models.load(self.weights, study.device)
        self.learner = Learner(model, tiny_model.learning_rate(study.settings.rate, model))
        self.sent = model
        """What updates send: the learner's model, or beside a BF16 engine one with the same weights
        that does not compute in FP8, since that has codes to send."""
        task = sampling.task_of(arm.model, self.weights, study.settings.levels)
        self.take = Steps(study.settings, arm, seed, task, self.learner)
        self.step, state, controller = run_log.resume()
        self.control = Controlled(arm, controller) if arm.controlled else Fixed(arm)
        if state:
            self.learner.restore(state)
        else:
            run_log.add(
                "run",
                arm=arm.name,
                seed=seed,
                start=which,
                parameters=model.num_parameters(),
                engine=study.engine(arm.engine),
                planted=self.dose and asdict(self.dose),
            )

    def go_on(self, until: float) -> bool:
        """Run one engine until the last step, or until it has to be another; returns False where
        the time was up."""
        settings, keywords = self.study.settings, self.study.engine(self.control.engine)
        ignored, seed = self.control.ignored_layers, self.seed + ENGINE_SEEDS * self.step
        with engines.running(self.arm, self.weights, ignored, seed, keywords) as engine:
            formats = engine.formats()
            self.control.started(formats)
            self.log.add(
                "engine",
                step=self.step,
                matrices=len(formats),
                fp8_matrices=[*formats.values()].count("block-fp8"),
                kv_cache=keywords.get("kv_cache_dtype", "auto"),
            )
            if self.arm.fp8_forward and self.take.fp8 is None:
                self.take.fp8 = self.in_fp8(engine)
            self.plant(force=True)
            while self.step < self.steps and not self.control.must_restart:
                if time.time() > until:
                    self.take.wait()  # or it would outlive its engine
                    if self.step:
                        self.save()
                    return False
                self.take_step(engine)
                self.step += 1
                every = settings.checkpoint_every
                if self.step % every == 0 or self.step == self.steps > every:
                    self.save()
            if self.step == self.steps:
                self.update(engine)
                self.evaluate(engine)
                self.is_over = True
        return True

    def in_fp8(self, engine: engines.Engine) -> FP8Forward:
        """Let the learner's model compute with the engine's codes; beside a BF16 engine, with those
        that FP8 would give its layers."""
        model = self.learner.model
        if not self.arm.has_bf16_engine:
            return fp8_forward(model, like=engine.handle)
        self.sent = models.alias(model, self.weights)
        names = {name for name, _ in model.named_parameters() if name.endswith("_proj.weight")}
        return convert_layers(model, names, torch.bfloat16)

    def take_step(self, engine: engines.Engine) -> None:
        """Update the engine, sample, learn."""
        self.plant()
        seconds = self.update(engine)
        batch = self.take.wait()
        if self.step % self.study.settings.evaluate_every == 0:
            self.evaluate(engine)
        row = self.take(engine, self.step, batch, self.control.config)
        if self.arm.retract and self.step + 1 < self.steps:
            self.take.begin(engine, self.step + 1)
        reasons = self.control.observe(row)
        for reason in reasons:
            self.log.add("decision", step=self.step, reason=reason)
        self.log.add("step", step=self.step, update_s=seconds, **row)
        print(
            f"{self.arm.name}  step {self.step}  reward {row['reward']:.3f}  "
            f"mismatch KL {row['mismatch_kl_k3']:.1e}  ESS {row['ess']:.4f}  "
            f"{row['response_tokens']:.0f} tokens, entropy {row['entropy']:.3f}  "
            f"rollout {row['rollout_s']:.2f} s  training {row['learn_s']:.2f} s  "
            f"alarms {[alarm['metric'] for alarm in row['alarms']]}  {' '.join(reasons)}",
            flush=True,
        )

    def plant(self, force: bool = False) -> None:
        """Bring what is planted to this step."""
        model = self.learner.model
        if self.arm.planted and force:
            self.learner.plant(planting.kv_outliers(model))
        if self.dose is not None and (force or self.arm.grows):
            settings, doublings = self.study.settings, 0
            if self.arm.grows and self.step >= settings.grows_after:
                doublings = 1 + (self.step - settings.grows_after) // settings.doubles_every
            self.learner.plant(planting.input_outliers(model, self.dose.grown(doublings)))

    def update(self, engine: engines.Engine) -> float:
        """Bring the engine to the weights of this step; returns the seconds."""
        in_flight = RETRACT if self.take.waits else ABORT
        return engine.update(self.sent, self.step, in_flight)

    def evaluate(self, engine: engines.Engine) -> None:
        """Evaluate on held-out problems, by the arm's own engine."""
        if self.take.fp8 is not None and not self.arm.has_bf16_engine:
            self.take.fp8.check(engine.handle)
        count = self.study.settings.evaluation_problems
        found = sampling.evaluate(engine, self.take.task, count, self.step)
        self.log.add("evaluation", step=self.step, **found)
        print(f"step {self.step}  held-out {found['reward']:.3f}", found["by_kind"], flush=True)

    def save(self) -> None:
        """Write a checkpoint to go on from at this step."""
        self.log.save(self.step, self.learner.state(), self.control.state())


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning")  # SGLang's, of missing libraries
    parser = argparse.ArgumentParser(description="GRPO of one arm with one seed; it resumes.")
    add_options(parser)
    parser.add_argument("--arm", choices=ALL_ARMS, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of problems and of sampling (0)")
    parser.add_argument("--timing", action="store_true", help="a few steps, kept apart")
    parser.add_argument(
        "--until", type=float, default=math.inf, metavar="UNIX_TIME", help="stop then, to resume"
    )
    args = parser.parse_args()
    finished = run(open_study(args), ALL_ARMS[args.arm], args.seed, args.until, args.timing)
    sys.exit(0 if finished else STOPPED)


if __name__ == "__main__":
    main()
