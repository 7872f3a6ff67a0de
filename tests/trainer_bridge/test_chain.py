"""Weights through a folder: real files, and engines without SGLang, checked by an oracle."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_fp8rl.formats import BLOCK_FP8
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.states import State
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge import ranks
from tests.trainer_bridge.test_far_engine import step
from tests.trainer_bridge.test_fsdp import failure, toy_trainer
from tests.trainer_bridge.test_update import engine_of, holds
from trainer_bridge import update
from trainer_bridge.chain import ChainError, ChainFollower, ChainPublisher, files, follow
from trainer_bridge.chain import follower as follower_module
from trainer_bridge.chain import publisher as publisher_module
from trainer_bridge.chain.disk import LOCK
from trainer_bridge.chain.index import INDEX, Link, read_index, write_index
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.session.kept import KEPT

pytestmark = pytest.mark.timeout(120)

EVERY = 4


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the toy model, several files a version."""
    monkeypatch.setattr(files, "PART_BYTES", 64 << 10)


@pytest.fixture
def publisher(tmp_path: Path) -> ChainPublisher:
    """Writes into ``tmp_path / "chain"``, for engines that keep what a first update said."""
    return ChainPublisher(tmp_path / "chain", trained(), EVERY)


def trained(tp: int = 1) -> FakeEngine:
    engine = engine_of(tp)
    update(toy.checkpoint(99), engine, version=0, run="before")
    return engine


def versions(count: int) -> Iterator[tuple[int, toy.Tensors]]:
    """Weights that change by small steps."""
    tensors = toy.checkpoint(0)
    for version in range(count):
        yield version, tensors
        tensors = step(tensors, version)


def encoded(tensors: toy.Tensors) -> toy.Tensors:
    """As they are published."""
    return {
        name + suffix: part
        for name, tensor in tensors.items()
        for suffix, part in (
            BLOCK_FP8.encode(tensor) if name in toy.FP8_NAMES else {"": tensor}
        ).items()
    }


def links(folder: Path) -> tuple[Link, ...]:
    return read_index(folder).links


def bring(follower: ChainFollower, engine: FakeEngine) -> int:
    """Advance, and update an engine; the version that it has."""
    with suppress(ChainError):  # it may have come a part of the way
        follower.advance()
    follower.serve([engine])
    assert follower.policy is not None
    assert {w.policy for w in engine.ranks} == {follower.policy}
    return follower.policy.version


@pytest.mark.parametrize("carry", [dict, list], ids=["mapping", "list"])
def test_a_tied_head_is_held_to_the_embedding(tmp_path: Path, carry: Callable[[Any], Any]) -> None:
    """As in an update; and it is not published."""
    engine, tensors = engine_of(1), toy.checkpoint(0)
    engine.tied = list(toy.SHAPES["embed.weight"])
    update(toy.checkpoint(99), engine, version=0, run="before")
    publisher = ChainPublisher(tmp_path / "chain", engine, EVERY)
    head = tensors["embed.weight"].clone()
    publisher.publish(carry([*tensors.items(), ("lm_head.weight", head)]), version=0, run="r")
    follower = ChainFollower(tmp_path / "chain")
    assert bring(follower, engine) == 0
    assert holds(engine, tensors)
    with pytest.raises(ManifestError, match="is not the embedding"):
        publisher.publish(
            carry([*tensors.items(), ("lm_head.weight", head.flip(0))]), version=1, run="r"
        )
    with pytest.raises(ManifestError, match=r"norm\.weight has no data"):
        publisher.publish(
            carry({**tensors, "norm.weight": tensors["norm.weight"].to("meta")}.items()),
            version=1,
            run="r",
        )
    assert len(links(tmp_path / "chain")) == 1


