"""The requests of a rollout, and the rollout on one engine by discrete events.

As in SGLang 0.5.17 (``managers/schedule_policy.py``, ``schedule_batch.py``): requests are admitted
in order while what they may still need fits, prefills go before decode steps, and where the KV
cache is full the request with the shortest output is retracted and computed again later.
"""

import json
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import ceil
from pathlib import Path
from typing import NamedTuple

from sgl_fp8rl.tools.plan.shape import PlanError

SEED = 0
CLIP = 4096
"""New tokens of a request that SGLang reserves memory for, at most."""
FIRST_RATIO, LAST_RATIO, DECAY_STEPS = 0.7, 0.7 * 0.14, 600
"""Share of the reserved tokens of running requests that counts: it decays, step by step."""
RETRACT_STEPS = 20
"""Steps that the share leaves room for after a retraction."""
TAIL = 0.25
"""Of the largest batch: with fewer requests, the engine is in the tail of the rollout."""


class Request(NamedTuple):
    """One sample of a rollout, in tokens."""

    prompt: int
    response: int
    limit: int
    """Its ``max_new_tokens``, by which SGLang decides how many it starts."""


def lognormal(count: int, prompt: int, median: int, sigma: float, limit: int) -> list[Request]:
    """Answers of lognormal lengths, cut at ``limit``."""
    rng = random.Random(SEED)
    drawn = (round(rng.lognormvariate(math.log(median), sigma)) for _ in range(count))
    return [Request(prompt, min(limit, max(1, length)), limit) for length in drawn]


