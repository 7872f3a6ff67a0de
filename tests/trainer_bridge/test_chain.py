"""Weights through a folder: real files, and engines without SGLang, checked by an oracle."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.states import State
from tests.sgl_fp8rl.engine.fake_engine import FakeEngine
from tests.sgl_fp8rl.weight_update import toy
from tests.trainer_bridge import ranks
from tests.trainer_bridge.test_far_engine import step
from tests.trainer_bridge.test_fsdp import failure, toy_trainer
from tests.trainer_bridge.test_update import engine_of, holds
from trainer_bridge import update
from trainer_bridge.chain import ChainError, ChainFollower, ChainPublisher, files, follow
from trainer_bridge.chain.files import INDEX, Link

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


def links(folder: Path) -> list[Link]:
    return files.read_index(folder)


def bring(follower: ChainFollower, engine: FakeEngine) -> int:
    """Advance, and update an engine; the version that it has."""
    if follower.advance():
        follower.update(engine)
    assert follower.policy is not None
    assert {w.policy for w in engine.ranks} == {follower.policy}
    return follower.policy.version


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
    assert there == {INDEX, *named} and len(links(tmp_path / "chain")) == 2 * EVERY


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
    for run, version in (("r", 5), ("r", 4)):
        with pytest.raises(ChainError, match="has version 5 of run 'r' already"):
            again.publish(toy.checkpoint(1), version=version, run=run)
    for run, version, seed in (("r", 6, 1), ("resumed", 2, 2)):
        again.publish(toy.checkpoint(seed), version=version, run=run)
        assert bring(follower, engine) == version and holds(engine, toy.checkpoint(seed))
    assert [(link.policy, bool(link.anchor)) for link in links(folder)] == [
        (Policy("r", 5), True),
        (Policy("r", 6), True),
        (Policy("resumed", 2), False),
    ]


@pytest.mark.guarantee("quarantine", fault="NaN in a version of a chain")
def test_a_version_that_fails_is_not_in_the_chain(
    tmp_path: Path, publisher: ChainPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "chain"
    publisher.publish(toy.checkpoint(0), version=0, run="r")
    before = sorted(path.name for path in folder.iterdir())
    bad = toy.checkpoint(1)
    bad["mlp.experts.1.down.weight"][3, 5] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        publisher.publish(bad, version=1, run="r")
    with pytest.raises(ManifestError, match=r"norm\.weight is in one of two versions"):
        publisher.publish(
            {n: t for n, t in toy.checkpoint(1).items() if n != "norm.weight"}, version=1, run="r"
        )
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_index", lambda *_: (_ for _ in ()).throw(OSError("no space")))
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


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ("{", "JSONDecodeError"),
        ('{"format": 2, "links": []}', "format 2, not 1"),
        ('{"format": 1}', "KeyError"),
        ('{"format": 1, "links": [3]}', "TypeError"),
        ('{"format": 1, "links": [{"delta": [], "anchor": []}]}', "TypeError"),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, index: str, why: str) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ChainError, match=why):
        ChainFollower(tmp_path).advance()


def test_an_index_names_no_file_outside_of_its_folder(
    tmp_path: Path, publisher: ChainPublisher
) -> None:
    publisher.publish(toy.checkpoint(0), version=0, run="r")
    index = tmp_path / "chain" / INDEX
    content = json.loads(index.read_text())
    content["links"][0]["anchor"][0]["name"] = "../secret"
    index.write_text(json.dumps(content))
    with pytest.raises(ChainError, match="no name of a file"):
        ChainFollower(tmp_path / "chain").advance()


def test_a_delta_of_another_version_is_refused(tmp_path: Path, publisher: ChainPublisher) -> None:
    """The control of the digests: files are what the index says, and the tensors are not."""
    folder = tmp_path / "chain"
    for version, tensors in versions(3):
        publisher.publish(tensors, version=version, run="r")
    content = json.loads((folder / INDEX).read_text())
    content["links"][1]["delta"] = content["links"][2]["delta"]
    (folder / INDEX).write_text(json.dumps(content))
    follower = ChainFollower(folder)
    follower.advance()
    assert follower.policy == Policy("r", 0)


def test_following_goes_on_through_faults(
    tmp_path: Path, publisher: ChainPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that is empty yet, an engine that refuses once, is quarantined, or is a new one."""
    folder, engine = tmp_path / "chain", trained()
    done = [tensors for _, tensors in versions(3)]
    refused = []
    begin = engine._begin

    def refuse_once(message: dict[str, object]) -> dict[str, object]:
        if not refused:
            refused.append(message)
            raise ManifestError("not now")
        return begin(message)

    engine._begin = refuse_once  # type: ignore[method-assign]
    seen: list[Policy | None] = []

    def is_over(policy: Policy | None) -> bool:
        seen.append(policy)
        if len(seen) == 1:
            publisher.publish(done[0], version=0, run="r")
        if policy == Policy("r", 0):
            assert holds(engine, done[0])
            engine.ranks[0].quarantine("as after a failed update", "")
            publisher.publish(done[1], version=1, run="r")
        return policy == Policy("r", 1)

    with caplog.at_level(logging.WARNING):
        follow(folder, engine, poll_s=0.01, is_over=is_over)
    assert seen == [None, None, Policy("r", 0), Policy("r", 1)] and refused
    assert holds(engine, done[1]) and engine.ranks[0].state is State.SERVING
    assert "not now" in caplog.text


def of_two_ranks(rank: int, folder: Path) -> None:
    """As one rank publishes; a failure of the first reaches the other."""
    engine = trained() if rank == 0 else None
    publisher = ChainPublisher(folder / "chain", engine, EVERY)
    sizes = []
    for version, tensors in versions(2):
        sizes.append(publisher.publish(toy_trainer(tensors), version=version, run="r"))
    assert sizes[1] < 0.05 * sizes[0]
    bad = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    name, text, _ = failure(lambda: publisher.publish(toy_trainer(bad), version=2, run="r"))
    assert name == "ValueError" and "NaN" in text
    publisher.publish(toy_trainer(step(tensors, 7)), version=2, run="r")
    if engine is not None:
        assert bring(ChainFollower(folder / "chain"), engine) == 2
        assert holds(engine, step(tensors, 7))


def test_two_ranks_publish(tmp_path: Path) -> None:
    ranks.run(of_two_ranks, tmp_path, 2, 30)
