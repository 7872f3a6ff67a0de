"""rollout(): what it asks the engine, what it makes of the replies, and all that it refuses."""

import base64
import json
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from sgl_fp8rl.protocol.policy import Policy
from trainer_bridge.correction import correct
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.rollouts import sampling
from trainer_bridge.rollouts.batch import PAD_VERSION, Rollout
from trainer_bridge.rollouts.logprobs import response_logprobs
from trainer_bridge.rollouts.rollout import rollout
from trainer_bridge.session.kept import KEPT

Reply = dict[str, Any]
PROMPTS = [[5, 6], [7]]


class FakeEngine:
    """An EngineClient without an engine: request i samples i + 1 tokens, the t-th with id 10 i + t.

    Replies have SGLang's form; `edit` may spoil one on its way out.
    """

    def __init__(self, *, version: int = 3, raw: bool = False, run: str = "a") -> None:
        self.version, self.raw, self.run, self.state = version, raw, run, "serving"
        self.requests: list[dict[str, Any]] = []
        self.refused: dict[Any, EngineError] = {}
        """By the first token or letter of a prompt."""
        self.clipped: list[Any] = []
        """What statuses say that the FP8 KV cache clipped, one after the other."""
        self.kv: dict[str, Any] | None = {"pending": False, "scales": [[[0.5], [0.25]]]}
        self.edit: Callable[[Reply], None] = lambda reply: None

    def control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        if message == {"op": "kv"}:
            if self.kv is None:
                raise EngineError("an update is under way", 409)
            return self.kv
        assert message == {"op": "status"}
        serves = {"run": self.run, "version": self.version, "state": self.state}
        more = {"kv_clipped": self.clipped.pop(0)} if self.clipped else {}
        return {**serves, "reason": "NaN", "logprobs": {"raw": self.raw}, **more}

    def sample(
        self, requests: Sequence[dict[str, Any]], timeout: float | None = None
    ) -> list[Reply | EngineError]:
        self.requests += requests
        return [self.reply(i, request) for i, request in enumerate(requests)]

    def reply(self, i: int, request: dict[str, Any]) -> Reply | EngineError:
        assert request["return_logprob"] is True
        prompt = request["text"] if "text" in request else request["input_ids"]
        if prompt[0] in self.refused:
            return self.refused[prompt[0]]
        ids = [10 * i + t for t in range(i + 1)]
        meta = {
            "finish_reason": {"type": "stop", "matched": 0},
            "output_token_logprobs": [[-0.5 - t, token, None] for t, token in enumerate(ids)],
            "policy_version": [self.version] * len(ids),
            "policy_run": [self.run, *[""] * i],
        }
        reply: Reply = {"output_ids": ids, "meta_info": meta}
        if request.get("return_prompt_token_ids"):
            reply |= {"prompt_token_ids": [ord(c) for c in prompt], "text": "abc"}
        self.edit(reply)
        return reply

    def close(self) -> None:
        pass


def test_a_reply_becomes_tokens_logprobs_and_versions() -> None:
    result = rollout(FakeEngine(), PROMPTS, {"temperature": 0.7, "max_new_tokens": 4})
    assert result == Rollout(
        prompt_tokens=PROMPTS,
        tokens=[[0], [10, 11]],
        logprobs=[[-0.5], [-0.5, -1.5]],
        versions=[[3], [3, 3]],
        finish_reasons=["stop", "stop"],
        runs=[["a"], ["a", "a"]],
        temperature=0.7,
        groups=[0, 1],
    )


OFF: dict[str, Any] = {
    **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0},
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), 0.0),
    **dict.fromkeys(("logit_bias", "json_schema", "regex", "ebnf", "structural_tag")),
}
"""Options that would change the distribution."""


def test_the_request_leaves_nothing_to_the_servers_preferences() -> None:
    client = FakeEngine()
    given = {"max_new_tokens": 4, "stop_token_ids": [2]}
    rollout(client, PROMPTS, given | {"top_k": 0})
    assert [request["input_ids"] for request in client.requests] == PROMPTS
    sent = client.requests[1]["sampling_params"]
    assert sent.pop("sampling_seed") and sent == {**given, "temperature": 1.0, **OFF}


@pytest.mark.parametrize("name", OFF)
def test_options_that_change_the_distribution_are_refused(name: str) -> None:
    client = FakeEngine()
    with pytest.raises(ValueError, match=rf"\['{name}'\].*leave it out"):
        rollout(client, PROMPTS, {name: "a" if OFF[name] is None else OFF[name] + 2})
    assert not client.requests


