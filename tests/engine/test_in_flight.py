"""What becomes of requests that are in flight when an update begins, on real servers; and of what
run their tokens are.

One server has the rollouts, a fresh engine of the next policy knows how they must go on. Numbers
are compared to the last bit, and only between requests that take the same steps in the same shapes:
each runs alone, finds nothing in the prefix cache and is prefilled up to the same token. Decode,
prefill, a prefix from the cache and another batch round differently, on some CPUs by much.
"""

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import pytest

import trainer_bridge
from tests.engine import controlled_server, in_process, models, serving
from tests.engine.conftest import Policies
from tests.engine.harness import CALL_TIMEOUT_S, EngineProcess, Server
from tests.engine.serving import (
    GREEDY,
    PROMPT,
    ByHand,
    assert_alive,
    assert_quarantined,
    assert_serves,
    begin_message,
    manifest_of,
    update,
    version_of,
)
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.updates.update import RUN

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]  # two engines start

TOKENS = 192
"""Output of a request that is to be caught: an update begins after a few of them."""
SAMPLING = {**GREEDY, "max_new_tokens": TOKENS}
ASK = {"input_ids": PROMPT, "sampling_params": SAMPLING, "return_logprob": True}
LONG_PROMPT = [7 * n % 509 for n in range(160)]
CHUNK = 64
"""Tokens that are prefilled at once: the long prompt takes three steps."""

Reply = dict[str, Any]