@pytest.mark.guarantee("all-or-none", fault="weights through a folder, one rank and two")
@pytest.mark.parametrize("tp", [1, 2])
def test_every_version_arrives_byte_for_byte(
    tmp_path: Path, publisher: ChainPublisher, tp: int
) -> None:
    """For one that has followed from the start, and for one that joins late."""
    engine, late = trained(tp), trained(tp)
    follower = ChainFollower(tmp_path / "chain")
    sent = []
    for version, tensors in versions(3 * EVERY):
        sent.append(publisher.publish(tensors, version=version, run="r"))
        assert bring(follower, engine) == version
        assert holds(engine, tensors)
    assert bring(ChainFollower(tmp_path / "chain"), late) == version
    assert holds(late, tensors)
    assert max(sent[1:]) < 0.05 * sent[0], "deltas, also where a version is written whole besides"
    assert [bool(link.anchor) for link in links(tmp_path / "chain")] == 2 * [
        True,
        False,
        False,
        False,
    ]


def test_files_of_old_versions_go(tmp_path: Path, publisher: ChainPublisher) -> None:
    for version, tensors in versions(3 * EVERY):
        publisher.publish(tensors, version=version, run="r")
    there = {path.name for path in (tmp_path / "chain").iterdir()}
    named = {
        part.name for link in links(tmp_path / "chain") for part in (*link.delta, *link.anchor)
    }
    assert there == {INDEX, LOCK, *named} and len(links(tmp_path / "chain")) == 2 * EVERY


@pytest.mark.guarantee("one-version", fault="a file of a chain is missing, torn or late")
@pytest.mark.parametrize("is_torn", [False, True])
def test_a_link_that_is_lost(tmp_path: Path, publisher: ChainPublisher, is_torn: bool) -> None:
    """The engine stays at the version before, until the file comes or a later version is whole."""
    folder, engine = tmp_path / "chain", trained()
    follower = ChainFollower(folder)
    done = [tensors for version, tensors in versions(EVERY + 2)]
    for version in range(2):
        publisher.publish(done[version], version=version, run="r")
        bring(follower, engine)
    for version in (2, 3):
        publisher.publish(done[version], version=version, run="r")
    lost = folder / links(folder)[2].delta[-1].name
    content = lost.read_bytes()
    if is_torn:
        lost.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        lost.unlink()
    assert bring(follower, engine) == 1 and holds(engine, done[1])
    lost.write_bytes(content)
    assert bring(follower, engine) == 3 and holds(engine, done[3])

    other, late = ChainFollower(folder), trained()
    lost.unlink()
    assert bring(other, late) == 1 and holds(late, done[1])
    for version in (4, 5):
        publisher.publish(done[version], version=version, run="r")
    assert links(folder)[4].anchor
    assert bring(other, late) == 5 and holds(late, done[5])


def test_an_anchor_that_is_lost_leaves_the_one_before(
    tmp_path: Path, publisher: ChainPublisher
) -> None:
    for version, tensors in versions(EVERY + 1):
        publisher.publish(tensors, version=version, run="r")
    folder = tmp_path / "chain"
    (folder / links(folder)[EVERY].anchor[0].name).unlink()
    engine = trained()
    assert bring(ChainFollower(folder), engine) == EVERY and holds(engine, tensors)
    (folder / links(folder)[0].anchor[0].name).unlink()
    with pytest.raises(ChainError, match="copy it"):
        ChainFollower(folder).advance()


def test_a_publisher_that_restarts_writes_the_next_version_whole(
    tmp_path: Path, publisher: ChainPublisher
) -> None:
    folder, engine = tmp_path / "chain", trained()
    follower = ChainFollower(folder)
    publisher.publish(toy.checkpoint(0), version=5, run="r")
    bring(follower, engine)
    again = ChainPublisher(folder, trained(), EVERY)
    with pytest.raises(ChainError, match="another process publishes"):
        again.publish(toy.checkpoint(1), version=6, run="r")
    publisher.close()
    for version in (5, 4):
        with pytest.raises(ChainError, match="has version 5 of run 'r' already"):
            again.publish(toy.checkpoint(1), version=version, run="r")
    for run, version, seed in (("r", 6, 1), ("resumed", 2, 2)):
        again.publish(toy.checkpoint(seed), version=version, run=run)
        assert bring(follower, engine) == version and holds(engine, toy.checkpoint(seed))
    assert [(link.policy, bool(link.anchor)) for link in links(folder)] == [
        (Policy("r", 5), True),
        (Policy("r", 6), True),
        (Policy("resumed", 2), False),
    ]
    with pytest.raises(ChainError, match="'r' was replaced"):
        again.publish(toy.checkpoint(3), version=7, run="r")


