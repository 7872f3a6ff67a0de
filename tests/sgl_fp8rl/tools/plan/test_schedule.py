"""The events of a simulated rollout beside the same rollout token by token."""

import random
from collections.abc import Sequence

import pytest

from sgl_fp8rl.tools.plan import schedule
from sgl_fp8rl.tools.plan.schedule import Engine, Request, simulate
from sgl_fp8rl.tools.plan.shape import PlanError
from tests.sgl_fp8rl.tools.plan import schedule_oracle

CHUNK = 300


def decode_ms(batch: int, tokens: float) -> float:
    return 0.4 + 3e-3 * batch + 2e-4 * tokens


def prefill_ms(sizes: Sequence[int], batches: int) -> float:
    return batches + 0.01 * sum(sizes) + 1e-5 * sum(size**2 for size in sizes)


def engine_of(tokens: int, most_running: int = 4096) -> Engine:
    return Engine(tokens, decode_ms, prefill_ms, CHUNK, most_running)


def oracle(engine: Engine, requests: list[Request]) -> schedule_oracle.Told:
    return schedule_oracle.run(
        requests,
        engine.kv_tokens,
        CHUNK,
        decode_ms,
        lambda sizes: prefill_ms(sizes, -(-sum(sizes) // CHUNK)),
        engine.most_running,
    )


def drawn(seed: int, limit: int = 1500) -> list[Request]:
    """Some end at their limit, others long before."""
    rng = random.Random(seed)
    answers = [(rng.randint(1, 120), rng.randint(1, 1500)) for _ in range(40)]
    return [Request(*each, rng.choice([each[1], limit])) for each in answers]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("tokens", [2000, 5000, 12_000, 100_000])
@pytest.mark.parametrize("most_running", [7, 4096])
def test_events_agree_with_single_steps(seed: int, tokens: int, most_running: int) -> None:
    # of half, memory for the limit is reserved in part at first
    requests, engine = drawn(seed, 1500 if seed % 2 else 4600), engine_of(tokens, most_running)
    outcome, told = simulate(engine, requests), oracle(engine, requests)
    assert outcome.retractions == told.retractions
    assert outcome.seconds == pytest.approx(told.ms / 1e3, rel=1e-9)
    generated = sum(each.response for each in requests) - len(requests) - told.retractions
    # each prefill makes a token, and so does each step of each request
    assert outcome.mean_running * told.steps == pytest.approx(generated)
    assert outcome.retractions == 0 or tokens < 100_000


def test_a_small_cache_retracts() -> None:
    """Or the test above would compare nothing of it."""
    seen = [simulate(engine_of(5000), drawn(seed)).retractions for seed in range(8)]
    assert sum(seen) > 10


def test_another_rule_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: memory that is reserved for running requests does not decay."""
    monkeypatch.setattr(schedule, "DECAY_STEPS", 10**9)
    off = []
    for seed in range(4):
        requests, engine = drawn(seed), engine_of(5000)
        told = oracle(engine, requests)
        off.append(abs(simulate(engine, requests).seconds * 1e3 / told.ms - 1))
    assert max(off) > 1e-6


def test_more_memory_never_takes_longer() -> None:
    few, many = (simulate(engine_of(tokens), drawn(1)).seconds for tokens in (2000, 10**6))
    assert many < few


@pytest.mark.parametrize("tokens", [50, 200])
def test_what_never_fits_is_said(tokens: int) -> None:
    with pytest.raises(PlanError, match=f"{tokens} tokens; give the engine more memory"):
        simulate(engine_of(tokens), [Request(100, 300, 300)])


def test_the_tail_is_when_few_run() -> None:
    even = simulate(engine_of(10**6), [Request(10, 100, 1000)] * 16)
    long = simulate(engine_of(10**6), [*[Request(10, 100, 1000)] * 15, Request(10, 1000, 1000)])
    assert even.tail_s == 0.0
    assert long.tail_s > 0.8 * (long.seconds - even.seconds)
