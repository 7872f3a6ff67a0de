"""A real server over HTTP: updates, rollouts, and all that a trainer may do wrong.

After each fault the server must still be up, serve the policy that it served before or refuse with
503, and be healed by the next complete update. What it holds is read back and compared with
``expected.py``, byte for byte.
"""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

import trainer_bridge
from sgl_fp8rl.engine import compat
from tests.engine import models
from tests.engine.conftest import Policies
from tests.engine.harness import (
    BUCKET_BYTES,
    CALL_TIMEOUT_S,
    FORKED,
    STREAMS,
    Server,
)
from tests.engine.serving import (
    ASK,
    GREEDY,
    PROMPT,
    ByHand,
    Tensors,
    assert_alive,
    assert_quarantined,
    assert_serves,
    begin,
    begin_message,
    by_hand,
    manifest_of,
    update,
    version_of,
)
from trainer_bridge.adapters import contract
from trainer_bridge.adapters.updates import next_version
from trainer_bridge.engines.engine_client import EngineError

NEEDS_GPU = "newer SGLang needs a GPU to release memory"

pytestmark = pytest.mark.engine

STILL_WAITING_S = 2.0
"""A request that waits is looked at for so long; one that is served takes a tenth of it."""
UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"


@pytest.fixture(scope="module")
def started(policies: Policies, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    environment = {"FP8RL_BUCKET_BYTES": str(BUCKET_BYTES)}
    with Server(log, FORKED, policies("qwen3")[0], environment=environment) as server:
        yield server


@pytest.fixture
def server(started: Server, policies: Policies) -> Iterator[Server]:
    """The server, which serves policy 0 as an updated version when a test begins."""
    update(started, policies("qwen3")[0])
    yield started
    assert_alive(started)


@pytest.fixture
def policy(policies: Policies) -> Path:
    """Another policy than the server has when a test begins."""
    return policies("qwen3")[1]


@pytest.fixture
def tensors(policy: Path) -> Tensors:
    return list(models.named_tensors(policy))


# ---- updates and rollouts --------------------------------------------------------------------


@pytest.mark.parametrize("stream", ["bf16", "fp8", "stream"])
def test_update_and_rollout(server: Server, policy: Path, stream: str) -> None:
    version = version_of(server) + 1
    trainer_bridge.update(STREAMS[stream](policy), server.address, version=version)
    rollout = trainer_bridge.rollout(
        server.address,
        [PROMPT, PROMPT[:5]],
        {"n": 2, "temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True},
        expected_version=version,
    )
    assert rollout.versions == [[version] * 8] * 4
    assert rollout.finish_reasons == ["length"] * 4
    assert_serves(server, policy, version)
    with pytest.raises(ValueError, match="not the expected"):
        trainer_bridge.rollout(server, [PROMPT], GREEDY, expected_version=version + 1)


@pytest.mark.guarantee("rollouts", fault="one of 512 requests fails")
def test_rollout_of_which_one_request_fails(server: Server) -> None:
    """512 at once, many more than the engine runs."""
    prompts = [[1 + index % 100, 7, 9] for index in range(512)]
    prompts[100] = PROMPT * 100  # longer than the model's context
    sampling = {"max_new_tokens": 2, "ignore_eos": True}
    result = trainer_bridge.rollout(server.address, prompts, sampling)
    assert list(result.errors) == [100]
    assert result.errors[100].status == 400
    assert [len(row) for row in result.tokens] == [2] * 100 + [0] + [2] * 411


def test_the_contract_of_adapters(server: Server, policy: Path) -> None:
    version = version_of(server)

    def sync(pairs: contract.Pairs, step: int | None) -> int:
        nonlocal version
        version = next_version(step, version)
        trainer_bridge.update(pairs, server.address, version=version)
        return version

    def sample() -> list[int]:
        (reply,) = server.generate(ASK)
        return list(reply["meta_info"]["policy_version"])

    contract.check_weights(lambda: models.framework_stream(policy), policy)
    contract.check_engine(server.address)
    contract.check_updates(server.address, lambda: models.framework_stream(policy), sync, sample)


@pytest.mark.guarantee("rollouts", fault="answers that take 15 minutes")
@pytest.mark.full
@pytest.mark.timeout(1500)
def test_rollout_of_fifteen_minutes(server: Server) -> None:
    """Of an engine that takes a second for each token."""
    long = {**GREEDY, "max_new_tokens": 900}
    start = time.monotonic()
    try:
        assert server.status_of("/slow_down", b'{"forward_sleep_time": 1.0}') == 200
        result = trainer_bridge.rollout(server.address, [PROMPT] * 2, long)
    finally:
        assert server.status_of("/slow_down", b'{"forward_sleep_time": null}') == 200
    assert time.monotonic() - start > 900
    assert result.finish_reasons == ["length"] * 2
    assert [set(row) for row in result.versions] == [{version_of(server)}] * 2


# ---- bad manifests: refused before the first write -------------------------------------------

Begin = dict[str, Any]
"""The message that begins an update, which a test spoils."""


def with_tensor(name: str, dtype: str, *shape: int) -> Callable[[Begin], None]:
    return lambda begin: begin["manifest"]["tensors"].update({name: [dtype, list(shape)]})


# test_manifest.py, test_routes.py and test_policy.py have every other fault
BAD_MANIFESTS: dict[str, tuple[Callable[[Begin], Any], str]] = {
    "missing": (lambda begin: begin["manifest"]["tensors"].pop(UP), f"missing: {UP}"),
    "shape": (with_tensor(UP, "bfloat16", 512, 128), f"{UP} has shape (512, 128)"),
    "dtype": (with_tensor(UP, "int8", 512, 256), f"{UP} has dtype 'int8'"),
    "a half without room": (
        lambda begin: begin["manifest"].update(chunk_bytes=4096),
        "larger --fp8rl-bucket-bytes",
    ),
}


@pytest.mark.guarantee("check-first", fault="a manifest with wrong names, shapes or dtypes")
@pytest.mark.parametrize("fault", BAD_MANIFESTS)
def test_bad_manifest(server: Server, policies: Policies, tensors: Tensors, fault: str) -> None:
    version = version_of(server)
    change, sentence = BAD_MANIFESTS[fault]
    begin = begin_message(manifest_of(tensors), version + 1)
    change(begin)
    status, reply = server.ask("/fp8rl", json.dumps(begin).encode())
    assert status == 400
    assert sentence in reply["error"]
    assert_serves(server, policies("qwen3")[0], version)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"[" * 100_000, "not JSON"),
        (b'{"op": "reboot"}', "'reboot' is unknown"),
        (b'{"op": "begin", "version": 1000000}', "run is None"),
    ],
)
def test_bad_message(server: Server, policies: Policies, body: bytes, sentence: str) -> None:
    version = version_of(server)
    status, reply = server.ask("/fp8rl", body)
    assert status == 400
    assert sentence in reply["error"]
    assert_serves(server, policies("qwen3")[0], version)