def logged(path: Path, limit: int | None) -> list[Request]:
    """The samples of a run: lines of ``{"prompt_tokens": int, "response_tokens": int}``.

    Args:
        limit: ``max_new_tokens``; None for the longest answer.

    Raises:
        PlanError: they say something else, or an answer is longer than the limit.
    """
    form = '{"prompt_tokens": N, "response_tokens": N}'
    try:
        found = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        samples = [(each["prompt_tokens"], each["response_tokens"]) for each in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{path} is not lines of {form}: {error!r}") from None
    if not samples or any(type(each) is not int or each < 1 for both in samples for each in both):
        raise PlanError(f"{path} has no lines of {form} with N of at least 1")
    longest = max(response for _, response in samples)
    if limit is not None and limit < longest:
        raise PlanError(
            f"{path} has an answer of {longest} tokens; give --max-response-tokens at least that"
        )
    return [Request(*each, longest if limit is None else limit) for each in samples]


@dataclass(frozen=True)
class Engine:
    """What serves, and how fast."""

    kv_tokens: int
    decode_ms: Callable[[int, float], float]
    """Of so many sequences that hold so many tokens; linear in the tokens."""
    prefill_ms: Callable[[Sequence[int], int], float]
    """Of prompts of these lengths, in so many batches."""
    chunk: int = 8192
    """Tokens of a prefill batch."""
    most_running: int = 4096


@dataclass(frozen=True)
class Outcome:
    """Of one rollout."""

    seconds: float
    tail_s: float
    """In which few requests run."""
    retractions: int
    mean_running: float
    """In a decode step."""
    peak_running: int
    step_ms: float
    """Mean of the decode steps."""


@dataclass(eq=False)
class _Sample:
    request: Request
    done: int = 0
    """Tokens of its answer."""

    @property
    def held(self) -> int:
        return self.request.prompt + self.done

    @property
    def may_need(self) -> int:
        """New tokens that SGLang reserves memory for."""
        return min(self.request.limit - self.done, CLIP)


@dataclass
class _Simulation:
    engine: Engine
    waiting: deque[_Sample]
    running: list[_Sample] = field(default_factory=list)
    """In the order in which they started."""
    held: int = 0
    """Tokens of those that run."""
    is_full: bool = False
    ratio: float = FIRST_RATIO
    decode_ms: float = 0.0
    steps: int = 0
    retractions: int = 0
    run_steps: int = 0
    timeline: list[tuple[int, float]] = field(default_factory=list)
    """Running requests, and for how many ms."""

    def admit(self) -> None:
        """Prefill what waits and fits, a batch at a time."""
        while self.waiting and not self.is_full:
            batch = self._next_batch()
            if not batch:
                return
            tokens = [sample.held for sample in batch]
            batches = ceil(sum(tokens) / self.engine.chunk)
            took = self.engine.prefill_ms(tokens, batches)
            self.timeline.append((len(self.running), took))
            for sample in batch:
                sample.done += 1
                self.held += sample.held
            self.running += batch
            self._finish()

    def _next_batch(self) -> list[_Sample]:
        free = self.engine.kv_tokens - self.held
        free -= int(self.ratio * sum(sample.may_need for sample in self.running))
        batch: list[_Sample] = []
        taken = 0
        while self.waiting and taken < self.engine.chunk:
            sample = self.waiting[0]
            needs = sample.held + sample.may_need
            # SGLang starts nothing where one alone may not fit; here it would wait for ever
            alone = not (self.running or batch)
            is_large = needs >= free and not (alone and sample.held < free)
            if is_large or len(self.running) + len(batch) >= self.engine.most_running:
                self.is_full = True
                break
            free -= needs
            taken += sample.held
            batch.append(self.waiting.popleft())
        return batch

    def decode(self) -> None:
        """Decode steps until a request ends, or memory does."""
        if self.held + len(self.running) > self.engine.kv_tokens:
            self._retract()
        batch = len(self.running)
        ends = min(sample.request.response - sample.done for sample in self.running)
        steps = min(ends, (self.engine.kv_tokens - self.held) // batch)
        if self.waiting and not self.is_full:  # behind a retraction, what waits is tried again
            steps = 1
        # linear in the tokens that are read, so that the step in the middle is the mean
        took = steps * self.engine.decode_ms(batch, self.held + (steps + 1) / 2 * batch)
        self.decode_ms += took
        self.timeline.append((batch, took))
        self.steps += steps
        self.run_steps += steps * batch
        self.ratio = max(self.ratio - steps * (FIRST_RATIO - LAST_RATIO) / DECAY_STEPS, LAST_RATIO)
        for sample in self.running:
            sample.done += steps
        self.held += steps * batch
        self._finish()

    def _finish(self) -> None:
        left = [sample for sample in self.running if sample.done < sample.request.response]
        if len(left) < len(self.running):
            self.running, self.held = left, sum(sample.held for sample in left)
            self.is_full = False

    def _retract(self) -> None:
        """Make room for one more token of each request that stays."""
        while self.held + len(self.running) > self.engine.kv_tokens:
            # the shortest output, then the longest prompt, then the one that started last
            _, sample = min(
                enumerate(self.running),
                key=lambda each: (each[1].done, -each[1].request.prompt, -each[0]),
            )
            self.running.remove(sample)
            self.held -= sample.held
            if not self.running:
                raise PlanError(
                    f"a request of {sum(sample.request[:2])} tokens does not fit into a KV cache "
                    f"of {self.engine.kv_tokens} tokens; give the engine more memory"
                )
            self.waiting.append(sample)
            self.retractions += 1
        self.is_full = False
        decoded = sum(sample.done for sample in self.running)
        room = RETRACT_STEPS * len(self.running)
        limits = sum(sample.request.limit for sample in self.running)
        self.ratio = min((decoded + room) / (limits + 1), 1.0)

    def outcome(self) -> Outcome:
        peak = max(running for running, _ in self.timeline)
        tail = takewhile(lambda each: each[0] < TAIL * peak, reversed(self.timeline))
        return Outcome(
            seconds=sum(took for _, took in self.timeline) / 1e3,
            tail_s=sum(took for _, took in tail) / 1e3,
            retractions=self.retractions,
            mean_running=self.run_steps / max(self.steps, 1),
            peak_running=peak,
            step_ms=self.decode_ms / max(self.steps, 1),
        )


def simulate(engine: Engine, requests: Sequence[Request]) -> Outcome:
    """One rollout.

    Raises:
        PlanError: the KV cache is too small for one of them.
    """
    simulation = _Simulation(engine, deque(map(_Sample, requests)))
    while simulation.waiting or simulation.running:
        simulation.admit()
        if simulation.running:
            simulation.decode()
        elif simulation.waiting:
            prompt = simulation.waiting[0].request.prompt
            raise PlanError(
                f"a prompt of {prompt} tokens does not fit into a KV cache of "
                f"{engine.kv_tokens} tokens; give the engine more memory"
            )
    return simulation.outcome()
