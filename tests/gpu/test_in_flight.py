"""Batches of requests that are in flight when an update begins, under CUDA graphs and FP8 KV.

Whatever becomes of them (``in_flight``), each token carries the version whose policy gives its
logprob, by an oracle outside of the plugin. The control is the other policy on the same tokens.
"""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from tests.engine.harness import CALL_TIMEOUT_S, Server
from tests.gpu.beside_oracle import FP8_KV, assert_in_graphs, bring, config_of, prompts_of, start
from tests.gpu.conftest import Record
from tests.gpu.policies import Tensors, draw
from tests.gpu.sizes import HERE
from tests.logprob_oracle import Reference, Sampled
from tests.soak import bridge

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SHARPNESS = 6.0
"""Of the logits: so large that a token of one policy is improbable under the other."""
KV_TOKENS = 1 << 19
"""At least 256 requests of 32 and 1024 tokens in pages of 64."""
LEAST_TOKENS = 8
"""Of one version in one sequence, whose mean is compared."""
AGAIN_TOKENS = 32
"""Of a response after the update."""
MEAN_BOUND = 0.85
"""Of |difference| from the oracle, in nats. Healthy on an H200: at most 0.58; the least of the
control: 17.8."""
TOKEN_BOUND = 4.0
"""Of one token. Healthy on an H200: at most 3.5 of 860,000; ``RARE`` says how many may be beyond
it."""
RARE, RARE_AT_EDGES = 1e-3, 0.01
"""The part of tokens that may be beyond ``TOKEN_BOUND`` from their own policy; and of those next to
a change of versions, of which one in four would be if the change were one token off."""
TOLD_APART = 0.95
"""The part that is at least beyond it from the other policy. Healthy on an H200: 0.993."""
STEPS = 16
"""Decode batches with all requests, before an update begins."""
EDGE = 2
"""Tokens on either side of a change of versions."""


@dataclass(frozen=True)
class World:
    """A server, and two policies with an oracle of each."""

    server: Server
    policies: tuple[Tensors, ...]
    oracles: tuple[Reference, ...]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("in_flight")
    config = config_of(HERE.dense, folder / "config")
    policies = tuple(draw(HERE.dense, seed, HERE.device, SHARPNESS) for seed in (0, 1))
    oracles = tuple(Reference(config, policy) for policy in policies)
    flags = {**FP8_KV, "max_total_tokens": KV_TOKENS}
    with start(folder / "server.log", config, **flags) as server:
        for policy in policies:  # compiles what an update needs, before requests wait for one
            bring(server, policy)
        yield World(server, policies, oracles)


def await_batch(server: Server, size: int, since: int) -> None:
    """Until the server's log tells, behind byte ``since``, of some decode batches of this size."""
    wanted = re.compile(rb"Decode batch.*?#running-req: %d," % size)
    deadline = time.monotonic() + CALL_TIMEOUT_S
    with server.log.open("rb") as log:
        log.seek(since)
        seen = b""
        while len(wanted.findall(seen)) < STEPS:
            assert time.monotonic() < deadline, f"not {STEPS} decode batches of {size} requests"
            time.sleep(0.01)
            seen += log.read()


def caught(world: World, size: int, in_flight: str) -> tuple[list[Sampled], tuple[int, int]]:
    """Requests that an update from policy 0 to policy 1 meets in one batch, and both versions."""
    server = world.server
    old = bring(server, world.policies[0])
    since = server.log.stat().st_size
    with ThreadPoolExecutor(1) as pool:
        prompts = prompts_of(HERE.dense, size)
        # by its address: this process's updates are of another connection, and any version will do
        asked = pool.submit(bridge.sample, server.address, prompts, HERE.tokens)
        await_batch(server, size, since)
        new = bring(server, world.policies[1], in_flight)
        return asked.result(CALL_TIMEOUT_S), (old, new)