@pytest.mark.guarantee("check-first", fault="a version that was served before")
def test_replayed_and_out_of_order_version(server: Server, policy: Path) -> None:
    version = update(server, policy) + 2
    trainer_bridge.update(models.named_tensors(policy), server, version=version)
    for old in (version, version - 1, 0):
        with pytest.raises(EngineError, match=f"not newer than the engine's version {version}"):
            trainer_bridge.update(models.named_tensors(policy), server, version=old)
    assert_serves(server, policy, version)


# ---- bad steps after the first write: quarantine, until a complete update -----------------------


def then(message: dict[str, Any], first: int | None = None) -> Callable[[ByHand], None]:
    """Send the chunks from ``first`` on, and a message."""

    def send(trainer: ByHand) -> None:
        if first is not None:
            trainer.write(*range(first, len(trainer.chunks)))
        trainer.ranks.ask(message)

    return send


BAD_CHUNKS: dict[str, tuple[Callable[[ByHand], None], str]] = {
    "twice": (lambda trainer: trainer.write(1, 1), "chunk 1 is not awaited"),
    "second missing": (then({"op": "finish"}, 2), "send every chunk of the manifest"),
    "unknown": (
        lambda trainer: trainer.ranks.ask({"op": "chunk", "index": len(trainer.chunks)}),
        "is not awaited",
    ),
    "given up": (then({"op": "abort", "reason": "given up"}), "given up"),
}
"""``test_rank_server.py`` has every other fault, also before the first write."""


