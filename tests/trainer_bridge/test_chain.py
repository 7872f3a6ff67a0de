"""Weights through a folder: real files, and engines without SGLang, checked by an oracle."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.states import State
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge import ranks
from tests.trainer_bridge.test_fsdp import failure, toy_trainer
from tests.trainer_bridge.test_remote_engine import interrupted, step
from tests.trainer_bridge.test_update import engine_of, holds
from trainer_bridge import update
from trainer_bridge.chain import ChainError, ChainFollower, ChainPublisher, files, follow
from trainer_bridge.chain import follower as follower_module
from trainer_bridge.chain import publisher as publisher_module
from trainer_bridge.chain.index import INDEX, LOCK, Link, read_index, write_index
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.session.kept import KEPT

pytestmark = pytest.mark.timeout(120)

EVERY = 4


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the toy model, several files a version."""
    monkeypatch.setattr(files, "PART_BYTES", 64 << 10)


def trained(tp: int = 1) -> FakeEngine:
    engine = engine_of(tp)
    update(toy.checkpoint(99), engine, version=0, run="before")
    return engine


class Chain:
    """A folder, who writes into it, and an engine that keeps what a first update said."""

    def __init__(self, folder: Path, engine: FakeEngine | None = None) -> None:
        self.folder = folder
        self.index = folder / INDEX
        self.publisher = ChainPublisher(folder, engine or trained(), EVERY)
        self.follower = ChainFollower(folder)

    @cached_property
    def engine(self) -> FakeEngine:
        return trained()

    @property
    def links(self) -> tuple[Link, ...]:
        return read_index(self.folder).links

    def publish(self, *weights: Any, first: int = 0, **options: Any) -> list[int]:
        """Versions from the first on; the bytes of each."""
        return [
            self.publisher.publish(each, **{"version": version, "run": "r", **options})
            for version, each in enumerate(weights, first)
        ]

    def bring(self, version: int, tensors: toy.Tensors) -> None:
        arrives(version, tensors, self.follower, self.engine)


def arrives(
    version: int, tensors: toy.Tensors, follower: ChainFollower, engine: FakeEngine
) -> None:
    """Advance, and update an engine; it has this version then."""
    with suppress(ChainError):  # it may have come a part of the way
        follower.advance()
    follower.serve([engine])
    assert follower.policy is not None and follower.policy.version == version
    assert {w.policy for w in engine.ranks} == {follower.policy}
    assert holds(engine, tensors)


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(tmp_path / "chain")


def versions(count: int) -> Iterator[toy.Tensors]:
    """Weights that change by small steps."""
    tensors = toy.checkpoint(0)
    for version in range(count):
        yield tensors
        tensors = step(tensors, version)


@pytest.mark.parametrize("carry", [dict, list], ids=["mapping", "list"])
def test_a_tied_head_is_held_to_the_embedding(tmp_path: Path, carry: Callable[[Any], Any]) -> None:
    """As in an update; and it is not published."""
    engine, tensors = engine_of(1), toy.checkpoint(0)
    engine.tied = list(toy.SHAPES["embed.weight"])
    update(toy.checkpoint(99), engine, version=0, run="before")
    chain = Chain(tmp_path / "chain", engine)
    head = tensors["embed.weight"].clone()
    chain.publish(carry([*tensors.items(), ("lm_head.weight", head)]))
    arrives(0, tensors, chain.follower, engine)
    for changed, why in (
        ({"lm_head.weight": head.flip(0)}, "is not the embedding"),
        ({"norm.weight": tensors["norm.weight"].to("meta")}, r"norm\.weight has no data"),
    ):
        with pytest.raises(ManifestError, match=why):
            chain.publish(carry({**tensors, **changed}.items()), first=1)
    assert len(chain.links) == 1


@pytest.mark.guarantee("all-or-none", fault="weights through a folder, one rank and two")
@pytest.mark.parametrize("tp", [1, 2])
def test_every_version_arrives_byte_for_byte(chain: Chain, tp: int) -> None:
    """For one that has followed from the start, and for one that joins late."""
    chain.engine = trained(tp)
    sent = []
    for version, tensors in enumerate(versions(3 * EVERY)):
        sent += chain.publish(tensors, first=version)
        chain.bring(version, tensors)
    arrives(version, tensors, ChainFollower(chain.folder), trained(tp))
    assert max(sent[1:]) < 0.05 * sent[0], "deltas, also where a version is written whole besides"
    assert [bool(link.anchor) for link in chain.links] == 2 * [True, False, False, False]
    # files of old versions are gone
    named = {part.name for link in chain.links for part in (*link.delta, *link.anchor)}
    assert {path.name for path in chain.folder.iterdir()} == {INDEX, LOCK, *named}


