"""One step of a run: sample, learn in one part or several, and perhaps begin the next rollout.

Shapes: P prompts, G responses to each.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from statistics import fmean
from typing import Any

import torch

from benchmarks.parity import sampling
from benchmarks.parity.arms import Arm
from benchmarks.parity.engines import Engine
from benchmarks.parity.learner import Learner, learn, mini_batches_of
from benchmarks.parity.run_log import Row
from benchmarks.parity.settings import Settings
from benchmarks.parity.tasks import Task
from trainer_bridge import CorrectionConfig, FP8Forward, Rollout

HEAD_START = 0.5
"""Of the time of a rollout: how long the next one runs before the update comes."""


class Steps:
    """Takes the steps of a run."""

    def __init__(
        self, settings: Settings, arm: Arm, seed: int, task: Task, learner: Learner
    ) -> None:
        self.task = task
        self._settings, self._arm, self._seed, self._learner = settings, arm, seed, learner
        self._rollouts = ThreadPoolExecutor(1)
        self._next: Future[tuple[Rollout, float]] | None = None
        self._last_s = 0.0
        self.fp8: FP8Forward | None = None
        """Of the learner's model, where it computes with an engine's codes."""

    def __call__(
        self, engine: Engine, step: int, batch: Rollout | None, config: CorrectionConfig
    ) -> Row:
        """Sample, unless ``batch`` is given, and learn; returns the step's row."""
        settings = self._settings
        if batch is None:
            batch, self._last_s = self._respond(engine, step, step)
        if self.fp8 is not None:
            self.fp8.sync_kv_scales(engine.handle)
        began = time.perf_counter()
        rewards = torch.tensor(sampling.rewards_of(self.task, self._problems(step), batch))
        parts = self._arm.mini_batches
        rewards_CPG = rewards.view(parts, settings.prompts // parts, settings.group)
        learned = [
            learn(self._learner, part, rewards_PG, config)
            for part, rewards_PG in zip(mini_batches_of(batch, parts), rewards_CPG, strict=True)
        ]
        corrections = [correction for correction, _ in learned]
        common = set.intersection(*(set(each.metrics) for each in corrections))
        versions = [version for row in batch.versions for version in row]
        return {
            "reward": rewards.mean().item(),
            **sampling.shape_of(batch),
            "old_tokens": fmean(version != step for version in versions),
            "gradient_norm": fmean(norm for _, norm in learned),
            "rollout_s": self._last_s,
            "learn_s": time.perf_counter() - began,
            **{
                name: fmean(each.metrics[name] for each in corrections)
                for name in corrections[0].metrics
                if name in common
            },
            "kl_of_parts": [each.metrics["mismatch_kl_k3"] for each in corrections],
            "alarms": [asdict(alarm) for each in corrections for alarm in each.alarms],
        }

    @property
    def waits(self) -> bool:
        """Whether a rollout is under way."""
        return self._next is not None

    def begin(self, engine: Engine, step: int) -> None:
        """Begin the rollout of a later step with the engine's policy of now; returns when about
        half of it is sampled."""
        self._next = self._rollouts.submit(self._respond, engine, step, None)
        time.sleep(HEAD_START * self._last_s)

    def wait(self) -> Rollout | None:
        """The rollout that was begun, at its end; None if there is none."""
        if self._next is None:
            return None
        (batch, self._last_s), self._next = self._next.result(), None
        return batch

    def _problems(self, step: int) -> list[Any]:
        return self.task.draw(self._settings.prompts, f"{self._seed} step {step}")

    def _respond(self, engine: Engine, step: int, version: int | None) -> tuple[Rollout, float]:
        began = time.perf_counter()
        batch = sampling.respond(
            engine, self.task, self._problems(step), version, self._settings.group
        )
        return batch, time.perf_counter() - began
