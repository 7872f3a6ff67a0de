"""Updates of engines with MLA, in the heads of DeepSeek: FlashInfer attends, CUDA graphs decode.

What MLA derives of ``kv_b_proj`` is compared as all else is: every byte with the reference after
each update, and logprobs at every captured batch size with those of a fresh engine.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import pytest

from tests.engine.harness import Server
from tests.engine.serving import assert_quarantined
from tests.gpu.engines import (
    PADDED,
    Answers,
    captured_sizes,
    decoded_sizes,
    digest_of,
    sha256,
    start_engine,
    start_server,
    storage,
    together,
    update,
)
from tests.gpu.mla_shapes import V2_LITE, V3, MlaShape
from tests.gpu.policies import (
    codes_and_scales,
    draw,
    reference_digests,
    shared_folder,
    write_checkpoint,
)
from tests.gpu.test_updates import Snapshot
from tests.gpu.trainers import Trainer
from trainer_bridge.engines.engine_client import EngineError

pytestmark = pytest.mark.gpu

KINDS = ("in place", "codes", "in place")
"""How the trainer holds each version."""
LAST = len(KINDS)
KV_B = "model.layers.1.self_attn.kv_b_proj.weight"


@dataclass(frozen=True)
class Run:
    """One engine that was updated to each policy in turn; policy ``n`` is drawn with seed ``n``."""

    shape: MlaShape
    server: Server
    trainer: Trainer
    sizes: list[int]
    snapshots: list[Snapshot]
    """At the start, and after each update."""
    wanted: list[dict[str, str]]
    """What the reference makes of each policy."""
    fresh: Snapshot
    """Of an engine that was started with the last policy."""


@pytest.fixture(scope="module", params=[V2_LITE, V3], ids=lambda shape: shape.name)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    shape: MlaShape = request.param
    logs = tmp_path_factory.mktemp(shape.name)
    with shared_folder() as folder:
        first, last = (
            write_checkpoint(shape, draw(shape, version), folder / str(version))
            for version in (0, LAST)
        )
        with together(
            partial(start_server, logs / "server.log", first),
            partial(start_engine, logs / "fresh.log", last),
        ) as (server, engine):
            sizes = [*captured_sizes(server.log), *PADDED]
            trainer = Trainer(shape)
            snapshots = [Snapshot.of(server, sizes)]
            for version, kind in enumerate(KINDS, start=1):
                policy = draw(shape, version)
                is_codes = kind == "codes"
                update(server, codes_and_scales(policy) if is_codes else trainer.become(policy))
                snapshots.append(Snapshot.of(server, sizes))
            wanted = [reference_digests(draw(shape, version)) for version in range(LAST + 1)]
            fresh = Snapshot.of(engine, sizes)
            yield Run(shape, server, trainer, sizes, snapshots, wanted, fresh)


@pytest.mark.guarantee("all-or-none", fault="updates of MLA, every byte compared")
def test_every_byte_is_the_reference(run: Run) -> None:
    for version, snapshot in enumerate(run.snapshots):
        assert sha256(snapshot.digest) == run.wanted[version], f"after update {version}"
    for before, after in pairwise(run.wanted):  # so the comparison tells one version from the next
        assert [name for name in before if before[name] == after[name]] == []


@pytest.mark.guarantee("in-place", fault="updates of MLA, every address compared")
def test_nothing_moved(run: Run) -> None:
    assert any(name.endswith(".w_kc") for name in run.snapshots[0].digest)
    for snapshot in run.snapshots[1:]:
        assert storage(snapshot.digest) == storage(run.snapshots[0].digest)


def test_a_fresh_engine_answers_the_same(run: Run) -> None:
    updated = run.snapshots[LAST]
    assert sha256(run.fresh.digest) == sha256(updated.digest)
    # measured kernels would differ from engine to engine
    assert "Measured kernels" not in run.server.log.read_text(errors="replace")
    for size in run.sizes:
        assert updated.answers.logprobs[size] == run.fresh.answers.logprobs[size], f"{size} rows"


@pytest.mark.guarantee("in-place", fault="captured CUDA graphs of MLA")
def test_every_update_is_seen_in_every_cuda_graph(run: Run) -> None:
    for before, after in pairwise(run.snapshots):
        for size in run.sizes:
            old, new = before.answers.logprobs[size], after.answers.logprobs[size]
            assert all(a != b for a, b in zip(old, new, strict=True)), f"{size} rows"
            assert all(math.isfinite(logprob) for row in new for logprob in row)
    assert {(size, True) for size in run.sizes} <= decoded_sizes(run.server.log)


def test_what_is_absorbed_is_seen(run: Run) -> None:
    """What the comparisons would say of stale values of one head, and that an update mends them."""
    tensors = run.trainer.become(draw(run.shape, 0))
    tensors[KV_B][-1].mul_(2)
    update(run.server, tensors)
    held = sha256(digest_of(run.server))
    layer = KV_B.removesuffix("kv_b_proj.weight")
    wrong = sorted(name for name, digest in held.items() if digest != run.wanted[0][name])
    assert wrong == [KV_B, f"{layer}w_vc"]
    assert Answers.of(run.server, [1]).logprobs[1] != run.snapshots[0].answers.logprobs[1]
    assert_serves_the_first(run)


@pytest.mark.guarantee("quarantine", fault="NaN in what MLA absorbs")
def test_no_number(run: Run) -> None:
    tensors = run.trainer.become(draw(run.shape, 0))
    tensors[KV_B].view(-1)[-1] = math.nan
    with pytest.raises(EngineError, match="NaN or Inf"):
        update(run.server, tensors)
    assert_quarantined(run.server, "NaN or Inf")
    assert_serves_the_first(run)


def assert_serves_the_first(run: Run) -> None:
    """An update to policy 0 brings the engine to where it started."""
    update(run.server, run.trainer.become(draw(run.shape, 0)))
    assert sha256(digest_of(run.server)) == run.wanted[0]
    sizes = run.sizes[:2]
    answers = Answers.of(run.server, sizes).logprobs
    assert answers == {size: run.snapshots[0].answers.logprobs[size] for size in sizes}