@pytest.mark.guarantee("one-version", fault="a file of a chain is missing, torn or late")
@pytest.mark.parametrize("is_torn", [False, True])
def test_a_link_that_is_lost(chain: Chain, is_torn: bool) -> None:
    """The engine stays at the version before, until the file comes or a later version is whole."""
    done = [*versions(EVERY + 2)]
    chain.publish(*done[:2])
    chain.bring(1, done[1])
    chain.publish(*done[2:4], first=2)
    lost = chain.folder / chain.links[2].delta[-1].name
    content = lost.read_bytes()
    if is_torn:
        lost.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        lost.unlink()
    chain.bring(1, done[1])
    lost.write_bytes(content)
    chain.bring(3, done[3])

    chain.follower, chain.engine = ChainFollower(chain.folder), trained()
    lost.unlink()
    chain.bring(1, done[1])
    chain.publish(*done[4:], first=4)
    assert chain.links[4].anchor
    chain.bring(5, done[5])


def test_an_anchor_that_is_lost_leaves_the_one_before(chain: Chain) -> None:
    *_, tensors = done = [*versions(EVERY + 1)]
    chain.publish(*done)
    (chain.folder / chain.links[EVERY].anchor[0].name).unlink()
    chain.bring(EVERY, tensors)
    (chain.folder / chain.links[0].anchor[0].name).unlink()
    with pytest.raises(ChainError, match="copy it"):
        ChainFollower(chain.folder).advance()


def test_a_publisher_that_restarts_writes_the_next_version_whole(chain: Chain) -> None:
    chain.publish(toy.checkpoint(0), first=5)
    chain.bring(5, toy.checkpoint(0))
    before, chain.publisher = chain.publisher, ChainPublisher(chain.folder, trained(), EVERY)
    with pytest.raises(ChainError, match="another process publishes"):
        chain.publish(toy.checkpoint(1), first=6)
    before.close()
    for version in (5, 4):
        with pytest.raises(ChainError, match="has version 5 of run 'r' already"):
            chain.publish(toy.checkpoint(1), first=version)
    for run, version, seed in (("r", 6, 1), ("resumed", 2, 2)):
        chain.publish(toy.checkpoint(seed), first=version, run=run)
        chain.bring(version, toy.checkpoint(seed))
    assert [(link.policy, bool(link.anchor)) for link in chain.links] == [
        (Policy("r", 5), True),
        (Policy("r", 6), True),
        (Policy("resumed", 2), False),
    ]
    with pytest.raises(ChainError, match="'r' was replaced"):
        chain.publish(toy.checkpoint(3), first=7)


@pytest.mark.guarantee("quarantine", fault="NaN in a version of a chain")
def test_a_version_that_fails_is_not_in_the_chain(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain.publish(toy.checkpoint(0))
    before = sorted(path.name for path in chain.folder.iterdir())
    wrong = [toy.checkpoint(1) for _ in range(3)]
    wrong[0]["mlp.experts.1.down.weight"][3, 5] = torch.nan
    wrong[1]["norm.weight"][7] = torch.inf
    del wrong[2]["norm.weight"]
    lost = r"norm\.weight is only in one of the last two"
    for tensors, why in zip(wrong, ("NaN or Inf", "NaN or Inf", lost), strict=True):
        with pytest.raises(ManifestError, match=why):
            chain.publish(tensors, first=1)

    def full(*_: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(publisher_module, "write_index", full)
        chain.publish(toy.checkpoint(1), first=1)
    assert sorted(path.name for path in chain.folder.iterdir()) == before
    chain.bring(0, toy.checkpoint(0))
    stepped = step(toy.checkpoint(0), 1)
    chain.publish(stepped, first=1)
    assert not chain.links[1].anchor
    chain.bring(1, stepped)


def test_engines_that_cannot_publish_or_follow(tmp_path: Path) -> None:
    engine = engine_of(1)
    engine.ranks[0].table = None
    chain = Chain(tmp_path / "chain", engine)
    calls: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: chain.publish(toy.checkpoint(0)), ChainError, "update it first"),
        (lambda: chain.follower.update(engine), ChainError, "no version yet"),
        (lambda: follow(tmp_path, "host:1"), EngineError, "http"),
    ]
    for call, error, why in calls:
        with pytest.raises(error, match=why):
            call()