@pytest.mark.guarantee("quarantine", fault="NaN in a version of a chain")
def test_a_version_that_fails_is_not_in_the_chain(
    tmp_path: Path, publisher: ChainPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "chain"
    publisher.publish(toy.checkpoint(0), version=0, run="r")
    before = sorted(path.name for path in folder.iterdir())
    bad = toy.checkpoint(1)
    bad["mlp.experts.1.down.weight"][3, 5] = torch.nan
    in_norm = toy.checkpoint(1)
    in_norm["norm.weight"][7] = torch.inf
    for wrong in (bad, in_norm):
        with pytest.raises(ManifestError, match="NaN or Inf"):
            publisher.publish(wrong, version=1, run="r")
    with pytest.raises(ManifestError, match=r"norm\.weight is only in one of the last two"):
        publisher.publish(
            {n: t for n, t in toy.checkpoint(1).items() if n != "norm.weight"}, version=1, run="r"
        )
    with monkeypatch.context() as patch:
        patch.setattr(
            publisher_module, "write_index", lambda *_: (_ for _ in ()).throw(OSError("no space"))
        )
        with pytest.raises(OSError, match="no space"):
            publisher.publish(toy.checkpoint(1), version=1, run="r")
    assert sorted(path.name for path in folder.iterdir()) == before
    engine, follower = trained(), ChainFollower(folder)
    bring(follower, engine)
    stepped = step(toy.checkpoint(0), 1)
    publisher.publish(stepped, version=1, run="r")
    assert not links(folder)[1].anchor
    assert bring(follower, engine) == 1 and holds(engine, stepped)


def test_an_engine_that_was_not_updated_says_no_formats(tmp_path: Path) -> None:
    engine = engine_of(1)
    engine.ranks[0].table = None
    with pytest.raises(ChainError, match="update it first"):
        ChainPublisher(tmp_path / "chain", engine).publish(toy.checkpoint(0), version=0, run="r")
    with pytest.raises(ChainError, match="no version yet"):
        ChainFollower(tmp_path / "chain").update(engine)


def test_a_status_that_says_too_little_is_named(
    tmp_path: Path, publisher: ChainPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish(toy.checkpoint(0), version=0, run="r")
    engine, follower = trained(), ChainFollower(tmp_path / "chain")
    follower.advance()
    client = SimpleNamespace(control=lambda *_: {"ok": True, "run": "r", "version": 0})
    monkeypatch.setattr(KEPT, "connection_to", lambda _: SimpleNamespace(client=client))
    with pytest.raises(EngineError, match="its state"):
        follower.serve([engine])


def test_what_cannot_be_published_is_refused(tmp_path: Path, publisher: ChainPublisher) -> None:
    weights = toy.checkpoint(0)
    for change, why in (
        ({KV_SCALES: torch.ones(2)}, "pass kv_scales"),
        ({"norm.weight": torch.ones(toy.HIDDEN, dtype=torch.int64)}, "has dtype torch.int64"),
        ({"norm.weight": torch.ones(0)}, "no empty tensors"),
    ):
        with pytest.raises(ManifestError, match=why):
            publisher.publish({**weights, **change}, version=0, run="r")
    with pytest.raises(ManifestError, match="an iterator cannot be published"):
        publisher.publish(iter(weights.items()), version=0, run="r")
    with pytest.raises(ManifestError, match="none"):
        publisher.publish(weights, version=0, run="r", kv_scales=torch.ones(1, 2, 1))
    assert links(tmp_path / "chain") == ()


def test_codes_and_scales_are_published_as_they_are(
    tmp_path: Path, publisher: ChainPublisher
) -> None:
    engine, follower = trained(), ChainFollower(tmp_path / "chain")
    tensors = toy.checkpoint(0)
    publisher.publish(encoded(tensors), version=0, run="r")
    assert bring(follower, engine) == 0 and holds(engine, tensors)
    publisher.publish(step(tensors, 1), version=1, run="r")
    assert bring(follower, engine) == 1 and holds(engine, step(tensors, 1))


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ("{", "JSONDecodeError"),
        ('{"format": 9, "links": []}', "format 9, not 2"),
        ('{"format": 2}', "KeyError"),
        ('{"format": 2, "links": [3]}', "TypeError"),
        ('{"format": 2, "links": [{"delta": [], "anchor": []}]}', "TypeError"),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, index: str, why: str) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ChainError, match=why):
        ChainFollower(tmp_path).advance()