@pytest.mark.guarantee("all-or-none", fault="a chunk that comes twice, is missing or unknown")
@pytest.mark.parametrize("fault", BAD_CHUNKS)
def test_bad_chunk(server: Server, policy: Path, tensors: Tensors, fault: str) -> None:
    version = version_of(server)
    send, reason = BAD_CHUNKS[fault]
    with by_hand(server, tensors, version + 1) as trainer:
        trainer.write(0)
        with pytest.raises(EngineError):
            send(trainer)
    assert_quarantined(server, reason)
    assert server.status_of("/health") == 200
    assert version_of(server) == version
    # the failed version was never committed, so it is free
    assert update(server, policy) == version + 1
    assert_serves(server, policy, version + 1)


@pytest.mark.guarantee("quarantine", fault="NaN or Inf in a weight")
@pytest.mark.guarantee("quarantine", fault="NaN in codes, or a scale that is not positive")
@pytest.mark.parametrize(
    ("stream", "name", "value", "reason"),
    [
        ("bf16", UP, float("nan"), f"{UP}.*NaN or Inf"),
        ("bf16", NORM, float("inf"), f"{NORM}.*NaN or Inf"),
        ("fp8", UP, 0xFF, f"{UP} holds NaN or Inf"),
        ("fp8", f"{UP}_scale_inv", -1.0, f"{UP}_scale_inv holds a scale that is not a positive"),
    ],
)
def test_bad_value(
    server: Server, policy: Path, stream: str, name: str, value: float, reason: str
) -> None:
    tensors = dict(STREAMS[stream](policy))
    spoilt = tensors[name].clone()
    (spoilt.view(torch.uint8) if spoilt.dtype.itemsize == 1 else spoilt).view(-1)[3] = value
    tensors[name] = spoilt
    version = version_of(server)
    with pytest.raises(EngineError, match=reason):
        trainer_bridge.update(tensors, server, version=version + 1)
    assert_quarantined(server, reason.rpartition(".*")[2])
    assert update(server, policy) == version + 1
    assert_serves(server, policy, version + 1)


# ---- trainers that die ------------------------------------------------------------------------


def _trainer_that_stops(
    connection: Connection, address: str, checkpoint: Path, version: int, sent: int
) -> None:
    """Begin an update, send so many chunks, and do nothing more."""
    tensors = list(models.named_tensors(checkpoint))
    begun = begin(trainer_bridge.connect(address), tensors, version)
    trainer = ByHand(begun, tensors)
    trainer.write(*range(sent))
    connection.send("stopped")
    connection.recv()
    del trainer  # held, with its connections, until the process is killed


@contextmanager
def trainer_that_stops(address: str, checkpoint: Path, version: int, sent: int) -> Iterator[int]:
    """The process id of a trainer that has stopped in the middle; it is killed at the end."""
    spawn = multiprocessing.get_context("spawn")
    connection, other = spawn.Pipe()
    trainer = spawn.Process(
        target=_trainer_that_stops, args=(other, address, checkpoint, version, sent)
    )
    trainer.start()
    other.close()
    try:
        assert connection.poll(60), "the trainer did not come so far"
        connection.recv()
        assert trainer.pid is not None
        yield trainer.pid
    finally:
        trainer.kill()
        trainer.join()
        connection.close()


@pytest.mark.guarantee("all-or-none", fault="the trainer is killed before it wrote")
@pytest.mark.guarantee("quarantine", fault="the trainer is killed between two chunks")
@pytest.mark.parametrize("sent", [0, 1, 25])
def test_trainer_is_killed(server: Server, policies: Policies, sent: int) -> None:
    start, policy, *_ = policies("qwen3")
    version = version_of(server)
    with trainer_that_stops(server.address, policy, version + 1, sent) as pid:
        assert server.control({"op": "layout"})["state"] == "updating"
        os.kill(pid, signal.SIGKILL)
        ended = server.control({"op": "end"})
    assert not ended["ended"] and "the trainer is gone" in ended["failure"]
    if sent == 0:
        assert_serves(server, start, version)  # nothing was written
        return
    assert_quarantined(server, "the trainer is gone")
    assert_serves(server, policy, update(server, policy))


def buckets_of(server: Server) -> int:
    """How many buckets of trainers the processes of a server have mapped."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if os.getsid(int(process.name)) == server.process.pid:
                found += (process / "maps").read_text().count("fp8rl-bucket")
    return found


def test_an_idle_server_lets_go_of_a_trainer_that_closes(server: Server, policy: Path) -> None:
    """SGLang's loop must come by our hook also where it has nothing to do."""
    version = version_of(server) + 1
    trainer_bridge.update(STREAMS["bf16"](policy), server.address, version=version)
    assert buckets_of(server) == 1
    trainer_bridge.close(server.address)
    assert buckets_of(server) == 0