def test_strings_come_back_as_the_engines_tokens() -> None:
    client = FakeEngine()
    result = rollout(client, ["ab", "c"], {"n": 2})
    assert [request["text"] for request in client.requests] == ["ab", "ab", "c", "c"]
    assert result.prompt_tokens == [[97, 98], [97, 98], [99], [99]]
    client.edit = lambda reply: reply.pop("prompt_token_ids")
    with pytest.raises(ValueError, match=r"reply 0 .*pass prompts as token ids"):
        rollout(client, ["ab"], {})


@pytest.mark.parametrize(
    ("temperature", "expected"), [(0.6, 0.6), (None, 1.0), (1, 1.0), (0, 1.0), (1e-7, 1.0)]
)
def test_temperature_is_the_trainers_divisor(temperature: float | None, expected: float) -> None:
    client = FakeEngine()
    assert rollout(client, PROMPTS, {"temperature": temperature}).temperature == expected
    sent = client.requests[0]["sampling_params"]["temperature"]
    assert sent == (1.0 if temperature is None else temperature)


def test_raw_logprobs_need_temperature_one() -> None:
    client = FakeEngine(raw=True)
    for temperature in (1.0, 0.0):  # greedy logprobs are of unscaled logits either way
        assert rollout(client, PROMPTS, {"temperature": temperature}).temperature == 1.0
    client.requests.clear()
    with pytest.raises(ValueError, match=r"0\.5.*SGLANG_RETURN_ORIGINAL_LOGPROB"):
        rollout(client, PROMPTS, {"temperature": 0.5})
    assert not client.requests


def calls(*given: tuple[int | None, int]) -> list[list[int]]:
    """The seeds of each call, by its seed and version, as in a process that begins with them."""
    found = []
    with patch.object(sampling, "_calls", defaultdict(count)):
        for seed, version in given:
            client = FakeEngine(version=version)
            rollout(client, [[5, 6], [7], [5, 6]], {"n": 8, "sampling_seed": seed})
            found.append([each["sampling_params"]["sampling_seed"] for each in client.requests])
    return found