@pytest.mark.parametrize(
    ("where", "field", "value"),
    [
        ("link", "serial", "1"),
        ("link", "run", 1),
        ("part", "bytes", 1.0),
        ("part", "sha256", 1),
    ],
)
def test_an_index_of_other_types(
    tmp_path: Path, publisher: ChainPublisher, where: str, field: str, value: object
) -> None:
    publisher.publish(toy.checkpoint(0), version=0, run="r")
    index = tmp_path / "chain" / INDEX
    content = json.loads(index.read_text())
    (link,) = content["links"]
    (link if where == "link" else link["anchor"][0])[field] = value
    index.write_text(json.dumps(content))
    with pytest.raises(ChainError, match=f"TypeError: {field} is"):
        ChainFollower(tmp_path / "chain").advance()


def test_an_index_names_no_file_outside_of_its_folder(
    tmp_path: Path, publisher: ChainPublisher
) -> None:
    publisher.publish(toy.checkpoint(0), version=0, run="r")
    index = tmp_path / "chain" / INDEX
    content = json.loads(index.read_text())
    content["links"][0]["anchor"][0]["name"] = "../secret"
    index.write_text(json.dumps(content))
    with pytest.raises(ChainError, match="not the name of a chain's file"):
        ChainFollower(tmp_path / "chain").advance()


def swapped(tensors: toy.Tensors) -> toy.Tensors:
    """With two rows in each other's place: the sum of all words is the same."""
    embeddings = tensors["embed.weight"].clone()
    embeddings[[0, 1]] = embeddings[[1, 0]]
    return {**tensors, "embed.weight": embeddings}


def interrupted(publisher: ChainPublisher, tensors: toy.Tensors, version: int) -> None:
    """A version whose publisher is interrupted right behind its index."""

    def write_and_stop(*arguments: Any) -> None:
        write_index(*arguments)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publisher_module, "write_index", write_and_stop)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(tensors, version=version, run="r")


def test_a_publisher_that_is_interrupted_behind_its_index(
    tmp_path: Path, publisher: ChainPublisher
) -> None:
    engine, follower = trained(), ChainFollower(tmp_path / "chain")
    tensors = toy.checkpoint(0)
    publisher.publish(tensors, version=0, run="r")
    bring(follower, engine)
    interrupted(publisher, swapped(tensors), 1)
    assert bring(follower, engine) == 1 and holds(engine, swapped(tensors))
    publisher.publish(step(tensors, 2), version=2, run="r")
    assert bring(follower, engine) == 2 and holds(engine, step(tensors, 2))


def test_tensors_that_are_not_those_of_the_index_are_refused(
    tmp_path: Path, publisher: ChainPublisher
) -> None:
    """The control of the digest, which must see rows that change places: all files are sound."""
    folder, tensors = tmp_path / "chain", toy.checkpoint(0)
    for version, weights in enumerate((tensors, swapped(tensors))):
        publisher.publish(weights, version=version, run="r")
    content = json.loads((folder / INDEX).read_text())
    content["links"][1]["digest"] = content["links"][0]["digest"]
    (folder / INDEX).write_text(json.dumps(content))
    follower = ChainFollower(folder)
    with pytest.raises(ChainError, match="not those that were published"):
        follower.advance()
    assert follower.policy == Policy("r", 0)


