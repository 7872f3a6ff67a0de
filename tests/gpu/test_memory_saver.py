"""The memory saver: release -> the trainer uses the memory -> resume -> update -> generate.

In every order that SGLang allows. Weights have no backup: between their resume and the next commit
the engine refuses to generate. Routes, version and addresses survive.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

import pytest
import torch

from tests.engine.harness import Server, tail
from tests.engine.serving import assert_quarantined, version_of
from tests.gpu.conftest import Record
from tests.gpu.engines import (
    Answers,
    Digest,
    digest_of,
    nbytes_of,
    sha256,
    start_server,
    storage,
    update,
    used_bytes,
)
from tests.gpu.policies import (
    DENSE,
    HEAD,
    Tensors,
    draw,
    reference_digests,
    shared_folder,
    write_checkpoint,
)
from tests.gpu.trainers import Trainer
from trainer_bridge.engines.engine_client import EngineError

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

TAGS: tuple[str, ...] = ("kv_cache", "weights", "cuda_graph")


def one_by_one(order: tuple[str, ...]) -> list[tuple[str, ...]]:
    """What to name in each request, one after the other."""
    return [(tag,) for tag in order]


ORDERS = [[TAGS], *map(one_by_one, permutations(TAGS))]
"""All in one request, and each order one by one. What is released can be resumed in any of them."""
IDS = ["at once", *("-".join(order) for order in permutations(TAGS))]
KV_TOKENS = 1 << 17
KV_BYTES = KV_TOKENS * DENSE.layers * 2 * DENSE.kv_heads * HEAD * 2  # 1 GiB of BF16
SIZES = [1, 3, 16]
SPARE_BYTES = 512 << 20
"""What a trainer that takes all other memory leaves free."""
CYCLES = 20
WARM_CYCLES = 2
GROWTH_BYTES = 1 << 20
"""Of device memory, a cycle, on average after the first ones; it comes in pages of 2 MiB."""
QUARANTINED = "memory was released"


@dataclass(frozen=True)
class World:
    """An engine with the memory saver, its trainer, and what it answers for two policies."""

    server: Server
    trainer: Trainer
    policies: tuple[Tensors, Tensors]
    answers: tuple[Answers, Answers]
    digest: Digest
    """At the start; it held policy 0 of the checkpoint."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    log = tmp_path_factory.mktemp("saver") / "server.log"
    policies = draw(DENSE, 0), draw(DENSE, 1)
    trainer = Trainer(DENSE)
    with shared_folder() as folder:
        checkpoint = write_checkpoint(DENSE, policies[0], folder / "0")
        with start_server(
            log,
            checkpoint,
            # without it SGLang 0.5.17 keeps the graphs' memory under its own tag in place
            {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"},
            enable_memory_saver=True,
            max_total_tokens=KV_TOKENS,
            fp8rl_bucket_bytes=1 << 30,  # the default
        ) as server:
            digest = digest_of(server)
            first = Answers.of(server, SIZES)
            update(server, trainer.become(policies[1]))
            second = Answers.of(server, SIZES)
            assert first.logprobs != second.logprobs
            yield World(server, trainer, policies, (first, second), digest)


@pytest.fixture
def server(world: World) -> Iterator[Server]:
    """It serves policy 0 as an updated version when a test begins, and is up at the end."""
    update(world.server, world.trainer.become(world.policies[0]))
    yield world.server
    assert world.server.process.poll() is None
    assert world.server.status_of("/health") == 200


def release(server: Server, *tags: str) -> None:
    _ask(server, "/release_memory_occupation", tags)


def resume(server: Server, *tags: str) -> None:
    _ask(server, "/resume_memory_occupation", tags)


def _ask(server: Server, path: str, tags: tuple[str, ...]) -> None:
    status, reply = server.ask(path, json.dumps({"tags": tags}).encode())
    assert status == 200, f"{reply}\n{tail(server.log)}"


def fill(nbytes: int) -> None:
    """Take, write and give back device memory, as a trainer's step does."""
    torch.full((nbytes,), 0x5A, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def free_bytes() -> int:
    """Of the whole device."""
    return torch.cuda.mem_get_info()[0]


def assert_serves(world: World, policy: int) -> None:
    """The policy's logprobs, in the engine's newest version."""
    answers = Answers.of(world.server, SIZES)
    assert answers.logprobs == world.answers[policy].logprobs
    assert answers.versions == {version_of(world.server)}


@pytest.mark.guarantee("released", fault="every order of release, resume and update")
@pytest.mark.parametrize("released", ORDERS, ids=IDS)
def test_every_order(world: World, server: Server, released: list[tuple[str, ...]]) -> None:
    """Each order of resume, with the update as soon as there are weights, and at the end."""
    policy = 0
    for resumed in ORDERS:
        for early in (True, False):
            policy = 1 - policy
            version = version_of(server)
            tensors = world.trainer.become(world.policies[policy])
            for tags in released:
                release(server, *tags)
            assert_quarantined(server, QUARANTINED)
            fill(free_bytes() - SPARE_BYTES)
            for tags in resumed:
                resume(server, *tags)
                if "weights" in tags and early:
                    assert_quarantined(server, QUARANTINED)
                    update(server, tensors)
            if not early:
                assert_quarantined(server, QUARANTINED)
                update(server, tensors)
            assert version_of(server) == version + 1
            assert_serves(world, policy)
    assert sha256(digest_of(server)) == reference_digests(world.policies[policy])
    assert storage(digest_of(server)) == storage(world.digest)


@pytest.mark.parametrize("tag", ["kv_cache", "cuda_graph"])
def test_weights_that_stay_are_served(world: World, server: Server, tag: str) -> None:
    """Only released weights quarantine an engine; without an update it goes on as before."""
    version = version_of(server)
    release(server, tag)
    assert server.control({"op": "layout"})["state"] == "serving"
    fill(free_bytes() - SPARE_BYTES)
    resume(server, tag)
    assert version_of(server) == version
    assert_serves(world, 0)


@pytest.mark.guarantee("released", fault="an update while the weights are released")
def test_an_update_of_released_weights_is_refused(world: World, server: Server) -> None:
    version = version_of(server)
    release(server, "weights")
    for _ in range(2):
        with pytest.raises(EngineError, match=r"memory is released; resume_memory_occupation"):
            update(server, world.trainer.tensors)
        assert_quarantined(server, QUARANTINED)
    resume(server, "weights")
    assert version_of(server) == version
    update(server, world.trainer.tensors)
    assert_serves(world, 0)


def test_routes_survive(world: World, server: Server) -> None:
    """Routes that were recorded anew from an update would not miss what it lacks."""
    lacking = dict(world.trainer.tensors)
    del lacking["model.layers.1.self_attn.q_norm.weight"]
    release(server, *TAGS)
    resume(server, *TAGS)
    with pytest.raises(EngineError, match=r"missing: model\.layers\.1\.self_attn\.q_norm\.weight"):
        update(server, lacking)
    assert_quarantined(server, QUARANTINED)
    update(server, world.trainer.tensors)
    assert_serves(world, 0)


def test_cycles(world: World, server: Server, record_property: Record) -> None:
    held = nbytes_of(world.digest) + KV_BYTES
    used = []
    for cycle in range(CYCLES):
        policy = cycle % 2
        tensors = world.trainer.become(world.policies[policy])
        torch.cuda.empty_cache()
        before = used_bytes()
        release(server, *TAGS)
        freed = before - used_bytes()
        assert freed > 0.9 * held
        fill(free_bytes() - freed // 5)  # more than was free before the release
        resume(server, *TAGS)
        if cycle == 0:  # the control: policy 0 was there before, and is gone
            assert sha256(digest_of(server)) != sha256(world.digest)
        result = update(server, tensors)
        assert cycle == 0 or result.mapped_bytes > 0
        assert_serves(world, policy)
        torch.cuda.empty_cache()
        used.append(used_bytes())
    growth = (used[-1] - used[WARM_CYCLES - 1]) / (CYCLES - WARM_CYCLES)
    record_property("used bytes after each cycle", used)
    assert growth <= GROWTH_BYTES, used
