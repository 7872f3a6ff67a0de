"""Updates by verl's manager of checkpoint engines: the order of calls is verl's own, not ours."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import ray

from tests.integrations.verl.cluster import CALL_TIMEOUT_S, PROMPT, SAMPLING, START_TIMEOUT_S
from tests.integrations.verl.disaggregated import BROKEN, Disaggregated, disaggregated
from tests.integrations.verl.test_verl import LAST, STEPS, assert_quarantined, holds, status

pytestmark = [pytest.mark.engine, pytest.mark.timeout(START_TIMEOUT_S + 4 * CALL_TIMEOUT_S)]

FIRST = "model.embed_tokens.weight"
LONG = 400
"""Tokens, of which an update sees some."""


@pytest.fixture(scope="module")
def world(policies: list[Path]) -> Iterator[Disaggregated]:
    with disaggregated(policies[0]) as running:
        assert_quarantined(running)
        assert_updates(running, policies, 0, 1)
        yield running


def next_step(world: Disaggregated) -> int:
    return int(status(world)["version"]) + 1


def assert_updates(world: Disaggregated, policies: list[Path], which: int, step: int) -> None:
    """The engine has the bytes of this policy, and tokens carry the step as their version."""
    world.update(policies[which], step)
    assert (status(world)["state"], status(world)["version"]) == ("serving", step)
    assert holds(world, policies[which])
    assert not holds(world, policies[1 - which])
    assert_tokens_of(world.generate(8), step)


def assert_tokens_of(output: Any, step: int) -> None:
    assert output.stop_reason == "length"
    assert output.extra_fields["policy_versions"] == [step] * 8
    assert [output.extra_fields[name] for name in STEPS] == [step] * 3


def test_updates(world: Disaggregated, policies: list[Path]) -> None:
    step = next_step(world)
    assert_updates(world, policies, 1, step)
    assert_updates(world, policies, 0, step + 3)


def test_requests_that_arrive_meanwhile_are_of_the_new_policy(
    world: Disaggregated, policies: list[Path]
) -> None:
    step = next_step(world)
    world.manager.arriving = 3
    try:
        assert_updates(world, policies, 1, step)
    finally:
        world.manager.arriving = 0
    for output in ray.get(world.manager.arrived, timeout=CALL_TIMEOUT_S):
        assert_tokens_of(output, step)


def test_a_rollout_goes_on_with_the_new_policy(world: Disaggregated, policies: list[Path]) -> None:
    """verl's client of partial rollouts asks again for what the update aborted."""
    step = next_step(world)
    assert_updates(world, policies, 0, step)
    request = world.client.generate(
        "long", prompt_ids=PROMPT, sampling_params={**SAMPLING, "max_tokens": LONG}
    )
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(lambda: asyncio.run(asyncio.wait_for(request, CALL_TIMEOUT_S)))
        wait_for_tokens(world)
        assert_updates(world, policies, 1, step + 1)
        output = answer.result()
    assert len(output.token_ids) == len(output.log_probs) == LONG
    assert [output.extra_fields[name] for name in STEPS] == [step + 1, step, step + 1]


def wait_for_tokens(world: Disaggregated) -> None:
    """SGLang's main process hears of every 50th token of a request."""

    def tokens(server: Any) -> int:
        states = server.tokenizer_manager.rid_to_state.values()
        return sum(len(state.output_ids) for state in states)

    deadline = time.monotonic() + CALL_TIMEOUT_S
    while not ray.get(world.server.__ray_call__.remote(tokens), timeout=CALL_TIMEOUT_S):
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("broken", "error", "state"),
    [
        ({"lost": FIRST}, BROKEN, "serving"),
        ({"lost": LAST}, BROKEN, "quarantined"),
        ({"nan": LAST}, LAST, "quarantined"),
    ],
)
def test_a_failed_update_raises_and_the_next_one_heals(
    world: Disaggregated, policies: list[Path], broken: dict[str, str], error: str, state: str
) -> None:
    """Where nothing was sent yet, the policy before it is whole. verl leaves generation paused and
    the KV cache released, and its run ends; whoever goes on gets no tokens of a mixture."""
    step = next_step(world)
    assert_updates(world, policies, 0, step)
    with pytest.raises(ray.exceptions.RayTaskError, match=error):
        world.update(policies[1], step + 1, **broken)
    after = ended(world)
    assert (after["state"], after["version"]) == (state, step)
    world.manager.resume_kv_cache_replicas()
    world.manager.resume_generation_replicas()
    if state == "quarantined":
        assert_quarantined(world)
    else:
        assert holds(world, policies[0])
        assert_tokens_of(world.generate(8), step)
    assert_updates(world, policies, 1, step + 2)


def ended(world: Disaggregated) -> dict[str, Any]:
    """The engine's status once it noticed the failure."""
    deadline = time.monotonic() + CALL_TIMEOUT_S
    while (found := status(world))["state"] == "updating":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found
