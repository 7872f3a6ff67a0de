"""In-place updates of engines that decode with CUDA graphs, at the sizes of real layers.

An engine is updated five times from CUDA memory and holds, after each, what the torch reference
makes of the same weights, byte for byte; at every captured batch size it answers as a fresh engine
does. Then all that may go wrong on the way: it refuses to generate, and the next update heals it.
"""

import math
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from tests.engine.harness import EngineProcess, Server
from tests.engine.serving import assert_quarantined, version_of
from tests.gpu.engines import (
    BUCKET_BYTES,
    PADDED,
    Answers,
    Digest,
    captured_sizes,
    decoded_sizes,
    digest_of,
    sha256,
    start_engine,
    start_server,
    storage,
    together,
    update,
    used_bytes,
)
from tests.gpu.policies import (
    DENSE,
    MOE,
    RAGGED,
    Shape,
    Tensors,
    codes_and_scales,
    draw,
    reference_digests,
    shared_folder,
    write_checkpoint,
)
from tests.gpu.trainers import Trainer, answer, stop_at_part, trainer_process, update_twice
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.updates.update import RUN, UpdateResult

pytestmark = pytest.mark.gpu

KINDS = ("in place", "in place", "in place", "codes", "new tensors")
"""How the trainer holds each version: BF16 that stays where it is; FP8 codes and scales; BF16 in
memory that the engine has not seen."""
UPDATES = len(KINDS)
FRESH = tuple(range(1, UPDATES + 1))
"""The versions that are compared with a fresh engine."""
RECLAIM_S = 30.0
"""Within this the driver gives back a killed process's memory; it takes well below a second."""


@dataclass(frozen=True)
class Case:
    """A model, and the format of its layers."""

    shape: Shape
    format: str = "block-fp8"

    def wanted(self, version: int) -> dict[str, str]:
        """What the reference makes of a policy."""
        return reference_digests(draw(self.shape, version), fmt=self.format)


CASES = {
    "qwen3-8b": Case(DENSE),
    "qwen3-30b-a3b": Case(MOE),
    "ragged": Case(RAGGED),
    "qwen3-30b-a3b-ue8m0": Case(MOE, "block-fp8-ue8m0"),
}


@dataclass(frozen=True)
class Snapshot:
    """What an engine holds and answers at one version."""

    digest: Digest
    answers: Answers

    @classmethod
    def of(cls, engine: Server | EngineProcess, sizes: list[int]) -> "Snapshot":
        return cls(digest_of(engine), Answers.of(engine, sizes))


@dataclass(frozen=True)
class Run:
    """One engine that was updated to each policy in turn; policy ``n`` is drawn with seed ``n``."""

    shape: Shape
    server: Server
    trainer: Trainer
    captured: list[int]
    sizes: list[int]
    """Those captured, and some that are padded."""
    snapshots: list[Snapshot]
    """At the start, and after each update."""
    results: list[UpdateResult]
    wanted: list[dict[str, str]]
    """What the reference makes of each policy."""
    fresh: dict[int, Snapshot]
    from_host: dict[str, str]
    """What the fresh engine of the first version held after an update from host memory to the
    last one."""


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    case: Case = request.param
    shape, options = case.shape, {"fp8rl_format": case.format}
    logs = tmp_path_factory.mktemp(shape.name)
    with shared_folder() as folder:
        checkpoints = {
            version: write_checkpoint(shape, draw(shape, version), folder / str(version))
            for version in {0, *FRESH}
        }
        server_start = partial(start_server, logs / "server.log", checkpoints[0], **options)
        fresh_starts = [
            partial(start_engine, logs / f"{v}.log", checkpoints[v], **options) for v in FRESH
        ]
        with together(server_start, *fresh_starts) as (server, *engines):
            yield _update(case, server, dict(zip(FRESH, engines, strict=True)), checkpoints)


