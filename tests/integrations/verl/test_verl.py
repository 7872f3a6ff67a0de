"""verl's parts and ours, over Ray: updates, rollouts, versions, a failure and its recovery."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import ray

from sgl_fp8rl.protocol.manifest import ManifestError
from tests.engine import expected, models
from tests.integrations.verl.cluster import CALL_TIMEOUT_S, START_TIMEOUT_S, Cluster, cluster
from trainer_bridge.engine_client import EngineError, HTTPEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(START_TIMEOUT_S + 4 * CALL_TIMEOUT_S)]

POLICIES = 3
LAST = "model.norm.weight"


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """With a tied head: verl's state dict has it twice, a checkpoint once."""
    folder = tmp_path_factory.mktemp("policies")
    start = models.make_checkpoint("qwen3", folder / "0", tie_word_embeddings=True)
    return [start, *(models.perturb(start, folder / str(n), n) for n in range(1, POLICIES))]


@pytest.fixture(scope="module")
def world(policies: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(policies[0], tmp_path_factory.mktemp("ranks")) as running:
        yield running


def holds(world: Cluster, checkpoint: Path) -> bool:
    """Whether the engine has this checkpoint's bytes, quantized by other code than its own."""
    (wanted,) = expected.digests(checkpoint, 1)
    (held,) = world.engine.control({"op": "digest"})["ranks"]
    return {name: held[name]["sha256"] for name in wanted} == wanted


def update(world: Cluster, checkpoint: Path, step: int | None, **more: Any) -> int:
    """Update on both ranks, which read all tensors; the new version."""
    read = world.each_rank("update", checkpoint, step, **more)
    assert read[0] == read[1] and isinstance(read[0], int), read
    return int(world.engine.control({"op": "status"})["version"])


def test_from_start_to_recovery(world: Cluster, policies: list[Path]) -> None:
    """One story: the engine is started once."""
    # without weights it generates nothing
    assert world.engine.control({"op": "status"})["state"] == "quarantined"
    with pytest.raises(EngineError, match="quarantined"):
        world.generate()

    assert update(world, policies[0], step=0) == 0
    assert holds(world, policies[0])
    output = world.generate(8)
    assert len(output.token_ids) == len(output.log_probs) == 8
    assert output.extra_fields["policy_versions"] == [0] * 8
    steps = ("global_steps", "min_global_steps", "max_global_steps")
    assert [output.extra_fields[name] for name in steps] == [0, 0, 0]

    # the same step again, as after a resume; one without a number; and one ahead
    assert update(world, policies[1], step=0) == 1
    assert holds(world, policies[1]) and not holds(world, policies[0])
    output = world.generate(4)
    assert output.extra_fields["policy_versions"] == [1] * 4
    assert output.extra_fields["max_global_steps"] == 0
    assert update(world, policies[0], step=None) == 2
    assert update(world, policies[1], step=7) == 7
    output = world.generate(4)
    assert output.extra_fields["policy_versions"] == [7] * 4
    assert [output.extra_fields[name] for name in steps] == [7, 7, 7]

    # requests in flight come back, each token with the version and the step that sampled it
    running = [world.send(400) for _ in range(4)]
    assert update(world, policies[2], step=8) == 8
    for done in ray.get(running, timeout=CALL_TIMEOUT_S):
        versions = done.extra_fields["policy_versions"]
        assert len(versions) == len(done.token_ids) == len(done.log_probs)
        assert set(versions) <= {7, 8}
        if versions:
            found = [done.extra_fields[name] for name in steps[1:]]
            assert found == [min(versions), max(versions)]

    # a failure on the leader: the other rank reads to the end, the engine is quarantined
    failed, read = world.each_rank("update", policies[0], 9, LAST)
    assert isinstance(failed, EngineError | ManifestError) and LAST in str(failed)
    counts = world.each_rank("count")
    assert counts == [read, read]
    status = world.engine.control({"op": "status"})
    assert (status["state"], status["version"]) == ("quarantined", 8)
    with pytest.raises(EngineError, match="quarantined"):
        world.generate()
    # the same step heals it, as another version
    assert update(world, policies[0], step=9) == 10
    assert holds(world, policies[0])
    output = world.generate(4)
    assert output.extra_fields["policy_versions"] == [10] * 4
    assert output.extra_fields["max_global_steps"] == 9

    # as a checkpoint engine hands weights over
    assert len(set(world.each_rank("update_from_async", policies[1], 10))) == 1
    assert holds(world, policies[1])

    # refusals, on every rank alike and before anything is read
    for more in ({"wire_format": "delta_flush"}, {"peft_config": {"r": 8}}):
        results = world.each_rank("update", policies[0], 11, **more)
        assert [type(found) for found in results] == [ValueError] * 2, results
        assert world.each_rank("count") == [0, 0]
    assert world.engine.control({"op": "status"})["version"] == 11

    # the route, at the host's own address
    server = HTTPEngine(f"http://{world.replica.server_address}", None)
    assert server.control({"op": "status"})["version"] == 11
    with pytest.raises(EngineError, match="unknown") as refused:
        world.engine.control({"op": "nothing"})
    assert refused.value.status == 400