def test_a_status_that_says_too_little_is_named(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain.publish(toy.checkpoint(0))
    chain.follower.advance()
    client = SimpleNamespace(control=lambda *_: {"ok": True, "run": "r", "version": 0})
    monkeypatch.setattr(KEPT, "connection_to", lambda _: SimpleNamespace(client=client))
    with pytest.raises(EngineError, match="its state"):
        chain.follower.serve([SimpleNamespace()])


def test_what_cannot_be_published_is_refused(chain: Chain) -> None:
    weights = toy.checkpoint(0)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ({**weights, KV_SCALES: torch.ones(2)}, {}, "pass kv_scales"),
        ({**weights, "norm.weight": torch.ones(128).long()}, {}, "has dtype torch.int64"),
        ({**weights, "norm.weight": torch.ones(0)}, {}, "no empty tensors"),
        (iter(weights.items()), {}, "an iterator cannot be published"),
        (weights, {"kv_scales": torch.ones(1, 2, 1)}, "none"),
    ]
    for given, options, why in cases:
        with pytest.raises(ManifestError, match=why):
            chain.publish(given, **options)
    assert chain.links == ()


def test_codes_and_scales_are_published_as_they_are(chain: Chain) -> None:
    tensors = toy.checkpoint(0)
    chain.publish(toy.quantized(tensors))
    chain.bring(0, tensors)
    chain.publish(step(tensors, 1), first=1)
    chain.bring(1, step(tensors, 1))


def swapped(tensors: toy.Tensors) -> toy.Tensors:
    """With two rows in each other's place: the sum of all words is the same."""
    embeddings = tensors["embed.weight"].clone()
    embeddings[[0, 1]] = embeddings[[1, 0]]
    return {**tensors, "embed.weight": embeddings}


def in_a_link(name: str, value: Any) -> Callable[[list[Any], Path], None]:
    return lambda links, folder: links[0].update({name: value})


def in_a_part(name: str, value: Any) -> Callable[[list[Any], Path], None]:
    return lambda links, folder: links[0]["anchor"][0].update({name: value})


def holding(content: bytes) -> Callable[[list[Any], Path], None]:
    """A file that cannot be decoded: its name, size and SHA-256 are those of the index."""

    def write(links: list[Any], folder: Path) -> None:
        part = links[0]["anchor"][0]
        (folder / part["name"]).write_bytes(content)
        part |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    return write


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("{", "JSONDecodeError"),
        ('{"format": 9, "links": []}', "format 9, not 2"),
        ('{"format": 2}', "KeyError"),
        ('{"format": 2, "links": [3]}', "TypeError"),
        ('{"format": 2, "links": [{"delta": [], "anchor": []}]}', "TypeError"),
        (in_a_link("serial", "1"), "TypeError: serial is"),
        (in_a_link("run", 1), "TypeError: run is"),
        (in_a_part("bytes", 1.0), "TypeError: bytes is"),
        (in_a_part("sha256", 1), "TypeError: sha256 is"),
        (in_a_part("name", "../secret"), "not the name of a chain's file"),
        (holding(b"no zstd"), "cannot be read"),
        (holding(b""), "cannot be read"),
    ],
)
def test_an_index_that_is_damaged(chain: Chain, damage: Any, why: str) -> None:
    chain.publish(toy.checkpoint(0))
    if callable(damage):
        content = json.loads(chain.index.read_text())
        damage(content["links"], chain.folder)
        damage = json.dumps(content)
    chain.index.write_text(damage)
    with pytest.raises(ChainError, match=why):
        chain.follower.advance()


def test_a_publisher_that_is_interrupted_behind_its_index(chain: Chain) -> None:
    tensors = toy.checkpoint(0)
    chain.publish(tensors)
    chain.bring(0, tensors)

    with interrupted(publisher_module, "write_index", lambda *given: write_index(*given) is None):
        chain.publish(swapped(tensors), first=1)
    chain.bring(1, swapped(tensors))
    chain.publish(step(tensors, 2), first=2)
    chain.bring(2, step(tensors, 2))


def test_tensors_that_are_not_those_of_the_index_are_refused(chain: Chain) -> None:
    """The control of the digest, which must see rows that change places: all files are sound."""
    chain.publish(toy.checkpoint(0), swapped(toy.checkpoint(0)))
    content = json.loads(chain.index.read_text())
    content["links"][1]["digest"] = content["links"][0]["digest"]
    chain.index.write_text(json.dumps(content))
    with pytest.raises(ChainError, match="not those that were published"):
        chain.follower.advance()
    assert chain.follower.policy == Policy("r", 0)


