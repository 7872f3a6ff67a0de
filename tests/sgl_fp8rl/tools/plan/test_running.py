"""Sums over the requests that run, beside those taken anew."""

import random

import pytest

from sgl_fp8rl.tools.plan.running import CLIP, Running, Sample


@pytest.mark.parametrize("seed", range(5))
def test_sums_are_those_of_all_that_run(seed: int) -> None:
    rng, running, there = random.Random(seed), Running(), list[Sample]()
    waiting = []
    for _ in range(40):
        response = rng.randint(1, 3 * CLIP)
        waiting.append(Sample(rng.randint(1, 3), response, rng.randint(response, 3 * CLIP)))
    while waiting or there:
        for _ in range(rng.randint(0, 6)):
            if waiting:
                there.append(waiting.pop())
                running.add(there[-1])
        if not there:
            continue
        ends = [sample.response - running.clock + sample.start for sample in there]
        assert running.steps() == min(ends)
        running.advance(rng.randint(0, min(ends)))
        is_over = running.finish()
        assert is_over == any(not sample.turn for sample in there)
        there = [sample for sample in there if sample.turn]
        done = {sample: running.clock - sample.start for sample in there}
        assert running.size == len(there)
        assert running.tokens == sum(sample.prompt + done[sample] for sample in there)
        assert running.prompts == sum(sample.prompt for sample in there)
        assert running.limits == sum(sample.limit for sample in there)
        assert running.may_need == sum(min(sample.limit - done[sample], CLIP) for sample in there)
        if there and rng.random() < 0.2:
            shortest = min(there, key=lambda sample: (done[sample], -sample.prompt, -sample.turn))
            assert running.shortest() is shortest
            running.remove(shortest)
            assert shortest.done == done[shortest]
            there.remove(shortest)
            waiting.append(shortest)