def test_a_folder_that_is_emptied_begins_a_new_chain(
    tmp_path: Path, publisher: ChainPublisher
) -> None:
    folder, engine = tmp_path / "chain", trained()
    follower = ChainFollower(folder)
    publisher.publish(toy.checkpoint(0), version=0, run="r")
    bring(follower, engine)
    for path in folder.iterdir():
        path.unlink()
    publisher.publish(toy.checkpoint(1), version=1, run="r")
    assert links(folder)[0].anchor
    assert bring(follower, engine) == 1 and holds(engine, toy.checkpoint(1))


def test_an_older_copy_of_the_index_takes_nothing_back(
    tmp_path: Path, publisher: ChainPublisher
) -> None:
    index, follower = tmp_path / "chain" / INDEX, ChainFollower(tmp_path / "chain")
    publisher.publish(toy.checkpoint(0), version=0, run="r")
    older = index.read_text()
    publisher.publish(toy.checkpoint(1), version=1, run="r")
    follower.advance()
    index.write_text(older)
    assert not follower.advance() and follower.policy == Policy("r", 1)


@pytest.mark.parametrize("content", [b"no zstd", b""])
def test_a_file_that_cannot_be_decoded(
    tmp_path: Path, publisher: ChainPublisher, content: bytes
) -> None:
    """Its name, size and SHA-256 are those of the index."""
    publisher.publish(toy.checkpoint(0), version=0, run="r")
    folder = tmp_path / "chain"
    index = json.loads((folder / INDEX).read_text())
    part = index["links"][0]["anchor"][0]
    (folder / part["name"]).write_bytes(content)
    part |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ChainError, match="cannot be read"):
        ChainFollower(folder).advance()


def test_files_of_a_publisher_that_was_killed_go(tmp_path: Path, publisher: ChainPublisher) -> None:
    folder = tmp_path / "chain"
    publisher.publish(toy.checkpoint(0), version=0, run="r")
    for name in ("1-delta-0.safetensors.zst", "1-delta-1.safetensors.zst.tmp"):
        (folder / name).write_bytes(b"a part of it")
    publisher.publish(toy.checkpoint(1), version=1, run="r")
    assert not list(folder.glob("1-*"))


# -- following


class Looks:
    """What happens between two looks of ``follow``, which ends after the last."""

    def __init__(self, patch: pytest.MonkeyPatch, *events: Callable[[], object]) -> None:
        self.waits: list[float] = []
        events_left = iter(events)

        def sleep(seconds: float) -> None:
            self.waits.append(seconds)
            event = next(events_left, None)
            if event is None:
                raise StopFollowingError
            event()

        patch.setattr(follower_module, "sleep", sleep)


class StopFollowingError(BaseException):
    pass