def compare(world: World, sampled: list[Sampled], versions: tuple[int, int]) -> dict[str, float]:
    """How far each token's logprob is from that of its version's policy, and of the other."""
    own, other, edges, means = [], [], [torch.zeros(0)], []
    by_policy = zip(*(oracle.distances(sampled) for oracle in world.oracles), strict=True)
    for one, distances in zip(sampled, by_policy, strict=True):
        distances_PT = torch.stack(distances)
        policy_1T = torch.tensor([[versions.index(version) for version in one.versions]])
        own.append(distances_PT.gather(0, policy_1T)[0])
        other.append(distances_PT.gather(0, 1 - policy_1T)[0])
        for policy in policy_1T.unique():
            mine_T = policy_1T[0] == policy
            if mine_T.sum() >= LEAST_TOKENS:
                means.append([float(each[-1][mine_T].mean()) for each in (own, other)])
        cut = one.versions.count(versions[0])
        if 0 < cut < len(one.tokens):
            edges.append(own[-1][max(0, cut - EDGE) : cut + EDGE])
    assert len(torch.cat(own)) == sum(len(one.tokens) for one in sampled)
    return {
        "mean": float(torch.cat(own).mean()),
        "largest": float(torch.cat(own).max()),
        "largest mean": max(mine for mine, _ in means),
        "beyond": beyond(own),
        "beyond at edges": beyond(edges),
        "control, least mean": min(others for _, others in means),
        "control, beyond": beyond(other),
    }


def assert_of_their_versions(found: dict[str, float]) -> None:
    assert found["largest mean"] <= MEAN_BOUND < found["control, least mean"], found
    assert found["beyond"] <= RARE, found
    assert found["beyond at edges"] <= RARE_AT_EDGES, found
    assert found["control, beyond"] >= TOLD_APART, found


def beyond(distances: list[torch.Tensor]) -> float:
    """The part of all tokens whose distance is beyond ``TOKEN_BOUND``; 0 of no tokens."""
    return float((torch.cat(distances) > TOKEN_BOUND).float().sum()) / max(
        1, sum(map(len, distances))
    )


@pytest.mark.guarantee("one-version", fault="batches of 32 to 256 requests in flight on a GPU")
@pytest.mark.parametrize("size", HERE.batches)
@pytest.mark.parametrize("in_flight", ["abort", "finish", "retract"])
def test_every_token_is_of_the_version_that_it_carries(
    world: World, in_flight: str, size: int, record_property: Record
) -> None:
    sampled, (old, new) = caught(world, size, in_flight)
    assert [one.prompt for one in sampled] == prompts_of(HERE.dense, size)
    for one in sampled:
        assert len(one.tokens) == len(one.logprobs) == len(one.versions) > 0
        assert one.versions == sorted(one.versions)
        assert set(one.versions) <= {old, new}
    counts = [len(one.tokens) for one in sampled]
    after = [one.versions.count(new) for one in sampled]
    if in_flight == "abort":
        assert max(counts) < HERE.tokens, "every request was cut short"
    else:
        assert counts == [HERE.tokens] * size
    if in_flight == "retract":
        assert 0 < min(after) <= max(after) < HERE.tokens, "every request went on"
    else:
        assert sum(after) == 0
    found = compare(world, sampled, (old, new))
    record_property("tokens, tokens after the update", (sum(counts), sum(after)))
    record_property("difference from the oracle", found)
    assert_of_their_versions(found)
    # the engine goes on with the new version alone
    prompts = prompts_of(HERE.dense, size)
    again = bridge.sample(world.server.address, prompts, AGAIN_TOKENS)
    assert {version for one in again for version in one.versions} == {new}
    assert_of_their_versions(compare(world, again, (old, new)))
    assert_in_graphs(world.server, size)


def test_a_change_that_is_one_token_off_is_seen(world: World) -> None:
    """The control of the checks above."""
    sampled, versions = caught(world, HERE.batches[0], "retract")
    assert compare(world, sampled, versions)["beyond at edges"] <= RARE_AT_EDGES
    for one in sampled:
        one.versions[one.versions.index(versions[1])] = versions[0]
    assert compare(world, sampled, versions)["beyond at edges"] > 5 * RARE_AT_EDGES


def test_the_scheduler_overlaps(world: World) -> None:
    status, info = world.server.ask("/server_info")
    assert status == 200
    assert info["disable_overlap_schedule"] is False