def test_no_two_requests_have_one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would be one sample with --enable-deterministic-inference, where a seed decides it."""
    steps = [(None, step) for step in range(-1, 40)]
    again = [(None, 3)] * 5
    counting_up = [(step, step) for step in range(50)] + [(step, 3) for step in range(50, 90)]
    largest = [(-(1 << 63), 3), ((1 << 63) - 1, 3)]
    given = [*steps, *again, *counting_up, *largest]
    found = calls(*given)
    monkeypatch.setattr(sampling.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(sampling.dist, "get_rank", lambda: 1)
    found += calls(*given)
    seeds = [seed for call in found for seed in call]
    assert len(set(seeds)) == len(seeds) == 2 * len(given) * 24
    assert min(seeds) >= 0 and max(seeds) < 1 << 63  # of SGLang's int64


def test_a_rerun_has_the_same_seeds_at_the_same_step() -> None:
    whole = [(7, 0), (7, 1), (7, 1), (7, 2)]
    first = calls(*whole)
    assert calls(*whole) == first
    assert calls(*whole[1:]) == first[1:], "resumed from a checkpoint of version 1"
    assert calls((None, 5)) == calls((42, 5))
    # what a training recorded: another hash is another training
    expected = blake2b(b"(7, 1, 0, 1, 23)", digest_size=8).digest()
    assert first[2][23] == int.from_bytes(expected, "big") >> 1


def spoil(name: str, value: Any = None) -> Callable[[Reply], None]:
    """Give a part of meta_info another value, or take it away."""

    def edit(reply: Reply) -> None:
        if value is None:
            del reply["meta_info"][name]
        else:
            reply["meta_info"][name] = value

    return edit


def test_a_lost_reply_is_noticed() -> None:
    client = FakeEngine()
    client.sample = lambda requests, _: [client.reply(0, requests[0])]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="shorter"):
        rollout(client, PROMPTS, {})


A3, A4, A5, OTHER3 = ("a", 3), ("a", 4), ("a", 5), ("another", 3)
CHECKPOINT = ("", -1)
LOST = r"the engine has version (-1|9|3)\b.*version 4 of run"
Served = tuple[str, int]


@pytest.mark.guarantee("rollouts", fault="tokens of an older version")
@pytest.mark.guarantee(
    "rollouts", fault="an engine that was started again, or updated by another trainer"
)
@pytest.mark.guarantee("rollouts", fault="the expected version, of another run")
@pytest.mark.parametrize(
    ("serves", "committed", "expected", "samples", "error"),
    [
        # no update of this process
        (A4, None, 4, A4, None),
        (A4, None, 5, A4, r"the engine has version 4\b.* version 5\b"),
        (A4, None, 4, A5, r"reply 0 has version 5\b.* version 4\b"),
        (A4, None, None, A5, None),
        (OTHER3, None, 3, OTHER3, None),
        # tokens are at least as new as its last one; a thread may update while this one samples
        (A4, A4, None, A4, None),
        (A4, A4, None, A5, None),
        (A4, A4, None, A3, r"reply 0 has version 3\b.* updated .* version 4\b"),
        # the engine was started again, or another trainer came
        *((serves, A4, None, serves, LOST) for serves in (CHECKPOINT, ("another", 9), A3)),
        # an expected version is of its run; the checkpoint is of every run
        (OTHER3, A3, 3, OTHER3, r"the engine has version 3 of run 'another'.*run 'a'"),
        (A3, A3, 3, A3, None),
        (A3, A3, 3, OTHER3, r"reply 0 has version 3 of run 'another'.*run 'a'"),
        (A3, A4, 3, A3, None),
        (CHECKPOINT, A4, -1, CHECKPOINT, None),
    ],
)
def test_tokens_are_of_the_policy_that_is_meant(
    serves: Served,
    committed: Served | None,
    expected: int | None,
    samples: Served,
    error: str | None,
) -> None:
    run, version = serves
    client = FakeEngine(run=run, version=version)
    if committed is not None:
        commit(client, *committed)
    sampled = {"policy_run": [samples[0]], "policy_version": [samples[1]]}
    client.edit = lambda reply: reply["meta_info"].update(sampled)
    if error is not None:
        with pytest.raises(ValueError, match=error):
            rollout(client, [[5]], {}, expected_version=expected)
        assert bool(client.requests) is error.startswith("reply")
        KEPT.close(client)  # whoever lets go of it may sample what it serves
    result = rollout(client, [[5]], {}, expected_version=None if error else expected)
    assert (result.runs, result.policy_versions) == ([[samples[0]]], [samples[1]])


def commit(client: FakeEngine, run: str, version: int) -> None:
    """As after an update of this process."""
    KEPT.connection_to(client).policy = Policy(run, version)


def test_each_token_has_its_run() -> None:
    client = FakeEngine()

    def longer(reply: Reply) -> None:
        ids = list(range(6))
        reply["output_ids"] = ids
        reply["meta_info"] |= {
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "policy_version": [-1, -1, 7, 7, 3, 3],
            "policy_run": ["", "", "before", "", "after", ""],
        }

    client.edit = longer
    result = rollout(client, [[5]], {})
    assert result.runs == [["", "", "before", "before", "after", "after"]]
    assert result.versions == [[-1, -1, 7, 7, 3, 3]]


@pytest.mark.parametrize("reason", ["abort", "length"])
def test_a_sequence_is_kept_as_far_as_it_got(reason: str) -> None:
    """And is complete where it has the length that was asked for."""
    client = FakeEngine()
    client.edit = spoil("finish_reason", {"type": reason})
    result = rollout(client, PROMPTS, {})
    assert (result.finish_reasons, result.tokens) == ([reason] * 2, [[0], [10, 11]])
    assert result.is_complete_B.tolist() == [reason == "length"] * 2


def test_a_sequence_that_was_aborted_while_it_waited() -> None:
    def edit(reply: Reply) -> None:
        reply["meta_info"] = {"finish_reason": {"type": "abort"}, "routed_experts": None}

    client = FakeMoE()
    client.edit = edit
    result = rollout(client, PROMPTS, {}, routed_experts=True)
    assert result.tokens == result.logprobs == result.versions == [[], []]
    assert result.mask_BT.shape == (2, 0)
    assert [e.shape for e in result.routed_experts or []] == [(0, 2, 2)] * 2


@pytest.mark.parametrize("in_reply", [False, True])
def test_a_request_that_fails_loses_one_sequence(in_reply: bool) -> None:
    """By itself, or in the words of its reply. Where all do, the rollout fails as one of them."""
    client = FakeEngine()
    quarantined = {"type": "abort", "status_code": 503, "message": "quarantined: update 4 broke"}

    def edit(reply: Reply) -> None:
        if reply["output_ids"][0] == 10:
            reply["meta_info"]["finish_reason"] = quarantined

    if in_reply:
        client.edit = edit
    else:
        client.refused[6] = EngineError("quarantined", 503)
    result = rollout(client, [[5], [6], [7]], {})
    assert [*result.errors] == [1] and result.errors[1].status == 503
    assert result.finish_reasons == ["stop", "error", "stop"]
    assert result.prompt_tokens == [[5], [6], [7]]
    assert result.tokens == [[0], [], [20, 21, 22]]
    assert result.logprobs[1] == result.versions[1] == []
    assert result.mask_BT.sum(1).tolist() == [1, 0, 3]
    assert result.is_complete_B.tolist() == [True, False, True]
    client.edit = spoil("finish_reason", quarantined)
    client.refused = {7: EngineError("too long", 400)}
    with pytest.raises(EngineError, match=r"request 0.*quarantined") as raised:
        rollout(client, PROMPTS, {})
    assert raised.value.status == 503


def test_a_string_that_fails_has_no_tokens_at_all() -> None:
    client = FakeMoE()
    client.refused["c"] = EngineError("too long", 400)
    result = rollout(client, ["ab", "c"], {}, routed_experts=True)
    assert result.prompt_tokens == [[97, 98], []]
    assert [len(experts) for experts in result.routed_experts or []] == [2, 0]


def test_the_trainer_takes_a_rollout_with_failed_requests() -> None:
    """Its correction and metrics are those of the rollout without them."""
    client = FakeEngine()
    client.refused["z"] = EngineError("too long", 400)
    sampled, kept = (rollout(client, prompts, {"n": 2}) for prompts in (["ab", "z"], ["ab"]))

    def uniform(tokens_BL: torch.Tensor, use_cache: bool) -> Any:
        """A causal LM that finds every token equally likely, and no empty row."""
        return SimpleNamespace(logits=torch.zeros(*tokens_BL.shape, 128))

    model = Mock(side_effect=uniform, device="cpu")
    trainer_BT = response_logprobs(model, sampled.prompt_tokens, sampled.tokens)
    assert trainer_BT.shape == (4, 2)
    preset = "decoupled_geo_rs_token_tis"
    result, expected = correct(sampled, trainer_BT, preset), correct(kept, trainer_BT[:2], preset)
    assert result.metrics == expected.metrics
    assert torch.equal(result.weights_BT[:2], expected.weights_BT)
    assert not result.mask_BT[2:].any()


def test_padded_tensors() -> None:
    sampled = rollout(FakeEngine(), [[5], [6], [7]], {})
    result = replace(sampled, versions=[[-1], [2, 2], [-1, -1, 0]])
    tokens, logprobs = [[0, 0, 0], [10, 11, 0], [20, 21, 22]], [-0.5, -1.5, -2.5]
    assert torch.equal(result.tokens_BT, torch.tensor(tokens))
    mask = torch.tensor([[True, False, False], [True, True, False], [True, True, True]])
    assert torch.equal(result.mask_BT, mask)
    assert torch.equal(result.logprobs_BT, torch.tensor(logprobs).expand(3, 3) * mask)
    pad = PAD_VERSION
    versions = torch.tensor([[-1, pad, pad], [2, 2, pad], [-1, -1, 0]])
    assert torch.equal(result.versions_BT, versions)
    assert result.logprobs_BT.dtype == torch.float32
    assert result.policy_versions == [-1, 0, 2]
    assert result.mixed_version_sequences == [2]


class FakeMoE(FakeEngine):
    """The same with two layers of four experts, two a token: a token's number chooses them."""

    captures = True

    def control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        shape = {"decoder_layers": 2, "layers": [0, 1], "experts": 4, "top_k": 2}
        return super().control(message) | {"routed_experts": shape if self.captures else None}

    def reply(self, i: int, request: dict[str, Any]) -> Reply | EngineError:
        reply = super().reply(i, request)
        if request.get("return_routed_experts") and not isinstance(reply, EngineError):
            ids = [*map(ord, request["text"])] if "text" in request else request["input_ids"]
            experts = experts_of([*ids, *reply["output_ids"]][:-1]).int()
            encoded = base64.b64encode(experts.numpy().tobytes()).decode()
            reply["meta_info"].setdefault("routed_experts", encoded)
        return reply