def test_following_goes_on_through_faults(
    tmp_path: Path,
    publisher: ChainPublisher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A folder that is empty yet, an engine that refuses, an index that is torn while an engine
    restarts, an engine that is quarantined at its version, and the version that heals it."""
    folder, engines = tmp_path / "chain", [trained(), trained()]
    done = [tensors for _, tensors in versions(3)]
    begin = engines[0]._begin

    def refuse(message: dict[str, object]) -> dict[str, object]:
        engines[0]._begin = begin  # type: ignore[method-assign]
        raise EngineError("not now")

    def refuse_the_first() -> None:
        engines[0]._begin = refuse  # type: ignore[method-assign]
        publisher.publish(done[0], version=0, run="r")

    def tear_and_restart() -> None:
        assert all(holds(engine, done[0]) for engine in engines)
        (folder / INDEX).write_text("{")
        engines[1].ranks = trained().ranks

    def quarantine() -> None:
        assert holds(engines[1], done[0])
        engines[0].ranks[0].quarantine("as after a release of memory", "")
        ops.append(len(engines[0].ops))

    def heal() -> None:
        assert engines[0].ops[ops[0] :].count("begin") == 0, "a version is committed once"
        assert engines[0].ranks[0].state is State.QUARANTINED
        (folder / INDEX).unlink()
        publisher.publish(done[1], version=1, run="r")

    ops: list[int] = []
    looks = Looks(monkeypatch, refuse_the_first, lambda: None, tear_and_restart, quarantine, heal)
    with caplog.at_level(logging.WARNING), pytest.raises(StopFollowingError):
        follow(folder, engines, poll_s=0.5)
    assert all(holds(engine, done[1]) for engine in engines)
    assert engines[0].ranks[0].state is State.SERVING
    messages = [r.getMessage() for r in caplog.records if r.name == follower_module.__name__]
    for what in ("has no version yet", "not now", "is not the index"):
        assert sum(what in message for message in messages) == 1, what
    assert looks.waits[:4] == [1.0, 2.0, 0.5, 1.0], "longer after each look that failed"


def test_once_ends_also_where_an_engine_is_ahead(tmp_path: Path, publisher: ChainPublisher) -> None:
    engines = [trained(), trained()]
    publisher.publish(toy.checkpoint(0), version=3, run="r")
    update(toy.checkpoint(7), engines[0], version=5, run="r")
    follow(tmp_path / "chain", engines, once=True)
    assert holds(engines[0], toy.checkpoint(7)) and holds(engines[1], toy.checkpoint(0))


def test_an_engine_that_is_gone_holds_up_no_other(
    tmp_path: Path, publisher: ChainPublisher
) -> None:
    gone, here = trained(), trained()
    publisher.publish(toy.checkpoint(0), version=3, run="r")
    follower = ChainFollower(tmp_path / "chain")
    follower.advance()
    control = gone.control

    def unreachable(message: dict[str, object], timeout_s: float = 9.0) -> dict[str, object]:
        raise EngineError("the engine cannot be reached")

    gone.control = unreachable  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="cannot be reached"):
        follower.serve([gone, here])
    assert holds(here, toy.checkpoint(0))
    gone.control = control  # type: ignore[method-assign]
    assert follower.serve([gone, here])
    assert holds(gone, toy.checkpoint(0))


def test_what_can_never_follow_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="http"):
        follow(tmp_path, "host:1")
    with pytest.raises(ChainError, match="above 0"):
        follow(tmp_path, trained(), poll_s=-1.0)


def of_two_ranks(rank: int, folder: Path) -> None:
    """As one rank publishes; a failure of either reaches the other before anything is gathered."""
    engine = trained() if rank == 0 else None
    publisher = ChainPublisher(folder / "chain", engine, EVERY)
    sizes = []
    for version, tensors in versions(2):
        sizes.append(publisher.publish(toy_trainer(tensors), version=version, run="r"))
    assert sizes[1] < 0.05 * sizes[0]

    def publish(version: int, weights: toy.Tensors = tensors) -> None:
        publisher.publish(toy_trainer(weights), version=version, run="r")

    bad = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    for call, why in (
        (lambda: publish(2, bad), "NaN"),
        (lambda: publish(1), "already"),
        (lambda: publish(-1 if rank == 0 else 2), "version is -1"),
        (lambda: publish(-1 if rank == 1 else 2), "version is -1"),
        (lambda: publish(2 + rank), "on rank 1"),
    ):
        assert why in failure(call)[1]
    publish(2, step(tensors, 7))
    if engine is not None:
        assert bring(ChainFollower(folder / "chain"), engine) == 2
        assert holds(engine, step(tensors, 7))


def test_two_ranks_publish(tmp_path: Path) -> None:
    ranks.run(of_two_ranks, tmp_path, 2, 30)
