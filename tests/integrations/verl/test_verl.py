"""verl's parts and ours, over Ray: updates, rollouts, versions, a failure and its recovery.

The engine is started once. Each test brings it to what it needs, whatever ran before.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import ray

from sgl_fp8rl.protocol.manifest import ManifestError
from tests.engine import expected
from tests.integrations.verl.cluster import CALL_TIMEOUT_S, START_TIMEOUT_S, Cluster, cluster
from trainer_bridge.adapters.contract import check_engine
from trainer_bridge.engines.engine_client import EngineError, HTTPEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(START_TIMEOUT_S + 4 * CALL_TIMEOUT_S)]

LAST = "model.norm.weight"
STEPS = ("global_steps", "min_global_steps", "max_global_steps")


@pytest.fixture(scope="module")
def world(policies: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """After a first update; before it the engine has random weights and generates nothing."""
    with cluster(policies[0], tmp_path_factory.mktemp("ranks")) as running:
        assert_quarantined(running)
        assert update(running, policies[0], step=0) == 0
        yield running


def status(world: Cluster) -> dict[str, Any]:
    return world.engine.control({"op": "status"})


def update(world: Cluster, checkpoint: Path, step: int | None) -> int:
    """Update on both ranks, which read all tensors; the new version."""
    read = world.each_rank("update", checkpoint, step)
    assert read[0] == read[1] and isinstance(read[0], int), read
    assert holds(world, checkpoint)
    assert status(world)["state"] == "serving"
    return int(status(world)["version"])


def holds(world: Cluster, checkpoint: Path) -> bool:
    """Whether the engine has this checkpoint's bytes, quantized by other code than its own."""
    held = world.engine.control({"op": "digest"})["ranks"]
    wanted = expected.digests(checkpoint, len(held))
    return all(
        {name: rank[name]["sha256"] for name in names} == names
        for rank, names in zip(held, wanted, strict=True)
    )


def assert_quarantined(world: Cluster) -> None:
    assert status(world)["state"] == "quarantined"
    with pytest.raises(EngineError, match="quarantined") as refused:
        world.generate()
    assert "Server.generate" in str(refused.value)  # it came through Ray


def test_the_engine_has_our_arguments_not_verls(world: Cluster) -> None:
    """verl asks for a copy of the weights in host memory, and for FlashInfer's attention."""

    def arguments(server: Any) -> list[Any]:
        made = server.tokenizer_manager.server_args
        names = ("quantization", "kv_cache_dtype", "attention_backend", "enable_weights_cpu_backup")
        return [getattr(made, name) for name in names]

    found = ray.get(world.server.__ray_call__.remote(arguments), timeout=CALL_TIMEOUT_S)
    assert found == ["fp8rl", "fp8_e4m3", "torch_native", False]
    assert world.engine.control({"op": "layout"})["kv_cache"] is not None


def test_the_engine_keeps_the_contract(world: Cluster) -> None:
    check_engine(world.engine)


def test_tokens_carry_versions_and_steps(world: Cluster, policies: list[Path]) -> None:
    """A step may be ahead, the same again (as after a resume), or missing."""
    ahead = int(status(world)["version"]) + 5
    updates = ((1, ahead, ahead), (0, ahead, ahead + 1), (1, None, ahead + 2))
    for policy, step, version in updates:
        assert update(world, policies[policy], step) == version
        assert not holds(world, policies[1 - policy])
        output = world.generate(8)
        assert len(output.token_ids) == len(output.log_probs) == 8
        assert output.extra_fields["policy_versions"] == [version] * 8
        # without a number it is still the step before
        assert output.extra_fields["global_steps"] == ahead
        if step is not None:
            assert [output.extra_fields[name] for name in STEPS] == [ahead] * 3


def test_requests_in_flight_come_back_with_what_sampled_them(
    world: Cluster, policies: list[Path]
) -> None:
    before = int(status(world)["version"]) + 1
    assert update(world, policies[0], before) == before
    running = [world.send(400) for _ in range(4)]
    assert update(world, policies[1], before + 1) == before + 1
    found = set()
    for output in ray.get(running, timeout=CALL_TIMEOUT_S):
        versions = output.extra_fields["policy_versions"]
        assert len(versions) == len(output.token_ids) == len(output.log_probs)
        assert set(versions) <= {before, before + 1}
        if versions:
            steps = [output.extra_fields[name] for name in STEPS]
            assert steps == [max(versions), min(versions), max(versions)]
        found.add(output.stop_reason)
    assert found <= {"abort", "length"}


def test_a_failed_update_quarantines_until_the_next(world: Cluster, policies: list[Path]) -> None:
    """The leader fails, and neither rank is left alone in a gather."""
    step = int(status(world)["version"]) + 1
    failed, read = world.each_rank("update", policies[0], step, LAST)
    assert isinstance(failed, EngineError | ManifestError) and LAST in str(failed)
    assert world.each_rank("count") == [read, read]
    assert status(world)["version"] == step - 1
    assert_quarantined(world)
    assert update(world, policies[0], step) == step + 1  # the same step, as another version
    output = world.generate(4)
    assert output.extra_fields["policy_versions"] == [step + 1] * 4
    assert [output.extra_fields[name] for name in STEPS] == [step] * 3


@pytest.mark.parametrize("more", [{"wire_format": "delta_flush"}, {"peft_config": {"r": 8}}])
def test_what_is_no_policy_is_refused(
    world: Cluster, policies: list[Path], more: dict[str, Any]
) -> None:
    before = status(world)
    results = world.each_rank("update", policies[0], 1000, **more)
    assert [type(found) for found in results] == [ValueError] * 2, results
    assert world.each_rank("count") == [0, 0]
    assert status(world) == before


def test_both_ways_to_the_control_channel(world: Cluster) -> None:
    """Over Ray, and over HTTP at the host's own address, where verl binds the server."""
    server = HTTPEngine(f"http://{world.replica.server_address}", None)
    assert server.control({"op": "status"}) == status(world)
    for engine in (server, world.engine):
        with pytest.raises(EngineError, match="unknown") as refused:
            engine.control({"op": "nothing"})
        assert refused.value.status == 400