def test_files_that_others_left(chain: Chain) -> None:
    """An older copy of the index takes nothing back; those of a publisher that was killed go; and a
    folder that is emptied begins a new chain."""
    chain.publish(toy.checkpoint(0))
    chain.bring(0, toy.checkpoint(0))
    older = chain.index.read_text()
    for name in ("1-delta-0.safetensors.zst", "1-delta-1.safetensors.zst.tmp"):
        (chain.folder / name).write_bytes(b"a part of it")
    chain.publish(toy.checkpoint(1), first=1)
    assert not list(chain.folder.glob("1-*"))
    chain.follower.advance()
    chain.index.write_text(older)
    assert not chain.follower.advance() and chain.follower.policy == Policy("r", 1)
    for path in chain.folder.iterdir():
        path.unlink()
    chain.publish(toy.checkpoint(2), first=2)
    assert chain.links[0].anchor
    chain.bring(2, toy.checkpoint(2))


# -- following


class StopFollowingError(BaseException):
    pass


def test_following_goes_on_through_faults(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that is empty yet, an engine that refuses, an index that is torn while an engine
    restarts, an engine that is quarantined at its version, and the version that heals it."""
    engines, done = [trained(), trained()], [*versions(3)]
    ops: list[int] = []
    waits: list[float] = []

    def refuse_the_first() -> None:
        engines[0].dead = ("begin",)
        chain.publish(done[0])

    def allow() -> None:
        engines[0].dead = ()

    def tear_and_restart() -> None:
        assert all(holds(engine, done[0]) for engine in engines)
        chain.index.write_text("{")
        engines[1].ranks = trained().ranks

    def quarantine() -> None:
        assert holds(engines[1], done[0])
        engines[0].ranks[0].quarantine("as after a release of memory", "")
        ops.append(len(engines[0].ops))

    def heal() -> None:
        assert engines[0].ops[ops[0] :].count("begin") == 0, "a version is committed once"
        assert engines[0].ranks[0].state is State.QUARANTINED
        chain.index.unlink()
        chain.publish(done[1], first=1)

    events = iter([refuse_the_first, allow, tear_and_restart, quarantine, heal])

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        event = next(events, None)
        if event is None:
            raise StopFollowingError
        event()

    monkeypatch.setattr(follower_module, "sleep", sleep)
    with caplog.at_level(logging.WARNING), pytest.raises(StopFollowingError):
        follow(chain.folder, engines, poll_s=0.5)
    assert all(holds(engine, done[1]) for engine in engines)
    assert engines[0].ranks[0].state is State.SERVING
    messages = [r.getMessage() for r in caplog.records if r.name == follower_module.__name__]
    for what in ("has no version yet", "cannot be reached", "is not the index"):
        assert sum(what in message for message in messages) == 1, what
    assert waits[:4] == [1.0, 2.0, 0.5, 1.0], "longer after each look that failed"


def test_engines_that_are_ahead_or_gone_hold_up_no_other(chain: Chain) -> None:
    ahead, gone, here = trained(), trained(), chain.engine
    update(toy.checkpoint(7), ahead, version=5, run="r")
    chain.publish(toy.checkpoint(0), first=3)
    chain.follower.advance()
    gone.dead = ("status", "layout", "begin")
    with pytest.raises(EngineError, match="cannot be reached"):
        chain.follower.serve([gone, ahead, here])
    assert holds(here, toy.checkpoint(0))
    gone.dead = ()
    follow(chain.folder, [gone, ahead, here], once=True)
    assert holds(gone, toy.checkpoint(0)) and holds(ahead, toy.checkpoint(7))


def of_two_ranks(rank: int, folder: Path) -> None:
    """As one rank publishes; a failure of either reaches the other before anything is gathered."""
    engine = trained() if rank == 0 else None
    publisher = ChainPublisher(folder / "chain", engine, EVERY)

    def publish(version: int, weights: toy.Tensors) -> int:
        return publisher.publish(toy_trainer(weights), version=version, run="r")

    sizes = [publish(version, tensors) for version, tensors in enumerate(versions(2))]
    assert sizes[1] < 0.05 * sizes[0]
    *_, tensors = versions(2)
    bad = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    for version, weights, why in (
        (2, bad, "NaN"),
        (1, tensors, "already"),
        (-1 if rank == 0 else 2, tensors, "version is -1"),
        (-1 if rank == 1 else 2, tensors, "version is -1"),
        (2 + rank, tensors, "on rank 1"),
    ):
        assert why in failure(partial(publish, version, weights))[1]
    publish(2, step(tensors, 7))
    if engine is not None:
        arrives(2, step(tensors, 7), ChainFollower(folder / "chain"), engine)


def test_two_ranks_publish(tmp_path: Path) -> None:
    ranks.run(of_two_ranks, tmp_path, 2, 30)