def _update(
    case: Case,
    server: Server,
    engines: dict[int, EngineProcess],
    checkpoints: dict[int, Path],
) -> Run:
    shape, captured = case.shape, captured_sizes(server.log)
    sizes = [*captured, *PADDED]
    snapshots, results = [Snapshot.of(server, sizes)], []
    wanted = [case.wanted(0)]
    trainer, sent = Trainer(shape), []
    for version, kind in enumerate(KINDS, start=1):
        policy = draw(shape, version)
        wanted.append(case.wanted(version))
        if kind == "in place":
            policy = trainer.become(policy)
        elif kind == "codes":
            policy = codes_and_scales(policy, case.format)
        sent.append(policy)  # so that the memory of one version is not given to the next
        results.append(update(server, policy))
        snapshots.append(Snapshot.of(server, sizes))
    fresh = {version: Snapshot.of(engine, sizes) for version, engine in engines.items()}
    engines[FRESH[0]].update(checkpoints[UPDATES], 0)
    from_host = sha256(digest_of(engines[FRESH[0]]))
    return Run(
        shape, server, trainer, captured, sizes, snapshots, results, wanted, fresh, from_host
    )


# ---- what updates write, and what the engine answers then ----------------------------------------


@pytest.mark.guarantee("all-or-none", fault="updates of a running engine, every byte compared")
def test_every_byte_is_the_reference(run: Run) -> None:
    for version, snapshot in enumerate(run.snapshots):
        assert sha256(snapshot.digest) == run.wanted[version], f"after update {version}"


def test_no_two_policies_share_a_parameter(run: Run) -> None:
    """So the comparison above tells one version from the next."""
    for before, after in pairwise(run.wanted):
        assert before.keys() == after.keys()
        assert [name for name in before if before[name] == after[name]] == []


@pytest.mark.parametrize("version", FRESH)
def test_a_fresh_engine_answers_the_same(run: Run, version: int) -> None:
    fresh, updated = run.fresh[version], run.snapshots[version]
    assert sha256(fresh.digest) == sha256(updated.digest)
    assert len(run.captured) >= 5
    for size in run.sizes:
        assert updated.answers.logprobs[size] == fresh.answers.logprobs[size], f"batch of {size}"


@pytest.mark.guarantee("in-place", fault="captured CUDA graphs of every batch size")
def test_every_update_is_seen_at_every_batch_size(run: Run) -> None:
    for before, after in pairwise(run.snapshots):
        for size in run.sizes:
            old, new = before.answers.logprobs[size], after.answers.logprobs[size]
            assert all(a != b for a, b in zip(old, new, strict=True)), f"batch of {size}"
            assert all(math.isfinite(logprob) for row in new for logprob in row)


def test_every_batch_ran_in_a_cuda_graph(run: Run) -> None:
    decoded = decoded_sizes(run.server.log)
    assert {(size, True) for size in run.sizes} <= decoded
    assert {size for size, graph in decoded if not graph} == set()


@pytest.mark.guarantee("in-place", fault="updates of a running engine, every address compared")
def test_nothing_moved(run: Run) -> None:
    for snapshot in run.snapshots[1:]:
        assert storage(snapshot.digest) == storage(run.snapshots[0].digest)


@pytest.mark.guarantee("one-version", fault="requests after each update")
def test_tokens_carry_their_version(run: Run) -> None:
    # -1 is the checkpoint that the engine started with, and updates count from 0
    assert [s.answers.versions for s in run.snapshots] == [{v - 1} for v in range(UPDATES + 1)]


def test_what_stays_in_place_is_read_in_place(run: Run) -> None:
    first, second, third, codes, new = run.results
    assert (first.mapped_bytes, codes.mapped_bytes, new.mapped_bytes) == (0, 0, 0)
    assert second.bytes // 2 < second.mapped_bytes <= second.bytes
    assert third.mapped_bytes == second.mapped_bytes


def test_weights_in_host_memory(run: Run) -> None:
    """An ``sgl.Engine``, updated by a trainer of its own process."""
    assert run.from_host == run.wanted[UPDATES]


# ---- faults: each begins and ends with an engine that serves policy 0 ----------------------------


@pytest.fixture
def server(run: Run) -> Iterator[Server]:
    update(run.server, run.trainer.become(draw(run.shape, 0)))
    yield run.server
    assert run.server.process.poll() is None
    assert run.server.status_of("/health") == 200