# ---- two trainers, and requests at the time of an update ---------------------------------------


@pytest.mark.guarantee("all-or-none", fault="two trainers at once")
def test_two_trainers_at_once(
    server: Server, policies: Policies, policy: Path, tensors: Tensors
) -> None:
    version = version_of(server) + 1
    with by_hand(server, tensors, version) as trainer:
        trainer.write(*range(10))
        assert server.status_of("/health") == 200
        for other_version in (version, version + 1):
            with pytest.raises(EngineError, match="an update is under way") as refusal:
                trainer_bridge.update(
                    models.named_tensors(policies("qwen3")[2]), server, version=other_version
                )
            assert refusal.value.status == 409
        trainer.commit_from(10)
    assert_serves(server, policy, version)


def generate_later(pool: ThreadPoolExecutor, server: Server) -> Future[Any]:
    """A request that must wait for the update that is under way."""
    waiting = pool.submit(server.generate, ASK)
    with pytest.raises(FutureTimeoutError):
        waiting.result(STILL_WAITING_S)
    return waiting


@pytest.mark.guarantee("one-version", fault="an update while a request generates")
def test_update_during_generation(server: Server, policy: Path, tensors: Tensors) -> None:
    old = version_of(server)
    long = {**ASK, "sampling_params": {**GREEDY, "max_new_tokens": 900}}
    batch = {**long, "input_ids": [PROMPT] * 3, "sampling_params": {**GREEDY, "max_new_tokens": 90}}
    with ThreadPoolExecutor() as pool:
        stream = server.stream(long)
        next(stream)  # it generates now
        beside = pool.submit(server.generate, batch)
        with by_hand(server, tensors, old + 1) as trainer:
            *_, last = stream
            assert last["meta_info"]["finish_reason"]["type"] == "abort"
            assert 0 < len(last["output_ids"]) < 900
            assert last["meta_info"]["policy_version"] == [old] * len(last["output_ids"])

            waiting = generate_later(pool, server)
            trainer.commit_from(0)
        (reply,) = waiting.result(CALL_TIMEOUT_S)
        assert reply["meta_info"]["policy_version"] == [old + 1] * GREEDY["max_new_tokens"]
        for reply in beside.result(CALL_TIMEOUT_S):
            assert_one_version(reply, {old, old + 1})
    assert_serves(server, policy, old + 1)


def assert_one_version(reply: dict[str, Any], known: set[int]) -> None:
    """All tokens are of one version; an aborted request may have none, and then tells none."""
    versions = reply["meta_info"].get("policy_version", [])
    if reply["meta_info"]["finish_reason"]["type"] != "abort":
        assert len(versions) == len(reply["output_ids"]) > 0
    assert len(set(versions)) <= 1
    assert set(versions) <= known


@pytest.mark.guarantee("quarantine", fault="a request that waits for an update that fails")
def test_request_that_waits_for_a_failing_update(
    server: Server, policy: Path, tensors: Tensors
) -> None:
    with ThreadPoolExecutor() as pool:
        with by_hand(server, tensors, version_of(server) + 1) as trainer:
            trainer.write(*range(12))
            waiting = generate_later(pool, server)
        with pytest.raises(EngineError, match="quarantined") as refusal:
            waiting.result(CALL_TIMEOUT_S)
        assert refusal.value.status == 503
    assert_serves(server, policy, update(server, policy))


@pytest.mark.guarantee("released", fault="a release while requests run")
@pytest.mark.skipif(compat.sglang_version() != "0.5.17", reason=NEEDS_GPU)
def test_a_release_waits_for_what_runs(server: Server, policy: Path) -> None:
    """Stock SGLang ends itself."""
    old = version_of(server)
    long = {**ASK, "sampling_params": {**GREEDY, "max_new_tokens": 200}}
    with ThreadPoolExecutor() as pool:
        streams = [server.stream(long) for _ in range(2)]
        for stream in streams:
            next(stream)  # it generates now
        released = pool.submit(server.status_of, "/release_memory_occupation", b"{}")
        for *_, last in streams:
            assert last["meta_info"]["policy_version"] == [old] * 200
        assert released.result(CALL_TIMEOUT_S) == 200
        with pytest.raises(EngineError, match="memory was released"):
            server.generate(ASK)
    assert server.status_of("/resume_memory_occupation", b"{}") == 200
    assert_serves(server, policy, update(server, policy))


