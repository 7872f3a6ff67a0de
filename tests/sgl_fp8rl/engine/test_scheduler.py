"""How the ranks of an engine agree: what may begin, what is refused on all, and how it ends.

Each rank is a thread that runs the scheduler's hook; the trainer's side is raw sockets.
"""

import json
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from server_args import Fp8RLServerArgs
from sgl_fp8rl.formats.weight_format import TensorSpec
from sgl_fp8rl.protocol import framing
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import Manifest, describe
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from sgl_fp8rl.receiver.kv.quantized import Heads
from sgl_fp8rl.receiver.kv.scales import KVScales
from tests.sgl_fp8rl.engine import copies
from tests.sgl_fp8rl.engine.fake_scheduler import FakeScheduler
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_host import Exchange
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.transport.rank_client import RankClients
from trainer_bridge.ways.carriers import Bucket

TP = 2
TOKEN = "the session's token"
TRANSACTION = "the transaction"
TIMEOUT_S = 30.0


class Rank(threading.local):
    """Which rank a thread runs."""

    number = 0


RANK = Rank()


class Engine:
    """The ranks of one engine."""

    def __init__(self, module: Any, models: list[toy.Model], shapes: toy.Shapes | None) -> None:
        from sgl_fp8rl.engine.control.attached import attach

        self.module = module
        exchange = Exchange(TP, TIMEOUT_S)  # ranks that do not all gather are found out
        self.rpc: queue.Queue[Any] = queue.Queue()
        self.schedulers = [FakeScheduler() for _ in range(TP)]
        self.ranks = [
            toy.engine(model, shapes) if shapes else EngineWeights(model, toy.BF16)
            for model in models
        ]
        for rank, (scheduler, weights) in enumerate(zip(self.schedulers, self.ranks, strict=True)):
            attach(weights.model, weights)
            group = SimpleNamespace(rank=rank, gather=partial(exchange.gather, rank))
            scheduler.serve(weights.model, group, None if rank else self.rpc)
        self._pool = ThreadPoolExecutor(TP)

    @property
    def states(self) -> list[State]:
        return [weights.state for weights in self.ranks]

    def set(self, **attributes: Any) -> None:
        """Change all schedulers."""
        for scheduler in self.schedulers:
            vars(scheduler).update(attributes)

    def send(self, parameters: Any) -> list[Future[Any]]:
        """Have each rank handle an rpc request of SGLang's."""
        request = SimpleNamespace(method=self.module.RPC_METHOD, parameters=parameters)

        def handle(rank: int) -> Any:
            RANK.number = rank
            return self.module.handle_rpc(None, self.schedulers[rank], request)

        return [self._pool.submit(handle, rank) for rank in range(TP)]

    def begin(self, message: dict[str, Any]) -> list[Future[Any]]:
        return self.send({"message": json.dumps({"op": "begin", "token": TOKEN, **message})})

    def replies(self, sent: list[Future[Any]]) -> list[dict[str, Any]]:
        """What each rank says."""
        outputs = [future.result(TIMEOUT_S) for future in sent]
        replies = [json.loads(output.message) for output in outputs]
        assert [output.success for output in outputs] == ["error" not in each for each in replies]
        return replies

    def ask(self, op: str, **more: Any) -> list[dict[str, Any]]:
        return self.replies(self.send({"message": json.dumps({"op": op, **more})}))

    def answer(self, message: dict[str, Any]) -> Any:
        """What the ranks reply to a ``begin`` that opens no session, and leaves all as it was."""
        before = self.states
        first, second = self.replies(self.begin(message))
        assert first == second
        assert self.rpc.empty() and [weights.session for weights in self.ranks] == [None] * TP
        assert self.states == before or "committed" in first
        return first

    def accepts(self, message: dict[str, Any]) -> bool:
        """Whether an update would begin if no request ran."""
        self.set(idle=False)
        answered = self.answer(message)
        self.set(idle=True)
        return bool(answered == {"busy": True})

    def knows(self, manifest: Manifest) -> bool:
        """Whether any rank does."""
        return any(weights.knows(manifest.fingerprint) for weights in self.ranks)

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The scheduler's hooks, with threads in the place of a process group."""

    from sgl_fp8rl.engine.control import host, scheduler

    monkeypatch.setattr(host, "gather", lambda value, group: group.gather(value))
    monkeypatch.setattr(host.dist, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(host.compat, "sock_send", lambda rpc, message: rpc.put(message))
    monkeypatch.setattr(scheduler.routed_experts, "layout", lambda model: None)
    return scheduler


def ranks(module: Any, shapes: toy.Shapes | None) -> Iterator[Engine]:
    made = Engine(module, [toy.toy(rank, TP) for rank in range(TP)], shapes)
    yield made
    made.close()


@pytest.fixture
def engine(module: Any) -> Iterator[Engine]:
    yield from ranks(module, toy.SHAPES)


@pytest.fixture
def dummy(module: Any) -> Iterator[Engine]:
    """An engine with dummy weights: its first update records the routes."""
    yield from ranks(module, None)


def manifest_of(tensors: toy.Tensors) -> Manifest:
    return describe(tensors.items(), 1 << 18)


def short(fingerprint: str, version: Any = 0) -> dict[str, Any]:
    """A message with the name of a manifest alone."""
    named = {"run": toy.RUN, "version": version, "transaction": TRANSACTION}
    return {**named, "fingerprint": fingerprint}


def whole(manifest: Manifest, version: Any = 0) -> dict[str, Any]:
    """A message with the whole manifest."""
    return short("", version) | {"manifest": manifest.to_json()}


def update(version: Any = 0, **more: Any) -> dict[str, Any]:
    """A message with the whole manifest of the toy model."""
    return whole(manifest_of(toy.checkpoint()), version) | more


# -- what may begin


def test_a_manifest_that_a_rank_has_not_is_asked_for_and_sent_once(engine: Engine) -> None:
    manifest = manifest_of(toy.checkpoint())
    assert engine.answer(short("never seen")) == {"unknown": True}
    assert engine.answer(short("") | {"fingerprint": None}) == {"unknown": True}
    engine.ranks[0].accept(manifest)  # and rank 1 has forgotten it
    assert engine.answer(short(manifest.fingerprint)) == {"unknown": True}
    assert engine.accepts(whole(manifest))
    assert all(weights.knows(manifest.fingerprint) for weights in engine.ranks)
    assert engine.accepts(short(manifest.fingerprint, 7))


def test_a_version_that_does_not_grow_is_refused_before_anything(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = manifest_of(toy.checkpoint())
    for weights in engine.ranks:
        weights.policy = Policy(toy.RUN, 4)
    monkeypatch.setattr(EngineWeights, "accept", None)  # it would be called
    for message in (whole(manifest, 4), short(manifest.fingerprint, 4)):
        assert "version 4" in engine.answer(message)["error"]
    assert [scheduler.asked for scheduler in engine.schedulers] == [0, 0]
    assert not engine.knows(manifest)


def test_scheme_trainer_needs_scales_in_each_update(engine: Engine) -> None:
    """A checkpoint, which only ``accept`` sees, needs none."""
    for weights in engine.ranks:
        weights.kv = KVScales(1, Heads(1, 0, 1), "trainer", "cpu")
    without = manifest_of(toy.checkpoint())
    assert "kv_scales" in engine.answer(whole(without))["error"]
    assert not engine.knows(without)
    scaled = manifest_of(toy.checkpoint() | {KV_SCALES: torch.ones(1, 2, 1)})
    assert engine.accepts(whole(scaled))
    engine.ranks[0].accept(without)


@pytest.mark.guarantee("check-first", fault="a manifest that one rank of two refuses")
def test_a_refusal_of_one_rank_is_that_of_all(engine: Engine) -> None:
    """A rank that wants another shape; the others take back what they accepted."""
    manifest = manifest_of(toy.checkpoint())
    table = engine.ranks[1].table
    assert table is not None
    table.sources = {**table.sources, "norm.weight": (64,)}
    assert "norm.weight has shape" in engine.answer(whole(manifest))["error"]
    assert not engine.knows(manifest)
    assert all(weights.table is not None for weights in engine.ranks)
    assert engine.answer(short(manifest.fingerprint, 0)) == {"unknown": True}


def skip(model: toy.Model, name: str) -> None:
    """Have its loader leave a tensor out."""
    original = model.loader
    model.loader = lambda model, weights: original(model, (w for w in weights if w[0] != name))  # type: ignore[assignment]


def test_a_first_manifest_that_one_rank_refuses_leaves_no_routes(dummy: Engine) -> None:
    original = dummy.ranks[1].model.loader
    skip(dummy.ranks[1].model, "attn.k.weight")
    assert "attn.qkv.weight" in dummy.answer(update())["error"]
    assert [weights.table for weights in dummy.ranks] == [None, None]
    dummy.ranks[1].model.loader = original
    assert dummy.accepts(update())


def test_names_that_no_rank_keeps(dummy: Engine) -> None:
    """In a first update they are a mistake; of a checkpoint, they are known."""
    tensors = {**toy.checkpoint(), "head.weight": torch.zeros(4, 4)}
    for weights in dummy.ranks:
        skip(weights.model, "head.weight")
    manifest = manifest_of(tensors)
    assert "head.weight" in dummy.answer(whole(manifest))["error"]
    assert [weights.table for weights in dummy.ranks] == [None, None]
    assert not dummy.knows(manifest)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for weights in dummy.ranks:
        weights.table = toy.record_routes(weights.model, shapes)
        weights.table.skipped = frozenset({"head.weight"})
    assert dummy.accepts(whole(manifest))


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
    assert engine.accepts(whole(manifest))
    unused = Manifest({**manifest.tensors, "expert.2": spec}, 1 << 16)
    assert "expert.2" in engine.answer(whole(unused))["error"]
    engine.close()


# -- what a rank answers


@pytest.mark.parametrize("in_flight", ["abort", "retract"])
@pytest.mark.parametrize("busy", ["idle", "flushes"])
def test_a_rank_that_is_busy_keeps_all_waiting(engine: Engine, busy: str, in_flight: str) -> None:
    setattr(engine.schedulers[1], busy, False)
    if (busy, in_flight) != ("idle", "retract"):  # those that run are retracted
        assert engine.answer(update(in_flight=in_flight)) == {"busy": True}


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
    for in_flight in ("abort", "retract"):
        answer = engine.answer(update(in_flight=in_flight))
        assert "no space" in answer["error"] and "TMPDIR" in answer["error"]
        assert not made.pop().path.parent.exists()
    assert [scheduler.retracted for scheduler in engine.schedulers] == [0, 0]


@pytest.mark.parametrize("rank", range(TP))
def test_what_copies_would_not_see_does_not_begin(
    engine: Engine, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever rank has them; the last good version is served."""
    copies.keep_copies(engine.ranks[rank].model, monkeypatch)
    assert copies.WORDS in engine.answer(update())["error"]
    assert engine.states == [State.SERVING] * TP


# -- requests in flight


def test_retraction_is_refused_where_the_cache_is_still_copied(engine: Engine) -> None:
    """HiCache's copies to the host hold the cache, so each attempt would throw prefills away."""
    engine.set(enable_hierarchical_cache=True)
    refused = engine.answer(update(in_flight="retract"))
    assert "update with in_flight='finish'" in refused["error"]
    assert Trainer(engine, toy.checkpoint(), in_flight="finish").ended()["state"] == "serving"
    assert [scheduler.retracted for scheduler in engine.schedulers] == [0, 0]


def test_only_who_chose_it_and_may_begin_retracts(engine: Engine) -> None:
    engine.set(idle=False)
    for in_flight in ("abort", "finish"):
        assert engine.answer(update(in_flight=in_flight)) == {"busy": True}
    retract = {"in_flight": "retract"}
    assert "-1" in engine.answer(update(-1) | retract)["error"]
    assert engine.answer(short("never seen") | retract) == {"unknown": True}
    assert [scheduler.retracted for scheduler in engine.schedulers] == [0, 0]


def test_what_cannot_finish_is_not_awaited(engine: Engine) -> None:
    engine.set(idle=False, _engine_paused=True)
    assert "paused" in engine.answer(update(in_flight="finish", paused=True))["error"]
    # the user has continued, of which the schedulers have not heard yet
    assert engine.answer(update(in_flight="finish", paused=False)) == {"busy": True}
    engine.set(_engine_paused=False)
    assert engine.answer(update(in_flight="finish", paused=True)) == {"busy": True}


def test_what_a_pause_keeps_is_not_aborted_in_vain(engine: Engine) -> None:
    """An abort ends what waits, but what runs would end in a step, and there is none."""
    engine.set(_engine_paused=True, waiting_queue=[SimpleNamespace(rid="a")])
    assert engine.answer(update(paused=True)) == {"busy": True}
    engine.set(idle=False)
    assert "generation is paused" in engine.answer(update(paused=True))["error"]
    assert [len(scheduler.waiting_queue) for scheduler in engine.schedulers] == [1, 1]


@pytest.mark.parametrize("end", ["commit", "nothing written", "failure"])
def test_what_waits_for_an_update_ends_only_with_a_quarantine(engine: Engine, end: str) -> None:
    engine.set(idle=False)
    for scheduler in engine.schedulers:
        scheduler.waiting_queue = [SimpleNamespace(rid="a"), SimpleNamespace(rid="b")]
    trainer = Trainer(engine, toy.checkpoint(), in_flight="retract")
    if end != "nothing written":
        trainer.write()
    if end == "commit":
        trainer.commit()
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
    for answer in engine.ask("layout"):
        assert answer["fp32"] == ["mlp.router.weight"]
        assert answer["formats"] == {"block-fp8": sorted(toy.FP8_NAMES)}
    for weights in engine.ranks:
        weights.table = None  # as with dummy weights, before the first update
    for answer in engine.ask("layout"):
        assert (answer["fp32"], answer["formats"]) == (None, {})


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
        Bucket(1 << 19).share(self.ranks)
        session = self.engine.ranks[0].session
        assert session is not None
        for index in range(len(session.writer.chunks)):
            toy.fill(session, self.tensors, index)  # into memory that both ranks share
            self.ranks.ask({"op": "chunk", "index": index})

    def commit(self) -> None:
        self.ranks.ask({"op": "finish"})
        assert self.ranks.ask({"op": "commit"}) == [{"ok": True}] * TP

    def awaited(self) -> dict[str, Any]:
        """What both ranks tell of the end."""
        first, second = (json.loads(f.result(TIMEOUT_S).message) for f in self.futures)
        assert first == second
        assert [weights.session for weights in self.engine.ranks] == [None, None]
        assert not any(folder.exists() for folder in self.folders)
        assert isinstance(first, dict)
        return first

    def ended(self) -> dict[str, Any]:
        """What both ranks tell once the trainer has hung up."""
        self.ranks.close()
        return self.awaited()


@pytest.mark.guarantee("all-or-none", fault="two ranks, one update")
def test_ranks_commit_together(engine: Engine) -> None:
    for version in (0, 3):
        tensors = toy.checkpoint(version)
        trainer = Trainer(engine, tensors, version)
        trainer.write()
        trainer.commit()
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
    assert engine.states == [State.QUARANTINED] * TP
    assert "version 0" in end["reason"]
    assert [weights.memory.known() for weights in engine.ranks] == [[], []]
    test_ranks_commit_together(engine)  # a complete update heals it


def test_a_trainer_may_be_silent_as_long_as_the_engines_option_says(engine: Engine) -> None:
    for weights in engine.ranks:
        weights.options = Fp8RLServerArgs(session_timeout_s=0.25)
    trainer = Trainer(engine, toy.checkpoint())
    assert "silent" in trainer.awaited()["failure"]  # its sockets are still open
    trainer.ranks.close()


@pytest.mark.guarantee("all-or-none", fault="the trainer dies when one rank of two has a chunk")
def test_a_part_on_one_rank_alone_quarantines_all(engine: Engine) -> None:
    """Half of the ranks hold the old version, the others no version at all."""
    for rank in range(TP):
        trainer = Trainer(engine, toy.checkpoint(), rank)
        Bucket(1 << 19).share(trainer.ranks)
        framing.send(trainer.ranks._sockets[rank], {"op": "chunk", "index": 0})
        assert framing.receive(trainer.ranks._sockets[rank])[0] == {"ok": True}
        assert trainer.ended()["state"] == "quarantined"
        assert engine.states == [State.QUARANTINED] * TP
        for weights in engine.ranks:
            weights.state = State.SERVING


# ---- a commit whose answer was lost, and a trainer that has gone


@pytest.mark.guarantee("runs", fault="a commit whose answer is lost, and its retry")
def test_a_retry_of_what_committed_is_told_so(engine: Engine) -> None:
    from sgl_fp8rl.engine.control.guards import on_scheduler_step

    tensors = toy.checkpoint()
    trainer = Trainer(engine, tensors)
    trainer.write()
    trainer.commit()
    trainer.awaited()

    def step() -> list[int]:
        """How much each rank has open after a step of the loop, which does what it did before."""
        for scheduler in engine.schedulers:
            assert on_scheduler_step(lambda _, asked: asked * 2, scheduler, ["r"]) == ["r", "r"]
        return [len(weights.memory.known()) for weights in engine.ranks]

    assert step() == [1, 1]
    trainer.ranks.close()
    assert step() == [0, 0], "it lets go of what a trainer left"
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
    trainer = Trainer(engine, toy.checkpoint())
    trainer.write()
    for message in ({"op": "finish"}, {"op": "commit"}):
        framing.send(trainer.ranks._sockets[0], message)
    ended = trainer.ended()  # the control: the other rank has not voted
    assert (ended["ended"], ended["state"]) == (False, "quarantined")
    trainer = voted(engine)
    framing.send(trainer.ranks._sockets[0], {"op": "commit"})
    ended = trainer.ended()
    assert (ended["ended"], ended["state"], ended["version"]) == (True, "serving", 0)
    assert [weights.policy.version for weights in engine.ranks] == [0, 0]
    assert engine.ranks[1].memory.known() == []  # its trainer is gone


@pytest.mark.guarantee("all-or-none", fault="the trainer dies between the vote and the commit")
def test_a_commit_that_no_rank_heard_of(engine: Engine) -> None:
    """It is made when the trainer says again that it decided to."""
    assert voted(engine).ended()["state"] == "quarantined"
    again = short(manifest_of(toy.checkpoint()).fingerprint)
    assert [scheduler.versions for scheduler in engine.schedulers] == [[], []]
    for _ in range(2):
        assert engine.answer({**again, "retry": True}) == {"committed": True}
        assert [scheduler.versions for scheduler in engine.schedulers] == [["0"], ["0"]]
        assert engine.states == [State.SERVING] * TP
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
    assert engine.states == [state] * TP


# ---- what is asked besides


@pytest.mark.guarantee("released", fault="messages that read released memory")
@pytest.mark.parametrize("op", ["code_sums", "digest", "kv", "kv_recalibrate"])
def test_what_the_memory_does_not_hold_is_not_read(engine: Engine, op: str) -> None:
    if "kv" in op:
        assert all("KV cache" in reply["error"] for reply in engine.ask(op)), "it has 16 bits"
    for weights in engine.ranks:
        weights.released_tags = frozenset({"weights"})
    assert all("resume_memory_occupation" in reply["error"] for reply in engine.ask(op))


def test_the_status_is_short_and_one_ranks_own(engine: Engine) -> None:
    """Each rollout asks for it while requests run, so nothing may grow with the model."""
    policy = engine.ranks[0].policy
    engine.schedulers[1].serve(engine.ranks[1].model, group=None)  # it would fail to gather
    assert engine.ask("status")[0] == {
        "run": policy.run,
        "version": policy.version,
        "state": "serving",
        "reason": "",
        "routed_experts": None,
        "kv_clipped": None,
    }


def test_the_status_has_what_any_rank_clipped_under_the_scales_in_force(engine: Engine) -> None:
    """Two tokens of 8 elements a layer: V of the second layer loses 4 of 16 on the other rank."""
    caches = [KVScales(2, Heads(2, rank, 1), "engine", "cpu") for rank in range(TP)]
    for weights, kv in zip(engine.ranks, caches, strict=True):
        weights.kv, kv.elements = kv, [8, 8]

    def clipped() -> float:
        (share,) = {reply["kv_clipped"] for reply in engine.ask("status")}
        return float(share)

    assert clipped() == 0  # nothing is stored yet
    for rank, kv in enumerate(caches):
        kv.statistics[0, :3] = torch.tensor([2, 1, 0])
        kv.statistics[1, :3] = torch.tensor([2, 0, 4 * rank])
    assert clipped() == 4 / 16
    for scales in (None, torch.ones(caches[0].shape)):  # the counters are of the version before
        for kv in caches:
            kv.after_update(scales)
        assert clipped() == 0


def nested(field: str, levels: int) -> dict[str, Any]:
    """A ``begin`` with more levels than repr(), or a parser, can follow."""
    rest = ",".join(f'"{key}": {json.dumps(value)}' for key, value in short("f").items())
    return {"message": f'{{{rest}, "op": "begin", "{field}": {"[" * levels}{"]" * levels}}}'}


UNREADABLE = [
    *(None, {}, {"message": None}, {"message": ""}, {"message": "no"}),
    *({"message": "[" * 100_000}, nested("version", 5000)),
]
UNKNOWN = [{}, [], [1], "x", 5, None, {"op": "reboot"}, {"op": ["kv"]}, {"op": {}}]


@pytest.mark.guarantee("malformed", fault="a version nested 5000 levels deep")
@pytest.mark.guarantee("malformed", fault="a control message without an operation, or of none")
@pytest.mark.parametrize("released", [[], ["weights"]], ids=["held", "released"])
def test_a_malformed_message_does_not_end_the_server(engine: Engine, released: list[str]) -> None:
    for weights in engine.ranks:
        weights.released_tags = frozenset(released)
    faults = [(each, "cannot be read") for each in UNREADABLE]
    faults += [({"message": json.dumps(each)}, "is unknown") for each in UNKNOWN]
    for parameters, fault in (*faults, (nested("version", 900), "version is")):
        for reply in engine.replies(engine.send(parameters)):
            assert fault in reply["error"], parameters
    for reply in engine.replies(engine.send(nested("fingerprint", 900))):
        assert reply.keys() <= {"error", "unknown"}


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
        ("export_layout", "record_routes"),
        ("kv", "kv_stats.of_rank"),
    ],
)
def test_what_fails_on_one_rank_is_answered(
    engine: Engine, op: str, runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank waits for what another never sends, and each goes on."""
    *path, name = runs.split(".")
    owner = getattr(engine.module, path[0]) if path else engine.module
    original = getattr(owner, name)

    def fail(*args: Any) -> Any:
        if RANK.number == 1:
            raise MemoryError("no memory is left")
        return [] if name == "list_layers" else original(*args)

    monkeypatch.setattr(owner, name, fail)
    for weights in engine.ranks:
        weights.kv = KVScales(1, Heads(1, 0, 1), "engine", "cpu")
        if op == "export_layout":
            weights.table = None
    replies = engine.ask(op, manifest=manifest_of(toy.checkpoint()).to_json())
    assert "no memory is left" in replies[1]["error"]
    # where ranks exchange what they have, the reply is rank 0's
    assert op in ("layers", "status") or replies[0] == replies[1]
    assert all("error" in reply for reply in engine.ask("reboot"))