def experts_of(tokens: list[int]) -> torch.Tensor:
    """What ``FakeMoE`` routes tokens to, ``[tokens, 2, 2]``."""
    first = torch.tensor(tokens)[:, None] + torch.tensor([0, 1])
    return torch.stack([first % 4, (first + 1) % 4], dim=-1)


def test_routed_experts_are_of_prompt_and_response_but_the_last_token() -> None:
    client = FakeMoE()
    result = rollout(client, PROMPTS, {"n": 2}, routed_experts=True)
    assert client.requests[0]["return_routed_experts"] is True
    assert result.routed_experts is not None
    for prompt, tokens, experts in zip(
        result.prompt_tokens, result.tokens, result.routed_experts, strict=True
    ):
        assert torch.equal(experts, experts_of([*prompt, *tokens][:-1]).to(torch.uint8))


def test_routed_experts_are_only_asked_for_when_wanted() -> None:
    client = FakeMoE()
    assert rollout(client, PROMPTS, {}).routed_experts is None
    assert "return_routed_experts" not in client.requests[0]
    client.captures = False
    for without in (client, FakeEngine()):
        with pytest.raises(ValueError, match="--enable-return-routed-experts"):
            rollout(without, PROMPTS, {}, routed_experts=True)
    assert len(client.requests) == len(PROMPTS)  # refused before anything was sampled