@pytest.fixture(scope="module")
def started(policies: Policies, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with controlled(tmp_path_factory.mktemp("server"), policies("qwen3")[0]) as server:
        yield server


@pytest.fixture
def server(started: Server, policies: Policies) -> Iterator[Server]:
    """The server, which serves policy 0 as an updated version when a test begins."""
    update(started, policies("qwen3")[0])
    yield started
    assert_alive(started)


@pytest.fixture(scope="module")
def fresh(policies: Policies, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine that was started with policy 1."""
    log = tmp_path_factory.mktemp("fresh") / "engine.log"
    checkpoint = policies("qwen3")[1]
    with EngineProcess(log, checkpoint, chunked_prefill_size=CHUNK) as engine:
        yield engine


@pytest.fixture
def policy(policies: Policies) -> Path:
    return policies("qwen3")[1]


def controlled(folder: Path, checkpoint: Path, *arguments: str, **environment: str) -> Server:
    """A server that is controlled by files beside its log."""
    return Server(
        folder / "server.log",
        controlled_server.MODULE,
        checkpoint,
        *("--chunked-prefill-size", str(CHUNK)),
        *arguments,
        environment={controlled_server.CONTROL: str(folder), **environment},
    )


def control_file(server: Server, name: str) -> Path:
    return server.log.parent / name


def update_beside(server: Server, checkpoint: Path, in_flight: str) -> int:
    """Bring the server to a policy while requests run; its new version."""
    version = version_of(server) + 1
    trainer_bridge.update(
        models.named_tensors(checkpoint), server, version=version, in_flight=in_flight
    )
    return version


def logprobs_of(reply: Reply) -> list[float]:
    entries = reply["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in entries] == reply["output_ids"]
    return [entry[0] for entry in entries]


def changes(reply: Reply, *versions: int) -> list[int]:
    """After how many tokens each of these versions took over from the one before."""
    given = reply["meta_info"]["policy_version"]
    assert given == sorted(given)
    assert set(given) == set(versions)
    assert len(given) == len(reply["output_ids"]) == TOKENS
    assert reply["meta_info"]["finish_reason"]["type"] == "length"
    return [given.index(version) for version in versions[1:]]


def assert_grows(events: list[Reply]) -> None:
    """What a streaming client sees has neither gaps nor tokens that come twice."""
    for before, after in pairwise(events):
        known = len(before["output_ids"])
        assert after["output_ids"][:known] == before["output_ids"]
        assert logprobs_of(after)[:known] == logprobs_of(before)
        versions = after["meta_info"]["policy_version"]
        assert versions[:known] == before["meta_info"]["policy_version"]
        assert len(versions) == len(after["output_ids"])


def alone(engine: Server | EngineProcess, ask: dict[str, Any]) -> Reply:
    """The reply to a request that runs by itself and finds nothing in the cache."""
    engine.flush()
    (reply,) = engine.generate(ask)
    return reply


def by_hand(server: Server, checkpoint: Path, version: int) -> AbstractContextManager[ByHand]:
    """An update that retracts and whose chunks the test sends."""
    tensors = models.named_tensors(checkpoint)
    return serving.by_hand(server, tensors, version, in_flight="retract")


@contextmanager
def caught(server: Server, **more: Any) -> Iterator[tuple[Future[list[Reply]], list[Reply]]]:
    """A streaming request that has some tokens: all of its events later, and those so far.

    It runs slowly until it is retracted.
    """
    slow = control_file(server, controlled_server.SLOW)
    slow.touch()
    stream = server.stream({**ASK, **more})
    seen = [next(stream)]

    def read() -> list[Reply]:
        for event in stream:
            seen.append(event)
        return seen

    try:
        with ThreadPoolExecutor() as pool:
            yield pool.submit(read), seen
    finally:
        slow.unlink(missing_ok=True)


def runs_of(reply: dict[str, Any]) -> list[str]:
    """The run of each token: one that says nothing has that of the token before."""
    runs: list[str] = []
    for run in reply["meta_info"]["policy_run"]:
        runs.append(run or (runs[-1] if runs else ""))
    return runs


def weight_version(server: Server) -> str:
    with urllib.request.urlopen(server.address + "/model_info", timeout=CALL_TIMEOUT_S) as reply:
        return str(json.load(reply)["weight_version"])


def test_tokens_of_the_checkpoint_have_no_run(started: Server) -> None:
    """The first test: the server is as it started."""
    (reply,) = started.generate(serving.ASK)
    assert set(runs_of(reply)) == {""}
    assert set(reply["meta_info"]["policy_version"]) == {-1}


def follows(before: Reply, reply: Reply, cut: int, engine: Server | EngineProcess) -> bool:
    """Whether ``cut`` tokens are of an undisturbed rollout, and the others what ``engine`` adds.

    What was retracted is prefilled again, prompt and tokens; so the engine prefills them, too.
    """
    tokens, logprobs = reply["output_ids"], logprobs_of(reply)
    rest = {**SAMPLING, "max_new_tokens": TOKENS - cut}
    ask = {**ASK, "input_ids": [*PROMPT, *tokens[:cut]], "sampling_params": rest}
    continued = alone(engine, ask)
    return tokens == before["output_ids"][:cut] + continued[
        "output_ids"
    ] and logprobs == logprobs_of(before)[:cut] + logprobs_of(continued)


@pytest.mark.guarantee("one-version", fault="`retract` in the middle of a response")
def test_retracted_request_goes_on_under_the_new_version(
    server: Server, policy: Path, fresh: EngineProcess
) -> None:
    old = version_of(server)
    before = alone(server, ASK)
    server.flush()
    with caught(server) as (events, _):
        new = update_beside(server, policy, "retract")
        replies = events.result(CALL_TIMEOUT_S)
    assert_grows(replies)
    last = replies[-1]
    assert last["meta_info"]["num_retractions"] == 1
    (cut,) = changes(last, old, new)
    assert follows(before, last, cut, fresh)
    # control: the other policy
    assert last["output_ids"][cut:] != before["output_ids"][cut:]
    assert_serves(server, policy, new)


@pytest.mark.guarantee(
    "one-version", fault="`retract`, with KV entries of the old version in the cache"
)
def test_no_entry_of_the_old_cache_is_read(
    server: Server, policies: Policies, fresh: EngineProcess
) -> None:
    """What is retracted shares no prefix with what is asked before and after the update."""
    start, policy, *_ = policies("qwen3")
    ask = {**ASK, "input_ids": LONG_PROMPT, "sampling_params": GREEDY}
    missed = alone(fresh, ask)
    (hit,) = fresh.generate(ask)
    assert missed["meta_info"]["cached_tokens"] == 0

    def after_an_update() -> Reply:
        assert logprobs_of(alone(server, ask)) != logprobs_of(missed)  # the policy before
        with caught(server) as (events, _):
            update_beside(server, policy, "retract")
            assert events.result(CALL_TIMEOUT_S)[-1]["meta_info"]["num_retractions"] == 1
        (reply,) = server.generate(ask)
        return reply

    keep_cache = control_file(server, controlled_server.KEEP_CACHE)
    keep_cache.touch()
    try:
        control = after_an_update()
    finally:
        keep_cache.unlink()
    # as many tokens from the cache as a healthy hit has, but of the policy before
    assert control["meta_info"]["cached_tokens"] == hit["meta_info"]["cached_tokens"] > 0
    assert logprobs_of(control) != logprobs_of(hit)

    update(server, start)
    reply = after_an_update()
    assert reply["meta_info"]["cached_tokens"] == 0
    assert reply["output_ids"] == missed["output_ids"]
    assert logprobs_of(reply) == logprobs_of(missed)


def test_no_embedding_of_the_old_policy_is_kept(server: Server, policy: Path) -> None:
    """Of an image: planted in SGLang's cache, since no tower runs here."""

    def kept() -> int:
        server.generate({"input_ids": PROMPT, "sampling_params": GREEDY})
        return int(control_file(server, controlled_server.EMBEDDINGS).read_text())

    control_file(server, controlled_server.EMBEDDING).touch()
    assert kept() == 1
    server.flush()
    assert kept() == 1  # SGLang's flush leaves it
    update(server, policy)
    assert kept() == 0


def test_running_queued_and_half_prefilled_requests(server: Server, policies: Policies) -> None:
    """More than run at once, some of them prefilled in chunks, through three updates."""
    old = version_of(server)
    sampling = {**GREEDY, "max_new_tokens": 40}
    asks = [
        {**ASK, "input_ids": prompt[n:], "sampling_params": sampling, "logprob_start_len": start}
        for n in range(3)
        for prompt, start in ((PROMPT, 0), (PROMPT, -1), (LONG_PROMPT, -1), (LONG_PROMPT, 0))
    ]
    token_came = Event()
    slow = control_file(server, controlled_server.STAY_SLOW)
    slow.touch()

    def events_of(ask: dict[str, Any]) -> list[Reply]:
        events = []
        for event in server.stream(ask):
            events.append(event)
            token_came.set()
        return events

    with ThreadPoolExecutor(len(asks)) as pool:
        answers = [pool.submit(events_of, ask) for ask in asks]
        for policy in policies("qwen3")[1:4]:
            token_came.clear()
            assert token_came.wait(60)
            new = update_beside(server, policy, "retract")
        slow.unlink()
        all_events = [answer.result(CALL_TIMEOUT_S) for answer in answers]
    for events in all_events:
        assert_grows(events)
    replies = [events[-1] for events in all_events]
    for ask, reply in zip(asks, replies, strict=True):
        versions = reply["meta_info"]["policy_version"]
        assert len(versions) == len(reply["output_ids"]) == len(logprobs_of(reply)) == 40
        assert versions == sorted(versions)
        assert set(versions) <= set(range(old, new + 1))
        if ask["logprob_start_len"] == 0:
            scored = [entry[1] for entry in reply["meta_info"]["input_token_logprobs"]]
            assert scored == ask["input_ids"]
    assert any(reply["meta_info"]["num_retractions"] for reply in replies)
    assert_serves(server, policy, new)


@pytest.mark.guarantee("quarantine", fault="an update that fails while retracted requests wait")
def test_an_update_that_fails_ends_what_waits_for_it(server: Server, policy: Path) -> None:
    with caught(server) as (events, _), ThreadPoolExecutor() as pool:
        plain = pool.submit(server.generate, ASK)
        with by_hand(server, policy, version_of(server) + 1) as trainer:
            trainer.write(*range(12))
        reason = events.result(CALL_TIMEOUT_S)[-1]["meta_info"]["finish_reason"]
        assert (reason["type"], reason["status_code"]) == ("abort", 503)
        assert "quarantined: the update to version" in reason["message"]
        with pytest.raises(EngineError, match="quarantined: the update to version") as refusal:
            plain.result(CALL_TIMEOUT_S)
        assert refusal.value.status == 503
    assert_quarantined(server, "the update to version")
    assert_serves(server, policy, update(server, policy))


def test_a_paused_engine(server: Server, policy: Path) -> None:
    """What cannot finish is not awaited; what is retracted goes on when it may."""
    old = version_of(server)
    with caught(server) as (events, _):
        assert server.status_of("/pause_generation", b'{"mode": "in_place"}') == 200
        for in_flight in ("finish", "abort"):
            with pytest.raises(EngineError, match="generation is paused"):
                update_beside(server, policy, in_flight)
        new = update_beside(server, policy, "retract")
        assert not events.done()
        assert server.status_of("/continue_generation", b'{"torch_empty_cache": false}') == 200
        replies = events.result(CALL_TIMEOUT_S)
    assert_grows(replies)
    changes(replies[-1], old, new)
    assert_serves(server, policy, new)


@pytest.mark.guarantee("one-version", fault="`finish` in the middle of a response")
def test_requests_are_finished_first(server: Server, policy: Path) -> None:
    old = version_of(server)
    with caught(server) as (events, _), ThreadPoolExecutor() as pool:
        updated = pool.submit(update_beside, server, policy, "finish")
        versions = {old}
        while versions == {old}:  # until one waits for the update
            (reply,) = server.generate({**ASK, "sampling_params": GREEDY})
            versions = set(reply["meta_info"]["policy_version"])
        new = updated.result(CALL_TIMEOUT_S)
        assert versions == {new}
        last = events.result(CALL_TIMEOUT_S)[-1]
    assert changes(last, old) == []
    assert last["meta_info"]["num_retractions"] == 0
    assert_serves(server, policy, new)


@pytest.mark.guarantee("check-first", fault="a refused update while a request generates")
@pytest.mark.guarantee("check-first", fault="a refused update while requests run")
@pytest.mark.parametrize("in_flight", ["abort", "finish", "retract"])
def test_a_refused_update_disturbs_no_request(server: Server, policy: Path, in_flight: str) -> None:
    version = version_of(server)
    tensors = list(models.named_tensors(policy))
    message = begin_message(manifest_of(tensors), version) | {"in_flight": in_flight}
    with caught(server) as (events, _):
        with pytest.raises(EngineError, match="not newer"):
            server.control(message)
        strange = {**message, "version": version + 1, "fingerprint": "never seen"}
        del strange["manifest"]
        assert server.control(strange) == {"unknown": True}
        last = events.result(CALL_TIMEOUT_S)[-1]
    assert changes(last, version) == []
    assert last["meta_info"]["num_retractions"] == 0


@pytest.mark.guarantee("all-or-none", fault="retraction on two ranks")
@pytest.mark.full
def test_on_two_ranks(policies: Policies, tmp_path: Path) -> None:
    """The engine itself is the reference: an update leaves what a fresh engine holds."""
    start, policy, *_ = policies("qwen3")
    with controlled(
        tmp_path, start, *("--tp-size", "2"), SGLANG_CPU_OMP_THREADS_BIND="0|1"
    ) as server:
        before = alone(server, ASK)
        server.flush()
        with caught(server) as (events, _):
            new = update_beside(server, policy, "retract")
            replies = events.result(CALL_TIMEOUT_S)
        assert_grows(replies)
        update(server, policy)
        (cut,) = changes(replies[-1], -1, new)
        assert follows(before, replies[-1], cut, server)
        assert replies[-1]["output_ids"][cut:] != before["output_ids"][cut:]  # the other policy
        with caught(server) as (events, _), by_hand(server, policy, new + 2) as trainer:
            trainer.write(*range(3))
        assert events.result(CALL_TIMEOUT_S)[-1]["meta_info"]["finish_reason"]["status_code"] == 503
        assert_quarantined(server, "the update to version")
        healed = update(server, policy)
        (reply,) = server.generate({**ASK, "sampling_params": GREEDY})
        assert set(reply["meta_info"]["policy_version"]) == {healed}


@pytest.mark.guarantee(
    "runs", fault="a trainer resumed at an older version, while the one before it goes on"
)
def test_a_resumed_trainer_goes_back(server: Server, policies: Policies) -> None:
    """Behind it the server takes no update of this process's run."""
    _, policy, other, *_ = policies("qwen3")
    trainer_bridge.update(models.named_tensors(policy), server, version=150)
    (reply,) = server.generate(serving.ASK)
    assert set(runs_of(reply)) == {RUN}
    assert reply["meta_info"]["weight_version"] == weight_version(server) == "150"

    trainer_bridge.update(models.named_tensors(other), server, version=100, run="resumed")
    assert_serves(server, other, 100)
    (reply,) = server.generate(serving.ASK)
    assert set(runs_of(reply)) == {"resumed"}
    assert reply["meta_info"]["weight_version"] == weight_version(server) == "100"
    with pytest.raises(EngineError, match=f"run '{RUN}' was replaced"):
        update(server, policy)
    assert_serves(server, other, 100)


@pytest.mark.guarantee("runs", fault="a request that goes on under another run")
def test_a_request_that_goes_on_under_another_run(started: Server, policies: Policies) -> None:
    _, policy, other, *_ = policies("qwen3")
    trainer_bridge.update(models.named_tensors(policy), started, version=7, run="before")
    with caught(started) as (events, seen):
        assert len(seen[-1]["output_ids"]) > 0
        trainer_bridge.update(
            models.named_tensors(other), started, version=3, run="after", in_flight="retract"
        )
        reply = events.result(CALL_TIMEOUT_S)[-1]
    runs, versions = runs_of(reply), reply["meta_info"]["policy_version"]
    assert len(runs) == len(versions) == len(reply["output_ids"])
    assert set(zip(runs, versions, strict=True)) == {("before", 7), ("after", 3)}
    assert runs == sorted(runs, reverse=True)  # one change
    assert_serves(started, other, 3)


@pytest.mark.guarantee("one-version", fault="updates beside rollouts in threads of one process")
def test_an_engine_of_this_process(fresh: EngineProcess, policy: Path) -> None:
    """The last test: it shuts the engine down."""
    fresh.call(in_process.all_ways, policy)