@pytest.mark.guarantee("released", fault="a release while requests are paused")
@pytest.mark.skipif(compat.sglang_version() != "0.5.17", reason=NEEDS_GPU)
def test_a_release_that_would_wait_for_ever_is_refused(server: Server, policies: Policies) -> None:
    """A resume of what was not released does nothing; stock SGLang ends itself over both."""
    version = version_of(server)
    stream = server.stream({**ASK, "sampling_params": {**GREEDY, "max_new_tokens": 400}})
    next(stream)  # it generates now
    assert server.status_of("/pause_generation", b'{"mode": "in_place"}') == 200
    status, reply = server.ask("/release_memory_occupation", b"{}")
    assert status == 400
    assert "generation is paused" in str(reply)
    assert server.status_of("/resume_memory_occupation", b"{}") == 200
    assert server.status_of("/continue_generation", b"{}") == 200
    *_, last = stream
    assert last["meta_info"]["policy_version"] == [version] * 400
    assert_serves(server, policies("qwen3")[0], version)


@pytest.mark.guarantee("one-version", fault="updates while requests are sent")
def test_tokens_are_those_of_their_version(server: Server, policies: Policies) -> None:
    """One client asks without pause while the weights go to and fro under it."""
    both = policies("qwen3")[:2]
    answers: dict[int, list[list[int]]] = {}

    def answers_of(checkpoint: Path) -> list[list[int]]:
        """Without and with the prompt in the cache; the two may round otherwise."""
        version = update(server, checkpoint)
        replies = [server.generate(ASK)[0] for _ in range(2)]
        answers[version] = [list(reply["output_ids"]) for reply in replies]
        return answers[version]

    wanted = [answers_of(checkpoint) for checkpoint in both]
    assert not any(answer in wanted[1] for answer in wanted[0])
    stop = Event()

    def ask_all_the_time() -> list[dict[str, Any]]:
        replies: list[dict[str, Any]] = []
        while not stop.is_set():
            replies += server.generate(ASK)
        return replies

    with ThreadPoolExecutor() as pool:
        asking = pool.submit(ask_all_the_time)
        try:
            for n in range(8):
                answers[update(server, both[n % 2])] = wanted[n % 2]
        finally:
            stop.set()
        replies = asking.result(CALL_TIMEOUT_S)
    complete = [r for r in replies if r["meta_info"]["finish_reason"]["type"] != "abort"]
    assert complete
    for reply in replies:
        assert_one_version(reply, set(answers))
        for version in reply["meta_info"].get("policy_version", [])[:1]:
            tokens = list(reply["output_ids"])
            assert tokens in [answer[: len(tokens)] for answer in answers[version]]


# ---- SGLang's own doors -------------------------------------------------------------------------


NEWER: dict[str, dict[str, str]] = {"begin_weight_update": {}, "end_weight_update": {}}
"""Routes of SGLang after 0.5.17."""


def test_stock_update_is_refused(server: Server, policies: Policies) -> None:
    version = version_of(server)
    path = str(policies("qwen3")[1])
    stock = {"update_weights_from_disk": {"model_path": path}}
    stock["weights_checker"] = {"action": "reset_tensors"}
    for route, request in (stock | NEWER).items():
        status, reply = server.ask(f"/{route}", json.dumps(request).encode())
        if status == 404:
            assert route in NEWER
            continue
        assert status == 400
        assert "trainer_bridge.update" in reply["message"]
    assert_serves(server, policies("qwen3")[0], version)


def test_a_pause_during_an_update_is_kept(server: Server, policy: Path, tensors: Tensors) -> None:
    """SGLang's own pause waits for the condition that an update holds."""
    version = version_of(server) + 1
    with ThreadPoolExecutor() as pool:
        with by_hand(server, tensors, version) as trainer:
            pause = pool.submit(server.status_of, "/pause_generation", b'{"mode": "retract"}')
            with pytest.raises(FutureTimeoutError):
                pause.result(STILL_WAITING_S)
            trainer.commit_from(0)
        assert pause.result(CALL_TIMEOUT_S) == 200
        waiting = generate_later(pool, server)
        with pytest.raises(FutureTimeoutError):
            waiting.result(STILL_WAITING_S)
        assert server.status_of("/continue_generation", b'{"torch_empty_cache": false}') == 200
        (reply,) = waiting.result(CALL_TIMEOUT_S)
    assert_one_version(reply, {version})