def assert_healed(run: Run, policy: Tensors | None = None) -> None:
    """The next complete update brings the engine to policy 0, and it serves as it did at first."""
    if policy is None:
        policy = run.trainer.become(draw(run.shape, 0))
    update(run.server, policy)
    assert sha256(digest_of(run.server)) == run.wanted[0]
    answers = Answers.of(run.server, run.sizes[:2])
    assert answers.versions == {version_of(run.server)}
    for size, logprobs in answers.logprobs.items():
        assert logprobs == run.snapshots[0].answers.logprobs[size]


def test_one_wrong_block_is_seen(run: Run, server: Server) -> None:
    """What the comparisons above would say of a block that an update left behind or misplaced."""
    name = "model.layers.1.self_attn.o_proj.weight"
    block = run.trainer.tensors[name][128:256, 256:384]
    block.copy_(block.flip(1))  # the same scales, other codes
    update(server, run.trainer.tensors)
    held = sha256(digest_of(server))
    assert [n for n, digest in held.items() if digest != run.wanted[0][n]] == [name]
    answers = Answers.of(server, run.sizes)
    for size, logprobs in answers.logprobs.items():
        assert logprobs != run.snapshots[0].answers.logprobs[size], f"batch of {size}"
    assert_healed(run)


@pytest.mark.guarantee("quarantine", fault="NaN or Inf in a weight")
@pytest.mark.parametrize("bad", [math.nan, -math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("kept", ["fp8", "bf16"])
@pytest.mark.parametrize("place", ["mapped", "bucket"])
def test_no_number(run: Run, server: Server, place: str, kept: str, bad: float) -> None:
    mlp = run.shape.mlps("model.layers.1")[-1]
    name = f"{mlp}.down_proj.weight" if kept == "fp8" else "model.layers.0.input_layernorm.weight"
    tensors = run.trainer.tensors
    if place == "mapped":
        assert update(server, tensors).mapped_bytes > 0
    else:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors[name].view(-1)[-1] = bad
    before = version_of(server)
    with pytest.raises(EngineError, match="NaN or Inf") as failure:
        update(server, tensors)
    assert name in str(failure.value)
    assert_quarantined(server, "NaN or Inf")
    assert version_of(server) == before
    assert_healed(run)


# whatever the format: these two, since each takes two minutes and the GPU to itself
@pytest.mark.parametrize("run", list(CASES.values())[:2], ids=list(CASES)[:2], indirect=True)
@pytest.mark.alone
@pytest.mark.guarantee("quarantine", fault="the trainer is killed in the middle of an update")
def test_a_killed_trainer(run: Run, server: Server) -> None:
    """It leaves a quarantined engine, which lets go of its bucket."""
    before = used_bytes()
    version = version_of(server) + 1
    arguments = (stop_at_part, server.address, run.shape, 1, version, 3)
    with trainer_process(*arguments) as (trainer, connection):
        answer(connection)
        assert used_bytes() > before + BUCKET_BYTES  # the control: it is seen while it lives
        trainer.kill()
        trainer.join()
        assert trainer.exitcode == -signal.SIGKILL
        assert not server.control({"op": "end"})["ended"]
    assert_quarantined(server, "the trainer is gone")
    deadline = time.monotonic() + RECLAIM_S
    while used_bytes() >= before + BUCKET_BYTES // 2 and time.monotonic() < deadline:
        time.sleep(0.1)  # nothing tells when the driver is done
    assert used_bytes() < before + BUCKET_BYTES // 2
    assert_healed(run)


def test_expandable_segments(run: Run, server: Server) -> None:
    """Memory that cannot be exported goes through the bucket, each time."""
    version = version_of(server) + 1
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    # of this process's run, or its own next update would be refused
    arguments = (update_twice, server.address, run.shape, 1, version, RUN)
    with trainer_process(*arguments, environment=environment) as (_, connection):
        assert answer(connection) == (True, [0, 0])
    assert version_of(server) == version + 1
    assert sha256(digest_of(server)) == run.wanted[1]


def test_weights_in_host_memory_over_http(run: Run, server: Server) -> None:
    on_host = {name: tensor.cpu() for name, tensor in draw(run.shape, 2).items()}
    for _ in range(2):
        assert update(server, on_host).mapped_bytes == 0
    assert sha256(digest_of(server)) == run.wanted[2]
