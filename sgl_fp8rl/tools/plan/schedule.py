"""One rollout on one engine, by discrete events: SGLang's scheduler, with predicted step times.

As in SGLang 0.5.17 (``managers/schedule_policy.py``, ``schedule_batch.py``): requests are admitted
in order while what they may still need fits, prefills go before decode steps, and where the KV
cache is full the request with the shortest output is retracted and computed again later.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from sgl_fp8rl.tools.plan.running import Running, Sample
from sgl_fp8rl.tools.plan.shape import Shape
from sgl_fp8rl.tools.plan.speed import Arm, Speed
from sgl_fp8rl.tools.plan.workload import Request

FIRST_RATIO, LAST_RATIO, DECAY_STEPS = 0.7, 0.7 * 0.14, 600
"""Share of the reserved tokens of running requests that counts: it decays, step by step."""
RETRACT_STEPS = 20
"""Steps that the share leaves room for after a retraction."""
TAIL = 0.25
"""Of the largest batch: with fewer requests, the engine is in the tail of the rollout."""


class DoesNotFitError(ValueError):
    """A request alone needs more KV cache than there is."""


@dataclass(frozen=True)
class Engine:
    """What serves, and how fast."""

    arm: Arm
    shape: Shape
    speed: Speed
    kv_tokens: int
    chunk: int = 8192
    """Tokens of a prefill batch."""
    most_running: int = 4096
    tp: int = 1


@dataclass(frozen=True)
class Outcome:
    """Of one rollout."""

    seconds: float
    prefill_s: float
    tail_s: float
    """In which few requests run."""
    retractions: int
    mean_running: float
    """In a decode step."""
    peak_running: int
    peak_kv: float
    """Share of the KV cache."""
    step_ms: float
    """Mean of the decode steps."""


class _Simulation:
    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self.engine = engine
        self.waiting = deque(Sample(each.prompt, each.response, each.limit) for each in requests)
        self.running = Running()
        self.is_full = False
        self.ratio = FIRST_RATIO
        self.prefill_ms = self.decode_ms = self.run_steps = 0.0
        self.steps = self.retractions = self.peak = 0
        self.peak_tokens = 0
        self.timeline: list[tuple[int, float]] = []
        """Running requests, and for how many ms."""

    def admit(self) -> None:
        """Prefill what waits and fits, a batch at a time."""
        while self.waiting and not self.is_full:
            batch = self._next_batch()
            if not batch:
                return
            tokens = [sample.held for sample in batch]
            batches = ceil(sum(tokens) / self.engine.chunk)
            took = self._prefill_ms(tokens, batches)
            self.prefill_ms += took
            self.timeline.append((self.running.size, took))
            for sample in batch:
                sample.done += 1
                self.running.add(sample)
            self._finish()

    def _next_batch(self) -> list[Sample]:
        free = self.engine.kv_tokens - self.running.tokens
        free -= int(self.ratio * self.running.may_need)
        batch: list[Sample] = []
        taken = 0
        while self.waiting and taken < self.engine.chunk:
            if self.running.size + len(batch) >= self.engine.most_running:
                self.is_full = True
                break
            sample = self.waiting[0]
            needs = sample.held + sample.may_need
            # SGLang starts nothing where one alone may not fit; here it would wait for ever
            if needs >= free and (self.running.size or batch or sample.held >= free):
                self.is_full = True
                break
            free -= needs
            taken += sample.held
            batch.append(self.waiting.popleft())
        return batch

    def decode(self) -> None:
        """Decode steps until a request ends, or memory does."""
        running = self.running
        if running.tokens + running.size > self.engine.kv_tokens:
            self._retract()
        batch = running.size
        steps = min(running.steps(), (self.engine.kv_tokens - running.tokens) // batch)
        if self.waiting and not self.is_full:  # behind a retraction, what waits is tried again
            steps = 1
        # linear in the tokens that are read, so that the step in the middle is the mean
        took = steps * self._step_ms(batch, running.tokens + (steps + 1) / 2 * batch)
        self.decode_ms += took
        self.timeline.append((batch, took))
        self.steps += steps
        self.run_steps += steps * batch
        self.ratio = max(self.ratio - steps * (FIRST_RATIO - LAST_RATIO) / DECAY_STEPS, LAST_RATIO)
        running.advance(steps)
        self.peak = max(self.peak, batch)
        self.peak_tokens = max(self.peak_tokens, running.tokens)
        self._finish()

    def _finish(self) -> None:
        if self.running.finish():
            self.is_full = False

    def _retract(self) -> None:
        """Make room for one more token of each request that stays."""
        running = self.running
        while running.tokens + running.size > self.engine.kv_tokens:
            sample = running.shortest()
            running.remove(sample)
            if not running.size:
                raise DoesNotFitError(
                    f"a request of {sample.prompt + sample.response} tokens does not fit into a KV "
                    f"cache of {self.engine.kv_tokens} tokens; give the engine more memory"
                )
            self.waiting.append(sample)
            self.retractions += 1
        self.is_full = False
        decoded = running.tokens - running.prompts
        room = RETRACT_STEPS * running.size
        self.ratio = min((decoded + room) / (running.limits + 1), 1.0)

    def _step_ms(self, batch: int, tokens: float) -> float:
        engine = self.engine
        return engine.speed.decode_ms(engine.arm, engine.shape, batch, tokens, engine.tp)

    def _prefill_ms(self, lengths: Sequence[int], batches: int) -> float:
        engine = self.engine
        return engine.speed.prefill_ms(engine.arm, engine.shape, lengths, batches, engine.tp)

    def outcome(self) -> Outcome:
        few = TAIL * self.peak
        tail = 0.0
        for running, took in reversed(self.timeline):
            if running >= few:
                break
            tail += took
        return Outcome(
            seconds=(self.prefill_ms + self.decode_ms) / 1e3,
            prefill_s=self.prefill_ms / 1e3,
            tail_s=tail / 1e3,
            retractions=self.retractions,
            mean_running=self.run_steps / max(self.steps, 1),
            peak_running=self.peak,
            peak_kv=self.peak_tokens / self.engine.kv_tokens,
            step_ms=self.decode_ms / max(self.steps, 1),
        )


def simulate(engine: Engine, requests: Sequence[Request]) -> Outcome:
    """One rollout.

    Raises:
        DoesNotFitError: the KV cache is too small for one of them.
    """
    simulation = _Simulation(engine, requests)
    while simulation.waiting or simulation.running.size:
        simulation.admit()
        if simulation.running.size:
            simulation.decode()
        elif simulation.waiting:
            sample = simulation.waiting[0]
            raise DoesNotFitError(
                f"a prompt of {sample.prompt} tokens does not fit into a KV cache of "
                f"{engine.kv_tokens} tokens; give the engine more memory"
            )
    return simulation.outcome()