@contextmanager
def serve(engine: FakeEngine, answer: Callable[[Reply], tuple[int, Any]]) -> Iterator[str]:
    """The URL of a server with the plugin's /fp8rl and SGLang's /generate, which ``answer`` has."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, reply = (200, engine.control(body)) if self.path == "/fp8rl" else answer(body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(reply).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [FakeEngine, FakeMoE])
@pytest.mark.parametrize("prompts", [PROMPTS, ["ab", "c"]])
def test_over_http_the_result_is_the_same(prompts: list[Any], make: type[FakeEngine]) -> None:
    engine, options = make(), {"routed_experts": make is FakeMoE}

    def answer(request: Reply) -> tuple[int, Any]:
        prompt = request.get("text") or request["input_ids"]
        return 200, engine.reply(prompts.index(prompt), request)

    here = rollout(make(), prompts, {"temperature": 0.5}, **options)
    with serve(engine, answer) as url:
        far = rollout(url, prompts, {"temperature": 0.5}, expected_version=3, **options)
    pairs = zip(far.routed_experts or [], here.routed_experts or [], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert replace(far, routed_experts=None) == replace(here, routed_experts=None)


@pytest.mark.timeout(60)
def test_over_http_a_rollout_lasts_as_long_as_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit on opening a connection does not bound the reply."""
    monkeypatch.setattr("trainer_bridge.engines.http_requests.CONNECT_TIMEOUT_S", 1.0)
    engine = FakeEngine()

    def answer(request: Reply) -> tuple[int, Any]:
        time.sleep(4.0 if request["input_ids"] == [7] else 0)
        return 200, engine.reply(0, request)

    with serve(engine, answer) as url:
        assert rollout(url, PROMPTS, {}).tokens == [[0], [0]]
        late = rollout(url, PROMPTS, {}, timeout=2.0)
    assert late.finish_reasons == ["stop", "error"]
    assert "no answer within 2 s" in str(late.errors[1])


# -- several engines


def spread(engines: Sequence[Any], prompts: list[list[int]], n: int = 1) -> Rollout:
    return rollout(list(engines), prompts, {"n": n})


def asked(engine: FakeEngine) -> list[int]:
    """The first token of each prompt that it was sent."""
    return [request["input_ids"][0] for request in engine.requests]


def test_prompts_are_spread_over_engines_and_come_back_in_order() -> None:
    """The samples of a prompt are made by one engine, which prefills it once."""
    engines = [FakeEngine(), FakeEngine()]
    result = spread(engines, [[5], [6], [7]], n=2)
    assert "n" not in engines[0].requests[0]["sampling_params"]
    assert [asked(engine) for engine in engines] == [[5, 5, 7, 7], [6, 6]]
    assert result.prompt_tokens == [[5], [5], [6], [6], [7], [7]]
    # a fake engine's request i samples i + 1 tokens
    assert [len(tokens) for tokens in result.tokens] == [1, 2, 1, 2, 3, 4]
    assert result.errors == {}
    engines = [FakeEngine() for _ in range(3)]  # more than prompts
    assert len(spread(engines, [[5], [6]]).tokens) == 2
    assert [asked(engine) for engine in engines] == [[5], [6], []]


