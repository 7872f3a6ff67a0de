"""How the ranks of an engine agree: what may begin, what is refused on all, and how it ends.

Each rank is a thread that runs the scheduler's hook; the trainer's side is raw sockets.
"""

import json
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from server_args import Fp8RLServerArgs
from sgl_fp8rl.formats.weight_format import TensorSpec
from sgl_fp8rl.protocol import framing
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import Manifest, ManifestError, describe
from sgl_fp8rl.protocol.policy import Policy, check_policy
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from sgl_fp8rl.receiver.kv.quantized import Heads
from sgl_fp8rl.receiver.kv.scales import KVScales
from tests.sgl_fp8rl.engine import copies
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_host import Exchange
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.transport.bucket import Bucket
from trainer_bridge.transport.rank_client import RankClients

TP = 2
TOKEN = "the session's token"
TRANSACTION = "the transaction"
TIMEOUT_S = 30.0


class Group:
    """One rank's end of a tensor-parallel group; ranks that do not all gather are found out."""

    def __init__(self, rank: int, exchange: Exchange) -> None:
        self.rank, self._exchange = rank, exchange
        self.gathered = 0

    def gather(self, value: Any) -> list[Any]:
        self.gathered += 1
        return self._exchange.gather(self.rank, value)


class FakeScheduler:
    """What an update asks of SGLang's scheduler."""

    def __init__(self, group: Group, rpc: "queue.Queue[Any] | None") -> None:
        self.tp_group = SimpleNamespace(cpu_group=group)
        self.sent: list[Any] = []
        tokenizer = SimpleNamespace(send_output=lambda output, request: self.sent.append(output))
        self.ipc_channels = SimpleNamespace(recv_from_rpc=rpc, send_to_tokenizer=tokenizer)
        self.idle = self.flushes = self.retracts = True
        self.enable_hierarchical_cache = False
        self.asked = self.retracted = 0
        self.waiting_queue: list[Any] = []
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self._engine_paused = False
        self.versions: list[str] = []
        self.record_weight_version_change = self.versions.append

    def is_fully_idle(self) -> bool:
        self.asked += 1
        return self.idle and not self.waiting_queue

    def flush_cache(self, empty_cache: bool) -> bool:
        assert not empty_cache
        return self.flushes

    def abort_request(self, request: Any) -> None:
        assert request.abort_all
        self.waiting_queue.clear()