class Gone(FakeEngine):
    """It cannot be reached, from the start or while it samples."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op

    def control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        if self.op == "status":
            raise EngineError("cannot be reached")
        return super().control(message)

    def sample(self, *_: Any) -> list[Reply | EngineError]:
        raise EngineError("went away")


def test_engines_that_do_not_serve_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """One cannot be reached, one missed the last update, one serves another run, and an update to
    the next version failed on one."""
    engine, late, other, failed = (
        FakeEngine(version=v, run=run) for v, run in ((4, "a"), (3, "a"), (4, "b"), (4, "a"))
    )
    failed.state = "quarantined"
    commit(engine, "a", 4)
    commit(late, "a", 3)
    result = spread([Gone("status"), late, other, failed, engine], PROMPTS)
    assert (result.policy_versions, result.errors) == ([4], {})
    assert [asked(each) for each in (late, other, failed, engine)] == [[], [], [], [5, 7]]
    said = ("cannot be reached", "engine 1 has", "engine 2 has", "engine 3 is quarantined: NaN")
    assert all(words in caplog.text for words in said)
    for first, second, status in (Gone("status"), failed, None), (failed, Gone("status"), 503):
        with pytest.raises(EngineError, match=r"cannot be reached|quarantined") as held:
            spread([first, second], PROMPTS)
        assert held.value.status == status
    with pytest.raises(ValueError, match="engine 0 has"):
        rollout([late], PROMPTS, {}, expected_version=9)


def test_what_an_fp8_kv_cache_clips_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """It is asked for after the replies: before them the scales may wait to be measured."""
    engines = [FakeEngine(), FakeEngine(), FakeEngine()]
    engines[0].clipped, engines[1].clipped = [0.0, 0.25], [0.0, 1e-4]
    result = spread(engines, PROMPTS)
    assert result.kv_clipped == 0.25
    assert "clipped 0.25 of a layer's K or V" in caplog.text
    assert correct(result, result.logprobs_BT, "disabled").metrics["kv_clipped"] == 0.25
    caplog.clear()
    engines[0].clipped = [0.0, 1e-4]
    assert spread(engines, PROMPTS).kv_clipped == 1e-4
    assert not caplog.records
    plain = spread(engines, PROMPTS)  # no cache is FP8
    assert plain.kv_clipped is None
    assert "kv_clipped" not in correct(plain, plain.logprobs_BT, "disabled").metrics


def test_rows_carry_the_scales_of_their_engines_cache() -> None:
    """In the order of the prompts, as they are dealt; None of a BF16 cache and what is unknown."""
    engines = [FakeEngine() for _ in range(4)]
    engines[0].kv = {"pending": False, "scales": [[[0.5, 0.25], [1, 2]], [[4, 8], [3, 3]]]}
    engines[1].kv = {"pending": True, "scales": [[[1.0], [1.0]]]}
    engines[3].kv = None
    for each in (engines[0], engines[1], engines[3]):
        each.clipped = [0.0, 0.0]
    result = spread(engines, [[5], [6], [7], [8], [9]], n=2)
    first = ((0.5, 2.0), (8.0, 3.0))
    assert result.kv_scales == [first, first, *[None] * 6, first, first]
    assert result.kv_clipped == 0.0
    assert result[[9, 2]].kv_scales == [first, None]
    assert Rollout.join([result, result[:3]]).kv_scales == [*result.kv_scales, first, first, None]
    assert spread(engines, PROMPTS).kv_scales is None  # no cache is E4M3
    unsound: list[Any] = [[], None, 5, [[[0.5]]], [[[], [1.0]]], [[["a"], ["b"]]], [[[0], [1.0]]]]
    for scales in [*unsound, [[[math.nan], [1.0]]], [[[1.0], [math.inf]]]]:
        engine = FakeEngine()
        engine.clipped, engine.kv = [0.0, 0.0], {"pending": False, "scales": scales}
        assert rollout(engine, PROMPTS, {}).kv_scales == [None, None], scales


@pytest.mark.parametrize("later", ["all", -1.0, True, 2])
def test_a_rollout_is_not_lost_to_a_status(later: Any) -> None:
    engine = FakeEngine()
    engine.clipped = [0.0, later]
    result = rollout(engine, PROMPTS, {})
    assert (result.kv_clipped, result.errors) == (None, {})
    engine.clipped = [later]
    with pytest.raises(EngineError, match="kv_clipped"):
        rollout(engine, PROMPTS, {})


def test_an_engine_that_goes_away_loses_its_samples_alone() -> None:
    result = spread([FakeEngine(), Gone("sample")], [[5], [6], [7]])
    assert list(result.errors) == [1]
    assert "went away" in str(result.errors[1])
    assert [len(tokens) for tokens in result.tokens] == [1, 0, 2]