class Engine:
    """The ranks of one engine."""

    def __init__(self, module: Any, models: list[toy.Model], shapes: toy.Shapes | None) -> None:
        self.module = module
        exchange = Exchange(TP, TIMEOUT_S)
        self.groups = [Group(rank, exchange) for rank in range(TP)]
        self.rpc: queue.Queue[Any] = queue.Queue()
        self.schedulers = [FakeScheduler(g, None if g.rank else self.rpc) for g in self.groups]
        self.ranks = [
            toy.engine(model, shapes) if shapes else EngineWeights(model, toy.BF16)
            for model in models
        ]
        self._pool = ThreadPoolExecutor(TP)

    def on_ranks(self, call: Callable[[int], Any]) -> list[Future[Any]]:
        return [self._pool.submit(call, rank) for rank in range(TP)]

    def prepare(self, message: dict[str, Any]) -> list[str]:
        """Fingerprints.

        Raises:
            ManifestError: the same on every rank.
        """
        policy = check_policy(message["run"], message["version"])
        futures = self.on_ranks(
            lambda rank: self.module.update_steps._prepare(
                self.module.SchedulerHost(self.schedulers[rank]), self.ranks[rank], policy, message
            )
        )
        errors = [future.exception(TIMEOUT_S) for future in futures]
        assert len({str(error) for error in errors}) == 1
        assert self.groups[0].gathered == self.groups[1].gathered
        return [future.result() for future in futures]

    def begin(self, message: dict[str, Any]) -> list[Future[Any]]:
        message = {"op": "begin", "token": TOKEN, **message}

        def begin(rank: int) -> Any:
            request = self.module.ControlRequest(self.schedulers[rank], self.ranks[rank], message)
            return self.module.answer(self.module._begin(request))

        return self.on_ranks(begin)

    def answer(self, message: dict[str, Any]) -> Any:
        """What the ranks reply to a ``begin`` that opens no session."""
        replies = [json.loads(f.result(TIMEOUT_S).message) for f in self.begin(message)]
        assert replies[0] == replies[1]
        assert self.rpc.empty()
        return replies[0]

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The scheduler's hooks, with threads in the place of a process group."""
    import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)

    from sgl_fp8rl.engine.control import host, scheduler

    monkeypatch.setattr(host, "gather", lambda value, group: group.gather(value))
    monkeypatch.setattr(host.dist, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(host.compat, "sock_send", lambda rpc, message: rpc.put(message))

    def retract(rank: FakeScheduler) -> bool:
        rank.retracted += 1
        return rank.retracts

    monkeypatch.setattr(host, "retract", retract)
    return scheduler


@pytest.fixture
def engine(module: Any) -> Iterator[Engine]:
    made = Engine(module, [toy.toy(rank, TP) for rank in range(TP)], toy.SHAPES)
    yield made
    made.close()


@pytest.fixture
def dummy(module: Any) -> Iterator[Engine]:
    """An engine with dummy weights: its first update records the routes."""
    made = Engine(module, [toy.toy(rank, TP) for rank in range(TP)], None)
    yield made
    made.close()


def manifest_of(tensors: toy.Tensors) -> Manifest:
    return describe(tensors.items(), 1 << 18)


def whole(manifest: Manifest, version: Any = 0) -> dict[str, Any]:
    """A message with the whole manifest."""
    return {
        "run": toy.RUN,
        "version": version,
        "transaction": TRANSACTION,
        "manifest": json.loads(json.dumps(manifest.to_json())),
    }


def short(fingerprint: str, version: Any = 0) -> dict[str, Any]:
    """A message with the name of a manifest alone."""
    return {
        "run": toy.RUN,
        "version": version,
        "transaction": TRANSACTION,
        "fingerprint": fingerprint,
    }


# -- what may begin


def test_a_manifest_is_sent_once(engine: Engine) -> None:
    manifest = manifest_of(toy.checkpoint())
    assert engine.prepare(whole(manifest)) == [manifest.fingerprint] * TP
    assert all(weights.knows(manifest.fingerprint) for weights in engine.ranks)
    again = short(manifest.fingerprint, 7)
    assert engine.prepare(again) == [manifest.fingerprint] * TP


@pytest.mark.parametrize("version", [-1, None, "1", True, 1.5, 2**63])
def test_a_version_is_looked_at_first(engine: Engine, version: Any) -> None:
    manifest = manifest_of(toy.checkpoint())
    for message in (
        whole(manifest, version),
        short("f", version),
    ):
        with pytest.raises(ManifestError, match=r"version.*whole number"):
            engine.prepare(message)
    assert not any(weights.knows(manifest.fingerprint) for weights in engine.ranks)


def test_a_version_that_does_not_grow_is_refused_before_anything(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = manifest_of(toy.checkpoint())
    for weights in engine.ranks:
        weights.policy = Policy(toy.RUN, 4)
    monkeypatch.setattr(EngineWeights, "accept", None)  # it would be called
    for message in (
        whole(manifest, 4),
        short(manifest.fingerprint, 4),
    ):
        with pytest.raises(ManifestError, match="version 4"):
            engine.prepare(message)
        assert "version 4" in engine.answer(message)["error"]
    assert [scheduler.asked for scheduler in engine.schedulers] == [0, 0]
    assert not any(weights.knows(manifest.fingerprint) for weights in engine.ranks)


def test_scheme_trainer_needs_scales_in_each_update(engine: Engine) -> None:
    """A checkpoint, which only ``accept`` sees, needs none."""
    for weights in engine.ranks:
        weights.kv = KVScales(1, Heads(1, 0, 1), "trainer", "cpu")
    without = manifest_of(toy.checkpoint())
    with pytest.raises(ManifestError, match="kv_scales"):
        engine.prepare(whole(without))
    assert not any(weights.knows(without.fingerprint) for weights in engine.ranks)
    scaled = manifest_of(toy.checkpoint() | {KV_SCALES: torch.ones(1, 2, 1)})
    assert engine.prepare(whole(scaled)) == [scaled.fingerprint] * TP
    engine.ranks[0].accept(without)


@pytest.mark.guarantee("check-first", fault="a manifest that one rank of two refuses")
def test_a_refusal_of_one_rank_is_that_of_all(engine: Engine) -> None:
    """A rank that wants another shape; the others take back what they accepted."""
    manifest = manifest_of(toy.checkpoint())
    table = engine.ranks[1].table
    assert table is not None
    table.sources = {**table.sources, "norm.weight": (64,)}
    with pytest.raises(ManifestError, match=r"norm\.weight.*shape"):
        engine.prepare(whole(manifest))
    assert not any(weights.knows(manifest.fingerprint) for weights in engine.ranks)
    assert all(weights.table is not None for weights in engine.ranks)
    assert engine.answer(short(manifest.fingerprint, 0)) == {"unknown": True}


def test_a_first_manifest_that_one_rank_refuses_leaves_no_routes(dummy: Engine) -> None:
    tensors = toy.checkpoint()
    original = dummy.ranks[1].model.loader

    def stops(model: toy.Model, weights: toy.Weights) -> None:
        original(model, (pair for pair in weights if pair[0] != "attn.k.weight"))

    dummy.ranks[1].model.loader = stops  # type: ignore[assignment]
    with pytest.raises(ManifestError, match=r"attn\.qkv\.weight"):
        dummy.prepare(whole(manifest_of(tensors)))
    assert [weights.table for weights in dummy.ranks] == [None, None]
    dummy.ranks[1].model.loader = original  # type: ignore[assignment]
    assert dummy.prepare(whole(manifest_of(tensors))) == [manifest_of(tensors).fingerprint] * TP


def test_names_that_no_rank_keeps(dummy: Engine) -> None:
    """In a first update they are a mistake; of a checkpoint, they are known."""
    tensors = {**toy.checkpoint(), "head.weight": torch.zeros(4, 4)}
    for weights in dummy.ranks:
        original = weights.model.loader

        def skips(model: toy.Model, named: toy.Weights, original: Any = original) -> None:
            original(model, (pair for pair in named if pair[0] != "head.weight"))

        weights.model.loader = skips  # type: ignore[assignment]
    manifest = manifest_of(tensors)
    with pytest.raises(ManifestError, match=r"head\.weight"):
        dummy.prepare(whole(manifest))
    assert [weights.table for weights in dummy.ranks] == [None, None]
    assert not any(weights.knows(manifest.fingerprint) for weights in dummy.ranks)
    for weights in dummy.ranks:
        weights.table = toy.record_routes(
            weights.model, {n: tuple(t.shape) for n, t in tensors.items()}
        )
        weights.table.skipped = frozenset({"head.weight"})
    assert dummy.prepare(whole(manifest)) == [manifest.fingerprint] * TP


def test_what_only_one_rank_keeps_is_kept(module: Any) -> None:
    """Experts are spread over ranks."""

    def model(rank: int) -> toy.Model:
        def load(model: toy.Model, weights: toy.Weights) -> None:
            for name, weight in weights:
                if name == f"expert.{rank}":
                    model.data("w").copy_(weight)

        return toy.Model(toy.fp8_storage("w", 128, 128), load)

    engine = Engine(module, [model(rank) for rank in range(TP)], None)
    spec = TensorSpec(toy.BF16, (128, 128))
    manifest = Manifest({"expert.0": spec, "expert.1": spec}, 1 << 16)
    assert engine.prepare(whole(manifest)) == [manifest.fingerprint] * TP
    unused = Manifest({**manifest.tensors, "expert.2": spec}, 1 << 16)
    with pytest.raises(ManifestError, match=r"expert\.2"):
        engine.prepare(whole(unused))
    engine.close()


# -- what a rank answers


def test_an_unknown_manifest_is_asked_for(engine: Engine) -> None:
    assert engine.answer(short("never seen", 0)) == {"unknown": True}
    assert engine.answer({**short(""), "fingerprint": None}) == {"unknown": True}
    engine.ranks[0].accept(manifest_of(toy.checkpoint()))  # and rank 1 has forgotten it
    known = short(manifest_of(toy.checkpoint()).fingerprint, 0)
    assert engine.answer(known) == {"unknown": True}
    assert [weights.session for weights in engine.ranks] == [None, None]
    assert [weights.state for weights in engine.ranks] == [State.SERVING] * TP


@pytest.mark.parametrize("busy", ["idle", "flushes"])
def test_a_rank_that_is_busy_keeps_all_waiting(engine: Engine, busy: str) -> None:
    setattr(engine.schedulers[1], busy, False)
    assert engine.answer(whole(manifest_of(toy.checkpoint()))) == {"busy": True}
    assert [weights.session for weights in engine.ranks] == [None, None]
    assert [weights.state for weights in engine.ranks] == [State.SERVING] * TP


def test_a_rank_without_a_socket_is_told(
    engine: Engine, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = module.update_steps.RankSocket

    made = []

    def broken(rank: int) -> Any:
        if rank:
            raise OSError("no space")
        made.append(original(rank))
        return made[0]

    monkeypatch.setattr(module.update_steps, "RankSocket", broken)
    answer = engine.answer(whole(manifest_of(toy.checkpoint())))
    assert "no space" in answer["error"] and "TMPDIR" in answer["error"]
    assert not made[0].path.parent.exists()
    assert [weights.session for weights in engine.ranks] == [None, None]


@pytest.mark.parametrize("rank", range(TP))
def test_what_copies_would_not_see_does_not_begin(
    engine: Engine, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever rank has them; the last good version is served."""
    copies.keep_copies(engine.ranks[rank].model, monkeypatch)
    message = whole(manifest_of(toy.checkpoint()))
    assert copies.WORDS in engine.answer(message)["error"]
    assert [weights.session for weights in engine.ranks] == [None, None]
    assert [weights.state for weights in engine.ranks] == [State.SERVING] * TP


# -- requests in flight

RETRACT = {"in_flight": "retract"}


def test_retraction_is_refused_where_the_cache_is_still_copied(engine: Engine) -> None:
    """HiCache's copies to the host hold the cache, so each attempt would throw prefills away."""
    for scheduler in engine.schedulers:
        scheduler.enable_hierarchical_cache = True
    message = whole(manifest_of(toy.checkpoint()))
    assert "update with in_flight='finish'" in engine.answer(message | RETRACT)["error"]
    assert [scheduler.retracted for scheduler in engine.schedulers] == [0, 0]
    assert Trainer(engine, toy.checkpoint(), in_flight="finish").ended()["state"] == "serving"


def test_nothing_is_retracted_for_what_does_not_begin(
    engine: Engine, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = manifest_of(toy.checkpoint())
    assert "-1" in engine.answer(whole(manifest, -1) | RETRACT)["error"]
    assert engine.answer(short("never seen") | RETRACT) == {"unknown": True}

    def broken(rank: int) -> Any:
        raise OSError("no space")

    monkeypatch.setattr(module.update_steps, "RankSocket", broken)
    assert "no space" in engine.answer(whole(manifest) | RETRACT)["error"]
    assert [scheduler.retracted for scheduler in engine.schedulers] == [0, 0]


def test_only_who_chose_it_retracts(engine: Engine) -> None:
    for scheduler in engine.schedulers:
        scheduler.idle = False
    for in_flight in ("abort", "finish"):
        message = whole(manifest_of(toy.checkpoint())) | {"in_flight": in_flight}
        assert engine.answer(message) == {"busy": True}
    assert [scheduler.retracted for scheduler in engine.schedulers] == [0, 0]


def test_what_cannot_finish_is_not_awaited(engine: Engine) -> None:
    message = whole(manifest_of(toy.checkpoint())) | {"in_flight": "finish"}
    for scheduler in engine.schedulers:
        scheduler.idle, scheduler._engine_paused = False, True
    assert "paused" in engine.answer(message | {"paused": True})["error"]
    # the user has continued, of which the schedulers have not heard yet
    assert engine.answer(message | {"paused": False}) == {"busy": True}
    message["paused"] = True
    for scheduler in engine.schedulers:
        scheduler._engine_paused = False
    assert engine.answer(message) == {"busy": True}


def test_what_a_pause_keeps_is_not_aborted_in_vain(engine: Engine) -> None:
    """An abort ends what waits, but what runs would end in a step, and there is none."""
    message = whole(manifest_of(toy.checkpoint())) | {"paused": True}
    for scheduler in engine.schedulers:
        scheduler._engine_paused, scheduler.waiting_queue = True, [SimpleNamespace(rid="a")]
    assert engine.answer(message) == {"busy": True}
    for scheduler in engine.schedulers:
        scheduler.idle = False
    assert "generation is paused" in engine.answer(message)["error"]
    assert [len(scheduler.waiting_queue) for scheduler in engine.schedulers] == [1, 1]


def test_a_rank_whose_cache_is_not_reset_keeps_all_waiting(engine: Engine) -> None:
    engine.schedulers[1].retracts = False
    message = whole(manifest_of(toy.checkpoint())) | RETRACT
    assert engine.answer(message) == {"busy": True}
    assert [weights.session for weights in engine.ranks] == [None, None]
    assert [weights.state for weights in engine.ranks] == [State.SERVING] * TP


@pytest.mark.parametrize("end", ["commit", "nothing written", "failure"])
def test_what_waits_for_an_update_ends_only_with_a_quarantine(engine: Engine, end: str) -> None:
    for scheduler in engine.schedulers:
        scheduler.idle = False
        scheduler.waiting_queue = [SimpleNamespace(rid="a"), SimpleNamespace(rid="b")]
    trainer = Trainer(engine, toy.checkpoint(), **RETRACT)
    if end != "nothing written":
        trainer.write()
    if end == "commit":
        trainer.ranks.ask({"op": "finish"})
        trainer.ranks.ask({"op": "commit"})
    trainer.ended()
    for scheduler in engine.schedulers:
        assert scheduler.retracted == 1
        if end == "failure":
            assert scheduler.waiting_queue == []
            assert [refusal.rid for refusal in scheduler.sent] == ["a", "b"]
            reason = scheduler.sent[0].finished_reason
            assert (reason["type"], reason["status_code"]) == ("abort", 503)
            assert "update to version 0" in reason["message"]
        else:
            assert (len(scheduler.waiting_queue), scheduler.sent) == (2, [])


def test_the_layout_names_what_any_rank_keeps(engine: Engine) -> None:
    """Each rank has an expert of its own, the second also the router."""
    for rank, weights in enumerate(engine.ranks):
        assert weights.table is not None
        elsewhere = [f"mlp.experts.{1 - rank}.{part}.weight" for part in ("gate", "up", "down")]
        weights.table.routes.update({name: [] for name in elsewhere})
    first = engine.ranks[0].table
    assert first is not None
    first.routes["mlp.router.weight"] = []
    assert set(first.by_format()["block-fp8"]) < set(toy.FP8_NAMES)

    answers = engine.on_ranks(
        lambda rank: engine.module.sources(engine.ranks[rank].table, engine.groups[rank].gather)
    )
    for answer in answers:
        assert answer.result(TIMEOUT_S) == {
            "fp32": ["mlp.router.weight"],
            "formats": {"block-fp8": sorted(toy.FP8_NAMES)},
        }


def test_the_layout_before_routes_are_known(dummy: Engine) -> None:
    answers = dummy.on_ranks(lambda rank: dummy.module.sources(None, dummy.groups[rank].gather))
    empty = {"fp32": None, "formats": {}}
    assert [answer.result(TIMEOUT_S) for answer in answers] == [empty] * TP


# -- whole sessions


class Trainer:
    """Speaks to both ranks of a session that has begun."""

    def __init__(self, engine: Engine, tensors: toy.Tensors, version: int = 0, **more: Any) -> None:
        self.engine, self.tensors = engine, tensors
        self.futures = engine.begin(whole(manifest_of(tensors), version) | more)
        begun = json.loads(engine.rpc.get(timeout=TIMEOUT_S).message)
        self.folders = [Path(socket).parent for socket in begun["sockets"]]
        self.ranks = RankClients(begun["sockets"], TOKEN)

    def write(self) -> None:
        bucket = Bucket(1 << 19)
        bucket.share(self.ranks)
        session = self.engine.ranks[0].session
        assert session is not None
        for index, chunk in enumerate(session.writer.chunks):
            for chunk_slice in chunk:
                spec = session.writer.manifest.tensors[chunk_slice.name]
                rows = self.tensors[chunk_slice.name][slice(*chunk_slice.rows)].contiguous()
                raw = rows.flatten().view(torch.uint8)
                assert raw.numel() <= spec.nbytes
                bucket.content[chunk_slice.offset :][: raw.numel()] = raw
            self.ranks.ask({"op": "chunk", "index": index})

    def ended(self) -> dict[str, Any]:
        """What both ranks tell of the end."""
        self.ranks.close()
        first, second = (json.loads(f.result(TIMEOUT_S).message) for f in self.futures)
        assert first == second
        assert [weights.session for weights in self.engine.ranks] == [None, None]
        assert not any(folder.exists() for folder in self.folders)
        assert isinstance(first, dict)
        return first


@pytest.mark.guarantee("all-or-none", fault="two ranks, one update")
def test_ranks_commit_together(engine: Engine) -> None:
    for version in (0, 3):
        tensors = toy.checkpoint(version)
        trainer = Trainer(engine, tensors, version)
        trainer.write()
        trainer.ranks.ask({"op": "finish"})
        assert trainer.ranks.ask({"op": "commit"}) == [{"ok": True}] * TP
        end = trainer.ended()
        assert (end["ended"], end["failure"], end["version"]) == (True, None, version)
        assert (end["state"], end["reason"]) == ("serving", "")
        for rank, weights in enumerate(engine.ranks):
            assert toy.same(toy.contents(weights.model), toy.expected(tensors, rank, TP))


@pytest.mark.guarantee("all-or-none", fault="NaN on one rank of two")
def test_nan_on_one_rank_quarantines_all(engine: Engine) -> None:
    tensors = toy.checkpoint()
    tensors["attn.v.weight"][-1, -1] = float("nan")  # in the rows of rank 1 alone
    trainer = Trainer(engine, tensors)
    with pytest.raises(EngineError, match=r"attn\.v\.weight"):
        trainer.write()
    end = trainer.ended()
    assert (end["ended"], end["state"], end["version"]) == (False, "quarantined", -1)
    assert [weights.state for weights in engine.ranks] == [State.QUARANTINED] * TP
    assert "version 0" in end["reason"]
    assert [weights.memory.known() for weights in engine.ranks] == [[], []]
    test_ranks_commit_together(engine)  # a complete update heals it


def test_an_update_that_wrote_nothing_changes_nothing(engine: Engine) -> None:
    trainer = Trainer(engine, toy.checkpoint())
    with pytest.raises(EngineError, match="no room in the trainer"):
        trainer.ranks.ask({"op": "abort", "reason": "no room in the trainer"})
    end = trainer.ended()
    assert (end["ended"], end["failure"]) == (False, "no room in the trainer")
    assert (end["state"], end["reason"], end["version"]) == ("serving", "", -1)


def test_a_trainer_that_dies_after_a_part(engine: Engine) -> None:
    trainer = Trainer(engine, toy.checkpoint())
    trainer.write()
    end = trainer.ended()
    assert "trainer" in end["failure"]
    assert [weights.state for weights in engine.ranks] == [State.QUARANTINED] * TP


def test_a_trainer_may_be_silent_as_long_as_the_engines_option_says(engine: Engine) -> None:
    for weights in engine.ranks:
        weights.options = Fp8RLServerArgs(session_timeout_s=0.25)
    trainer = Trainer(engine, toy.checkpoint())
    for future in trainer.futures:
        future.result(TIMEOUT_S)  # its sockets are still open
    assert "silent" in trainer.ended()["failure"]


@pytest.mark.guarantee("all-or-none", fault="the trainer dies when one rank of two has a chunk")
def test_a_part_on_one_rank_alone_quarantines_all(engine: Engine) -> None:
    """Half of the ranks hold the old version, the others no version at all."""
    for rank in range(TP):
        trainer = Trainer(engine, toy.checkpoint(), rank)
        Bucket(1 << 19).share(trainer.ranks)
        framing.send(trainer.ranks._sockets[rank], {"op": "chunk", "index": 0})
        assert framing.receive(trainer.ranks._sockets[rank])[0] == {"ok": True}
        assert trainer.ended()["state"] == "quarantined"
        assert [weights.state for weights in engine.ranks] == [State.QUARANTINED] * TP
        for weights in engine.ranks:
            weights.state = State.SERVING


# ---- a trainer that has gone


def test_a_step_of_the_loop_lets_go_of_what_a_trainer_left(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sgl_fp8rl.engine.control import guards

    weights_of = dict(zip(engine.schedulers, engine.ranks, strict=True))
    monkeypatch.setattr(guards, "scheduler_weights", weights_of.get)
    tensors = toy.checkpoint()
    trainer = Trainer(engine, tensors)
    trainer.write()
    trainer.ranks.ask({"op": "finish"})
    trainer.ranks.ask({"op": "commit"})

    def step() -> list[int]:
        """How much each rank has open after a step, which does what it did before."""
        for scheduler in engine.schedulers:
            look = guards.look_around
            assert look(lambda _, requests: requests * 2, scheduler, ["r"]) == ["r", "r"]
        return [len(weights.memory.known()) for weights in engine.ranks]

    for future in trainer.futures:
        future.result(TIMEOUT_S)
    assert step() == [1, 1]
    trainer.ranks.close()
    assert step() == [0, 0]


# ---- a commit whose answer was lost


@pytest.mark.guarantee("runs", fault="a commit whose answer is lost, and its retry")
def test_a_retry_of_what_committed_is_told_so(engine: Engine) -> None:
    tensors = toy.checkpoint()
    trainer = Trainer(engine, tensors)
    trainer.write()
    trainer.ranks.ask({"op": "finish"})
    trainer.ranks.ask({"op": "commit"})
    for future in trainer.futures:
        future.result(TIMEOUT_S)
    trainer.ranks.close()
    again = short(manifest_of(tensors).fingerprint)
    assert engine.answer({**again, "retry": True}) == {"committed": True}
    for more in ({"retry": True, "transaction": "another"}, {"retry": False}, {}):
        assert "not newer" in engine.answer({**again, **more})["error"]
    for name in ("", None, 3, "x" * 65):
        assert "transaction" in engine.answer({**again, "transaction": name})["error"]


# ---- a trainer that dies while it commits


def voted(engine: Engine) -> Trainer:
    """All is written on every rank, and none knows what becomes of it."""
    trainer = Trainer(engine, toy.checkpoint())
    trainer.write()
    trainer.ranks.ask({"op": "finish"})
    return trainer


@pytest.mark.guarantee("all-or-none", fault="the trainer dies when one rank has heard the commit")
def test_one_rank_that_heard_of_the_commit_is_enough(engine: Engine) -> None:
    trainer = voted(engine)
    framing.send(trainer.ranks._sockets[0], {"op": "commit"})
    ended = trainer.ended()
    assert (ended["ended"], ended["state"], ended["version"]) == (True, "serving", 0)
    assert [weights.policy.version for weights in engine.ranks] == [0, 0]
    assert engine.ranks[1].memory.known() == []  # its trainer is gone


def test_a_rank_that_was_not_written_does_not_commit(engine: Engine) -> None:
    """The control: another rank may have been told so by mistake."""
    trainer = Trainer(engine, toy.checkpoint())
    trainer.write()
    for message in ({"op": "finish"}, {"op": "commit"}):
        framing.send(trainer.ranks._sockets[0], message)
    ended = trainer.ended()
    assert (ended["ended"], ended["state"]) == (False, "quarantined")


@pytest.mark.guarantee("all-or-none", fault="the trainer dies between the vote and the commit")
def test_a_commit_that_no_rank_heard_of(engine: Engine) -> None:
    """It is made when the trainer says again that it decided to."""
    assert voted(engine).ended()["state"] == "quarantined"
    again = short(manifest_of(toy.checkpoint()).fingerprint)
    assert [scheduler.versions for scheduler in engine.schedulers] == [[], []]
    for _ in range(2):
        assert engine.answer({**again, "retry": True}) == {"committed": True}
        assert [scheduler.versions for scheduler in engine.schedulers] == [["0"], ["0"]]
        assert [weights.state for weights in engine.ranks] == [State.SERVING] * TP
        assert [weights.policy.version for weights in engine.ranks] == [0] * TP


def test_what_is_no_longer_in_doubt(engine: Engine) -> None:
    policy = Policy(toy.RUN, 0)

    def in_doubt(transaction: str, of: Policy = policy) -> list[bool]:
        return [weights.is_in_doubt(transaction, of) for weights in engine.ranks]

    voted(engine).ended()
    assert in_doubt(TRANSACTION) == [True] * TP
    assert in_doubt("another") == in_doubt(TRANSACTION, Policy(toy.RUN, 1)) == [False] * TP
    Trainer(engine, toy.checkpoint()).ended()  # another session took its place
    assert in_doubt(TRANSACTION) == [False] * TP
    voted(engine).ended()
    engine.ranks[0].quarantine("its memory was released")
    assert in_doubt(TRANSACTION) == [False, True]
    again = {**short("of another manifest"), "retry": True}
    assert engine.answer(again) == {"unknown": True}  # one rank alone does not commit


@pytest.mark.parametrize(
    ("more", "abort", "state"),
    [
        ({"engines": 1}, None, State.SERVING),
        ({"engines": 2}, None, State.QUARANTINED),
        ({"engines": 2}, {"op": "abort", "reason": "x"}, State.SERVING),
        ({"engines": 2}, {"op": "abort", "reason": "x", "fence": True}, State.QUARANTINED),
    ],
)
def test_an_engine_does_not_go_back_where_others_went_on(
    engine: Engine, more: dict[str, Any], abort: dict[str, Any] | None, state: State
) -> None:
    """Nothing was written, so it could."""
    trainer = Trainer(engine, toy.checkpoint(), **more)
    if abort is not None:
        trainer.ranks.send(abort)
    trainer.ended()
    assert [weights.state for weights in engine.ranks] == [state] * TP


# ---- what a released engine is asked


@pytest.mark.guarantee("released", fault="messages that read released memory")
@pytest.mark.parametrize("op", ["code_sums", "digest", "kv", "kv_observe", "kv_recalibrate"])
def test_released_memory_is_not_read(
    engine: Engine, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = engine.ranks[0]
    monkeypatch.setattr(engine.module, "scheduler_weights", lambda scheduler: weights)
    message = {"message": json.dumps({"op": op})}
    request = SimpleNamespace(method=engine.module.RPC_METHOD, parameters=message)
    weights.released_tags = frozenset({"weights"})
    answer = engine.module.handle_rpc(None, engine.schedulers[0], request)
    assert not answer.success
    assert "resume_memory_occupation" in answer.message


# ---- what a rollout asks


def test_the_status_is_short_and_one_ranks_own(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rollout asks for it while requests run, so nothing may grow with the model."""
    weights = engine.ranks[0]
    monkeypatch.setattr(engine.module, "scheduler_weights", lambda scheduler: weights)
    monkeypatch.setattr(engine.module.routed_experts, "layout", lambda model: None)
    request = SimpleNamespace(
        method=engine.module.RPC_METHOD, parameters={"message": json.dumps({"op": "status"})}
    )
    answer = engine.module.handle_rpc(None, engine.schedulers[0], request)
    assert json.loads(answer.message) == {
        "run": weights.policy.run,
        "version": weights.policy.version,
        "state": "serving",
        "reason": weights.reason,
        "routed_experts": None,
        "kv_clipped": None,
    }
    assert engine.groups[0].gathered == 0


def test_the_status_has_what_any_rank_clipped_under_the_scales_in_force(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens of 8 elements a layer: V of the second layer loses 4 of 16 on the other rank."""
    monkeypatch.setattr(engine.module.routed_experts, "layout", lambda model: None)
    for rank, weights in enumerate(engine.ranks):
        weights.kv = KVScales(2, Heads(2, rank, 1), "engine", "cpu")
        weights.kv.elements = [8, 8]

    def clipped() -> float:
        message = {"message": json.dumps({"op": "status"})}
        (share,) = {reply["kv_clipped"] for reply in answers(engine, message, monkeypatch)}
        return float(share)

    assert clipped() == 0  # nothing is stored yet
    for rank, weights in enumerate(engine.ranks):
        assert weights.kv is not None
        weights.kv.statistics[0, :3] = torch.tensor([2, 1, 0])
        weights.kv.statistics[1, :3] = torch.tensor([2, 0, 4 * rank])
    assert clipped() == 4 / 16
    for weights in engine.ranks:  # the counters are of the version before
        assert weights.kv is not None
        weights.kv.after_update(None)
    assert clipped() == 0
    for weights in engine.ranks:
        assert weights.kv is not None
        weights.kv.after_update(torch.ones(weights.kv.shape))
    assert clipped() == 0


class Rank(threading.local):
    """Which rank a thread runs."""

    number = 0


RANK = Rank()


def answers(
    engine: Engine, parameters: Any, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """What each rank replies to a message in an rpc request of SGLang's."""
    weights_of = dict(zip(engine.schedulers, engine.ranks, strict=True))
    monkeypatch.setattr(engine.module, "scheduler_weights", weights_of.get)
    request = SimpleNamespace(method=engine.module.RPC_METHOD, parameters=parameters)

    def answer(rank: int) -> Any:
        RANK.number = rank
        return engine.module.handle_rpc(None, engine.schedulers[rank], request)

    outputs = [future.result(TIMEOUT_S) for future in engine.on_ranks(answer)]
    replies = [json.loads(output.message) for output in outputs]
    assert [output.success for output in outputs] == ["error" not in reply for reply in replies]
    assert engine.groups[0].gathered == engine.groups[1].gathered
    return replies


@pytest.mark.parametrize(
    "parameters",
    [None, {}, {"message": None}, {"message": ""}, {"message": "[" * 100_000}, {"message": "no"}],
    ids=["none", "empty", "null", "blank", "nested", "no JSON"],
)
def test_what_cannot_be_parsed_does_not_end_the_server(
    engine: Engine, parameters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for reply in answers(engine, parameters, monkeypatch):
        assert "cannot be read" in reply["error"]


@pytest.mark.guarantee("malformed", fault="a control message without an operation, or of none")
@pytest.mark.parametrize(
    "released", [frozenset(), frozenset({"weights"})], ids=["held", "released"]
)
@pytest.mark.parametrize(
    "message", [{}, [], [1], "x", 5, None, {"op": "reboot"}, {"op": ["kv"]}, {"op": {}}], ids=str
)
def test_an_unknown_message_is_refused(
    engine: Engine, message: Any, released: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for weights in engine.ranks:
        weights.released_tags = released
    for reply in answers(engine, {"message": json.dumps(message)}, monkeypatch):
        assert "is unknown" in reply["error"]


@pytest.mark.parametrize("op", ["kv", "kv_observe", "kv_recalibrate"])
def test_without_an_fp8_kv_cache(engine: Engine, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for reply in answers(engine, {"message": json.dumps({"op": op})}, monkeypatch):
        assert "KV cache" in reply["error"]


@pytest.mark.guarantee("malformed", fault="out of memory while one rank of two answers a message")
@pytest.mark.parametrize(
    ("op", "runs"),
    [
        ("idle", "is_idle"),
        ("layers", "list_layers"),
        ("status", "routed_experts.layout"),
        ("layout", "_gpus"),
        ("digest", "_bytes"),
        ("code_sums", "code_sums._boxes"),
        ("export_layout", "export.record_routes"),
        ("export", "export._parts"),
        ("kv", "kv_stats.of_rank"),
        ("kv_observe", "quant_error.start"),
    ],
)
def test_what_fails_on_one_rank_is_answered(
    engine: Engine, op: str, runs: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No rank waits for what another never sends, and each goes on."""
    *path, name = runs.split(".")
    owner = getattr(engine.module, path[0]) if path else engine.module
    original = getattr(owner, name)

    def fail(*args: Any) -> Any:
        if RANK.number == 1:
            raise MemoryError("no memory is left")
        return [] if name == "list_layers" else original(*args)

    monkeypatch.setattr(engine.module.routed_experts, "layout", lambda model: None)
    monkeypatch.setattr(owner, name, fail)
    for scheduler, weights in zip(engine.schedulers, engine.ranks, strict=True):
        weights.kv = KVScales(1, Heads(1, 0, 1), "engine", "cpu")
        scheduler.server_args = SimpleNamespace(model_path="a model", revision=None)
        if op == "export_layout":
            weights.table = None
    tmp_path.chmod(0o700)
    manifest = manifest_of(toy.checkpoint()).to_json()
    message = {"op": op, "folder": str(tmp_path), "manifest": manifest}
    replies = answers(engine, {"message": json.dumps(message)}, monkeypatch)
    assert "no memory is left" in replies[1]["error"]
    # where ranks exchange what they have, the reply is rank 0's
    assert op in ("layers", "status") or replies[0] == replies[1]
    assert "error" in answers(engine, {"message": "{}"}, monkeypatch)[0]


def nested() -> Any:
    """More levels than repr() can follow."""
    nested: Any = []
    for _ in range(5000):
        nested = [nested]
    return nested


@pytest.mark.guarantee("malformed", fault="a version nested 5000 levels deep")
def test_a_version_nested_without_end_does_not_end_the_server(engine: Engine) -> None:
    answers = [
        future.result(TIMEOUT_S) for future in engine.begin({"run": toy.RUN, "version": nested()})
    ]
    assert all("version is" in answer.message for answer in answers)


def test_a_fingerprint_nested_without_end_does_not_end_the_server(engine: Engine) -> None:
    assert "recursion" in engine.answer(short(nested(), 0))["error"]
