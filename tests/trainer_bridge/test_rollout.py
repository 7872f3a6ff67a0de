"""rollout(): what it asks the engine, what it makes of the replies, and all that it refuses."""

import base64
import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_bridge.engine_client import EngineError
from trainer_bridge.rollout import PAD_VERSION, Rollout, rollout

Reply = dict[str, Any]
PROMPTS = [[5, 6], [7]]


class FakeEngine:
    """An EngineClient without an engine: request i samples i + 1 tokens, the t-th with id 10 i + t.

    Replies have SGLang's form; `edit` may spoil one on its way out.
    """

    def __init__(self, *, version: int = 3, raw: bool = False) -> None:
        self.version, self.raw = version, raw
        self.payloads: list[dict[str, Any]] = []
        self.edit: Callable[[Reply], None] = lambda reply: None

    def control(self, message: dict[str, Any]) -> dict[str, Any]:
        assert message == {"op": "layout"}
        return {"protocol": 1, "version": self.version, "logprobs": {"raw": self.raw}}

    def generate(self, payload: dict[str, Any]) -> list[Reply]:
        self.payloads.append(payload)
        assert payload["return_logprob"] is True
        prompts = payload["text"] if "text" in payload else payload["input_ids"]
        replies = []
        for i, prompt in enumerate(prompts):
            ids = [10 * i + t for t in range(i + 1)]
            meta = {
                "finish_reason": {"type": "stop", "matched": 0},
                "output_token_logprobs": [[-0.5 - t, token, None] for t, token in enumerate(ids)],
                "policy_version": [self.version] * len(ids),
            }
            reply: Reply = {"output_ids": ids, "meta_info": meta}
            if payload.get("return_prompt_token_ids"):
                reply |= {"prompt_token_ids": [ord(c) for c in prompt], "text": "abc"}
            self.edit(reply)
            replies.append(reply)
        return replies

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
        temperature=0.7,
    )


def test_the_request_leaves_nothing_to_the_servers_preferences() -> None:
    client = FakeEngine()
    rollout(client, PROMPTS, {"max_new_tokens": 4, "stop_token_ids": [2], "top_k": 0})
    (payload,) = client.payloads
    assert payload["input_ids"] == PROMPTS
    assert payload["sampling_params"] == {
        "max_new_tokens": 4,
        "stop_token_ids": [2],
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "logit_bias": None,
        "json_schema": None,
        "regex": None,
        "ebnf": None,
        "structural_tag": None,
    }


def test_n_samples_of_a_prompt_stand_side_by_side() -> None:
    client = FakeEngine()
    result = rollout(client, PROMPTS, {"n": 3})
    assert result.prompt_tokens == [[5, 6], [5, 6], [5, 6], [7], [7], [7]]
    assert client.payloads[0]["input_ids"] == result.prompt_tokens
    assert "n" not in client.payloads[0]["sampling_params"]
    assert [len(row) for row in result.tokens] == [1, 2, 3, 4, 5, 6]


def test_strings_come_back_as_the_engines_tokens() -> None:
    client = FakeEngine()
    result = rollout(client, ["ab", "c"], {"n": 2})
    assert client.payloads[0]["text"] == ["ab", "ab", "c", "c"]
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
    sent = client.payloads[0]["sampling_params"]["temperature"]
    assert sent == (1.0 if temperature is None else temperature)


def test_raw_logprobs_need_temperature_one() -> None:
    client = FakeEngine(raw=True)
    for temperature in (1.0, 0.0):  # greedy logprobs are of unscaled logits either way
        assert rollout(client, PROMPTS, {"temperature": temperature}).temperature == 1.0
    client.payloads.clear()
    with pytest.raises(ValueError, match=r"0\.5.*SGLANG_RETURN_ORIGINAL_LOGPROB"):
        rollout(client, PROMPTS, {"temperature": 0.5})
    assert not client.payloads


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.9),
        ("top_k", 50),
        ("top_k", 1),
        ("min_p", 0.05),
        ("frequency_penalty", 0.1),
        ("presence_penalty", -0.1),
        ("repetition_penalty", 1.1),
        ("min_new_tokens", 8),
        ("logit_bias", {"7": 1.0}),
        ("json_schema", "{}"),
        ("regex", "a*"),
        ("ebnf", "root ::= 'a'"),
        ("structural_tag", "{}"),
    ],
)
def test_options_that_change_the_distribution_are_refused(name: str, value: Any) -> None:
    client = FakeEngine()
    with pytest.raises(ValueError, match=rf"\['{name}'\].*leave it out"):
        rollout(client, PROMPTS, {name: value})
    assert not client.payloads


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"beam_width": 4}, "beam_width.*use only"),
        ({"custom_params": {"a": 1}}, "custom_params.*use only"),
        ({"n": 0}, r"\['n'\] = 0\b.*positive integer"),
        ({"n": 1.5}, r"\['n'\] = 1\.5\b.*positive integer"),
        ({"n": 2, "sampling_seed": 1}, "sampling_seed.*leave the seed out"),
        ({"temperature": -1.0}, r"\['temperature'\] = -1\.0\b.*0 or more"),
        ({"temperature": math.nan}, r"\['temperature'\] = nan\b.*0 or more"),
    ],
)
def test_other_sampling_mistakes_are_refused(sampling: dict[str, Any], message: str) -> None:
    client = FakeEngine()
    with pytest.raises(ValueError, match=message):
        rollout(client, PROMPTS, sampling)
    assert not client.payloads


@pytest.mark.parametrize("prompts", ["hello", [], [5, 6], ["a", [5]], [[5], "a"]])
def test_prompts_must_be_a_list_of_one_kind(prompts: Any) -> None:
    client = FakeEngine()
    with pytest.raises(ValueError, match="rollout: prompts"):
        rollout(client, prompts, {})
    assert not client.payloads


def spoil(name: str, value: Any = None) -> Callable[[Reply], None]:
    """Give a part of meta_info another value, or take it away."""

    def edit(reply: Reply) -> None:
        if value is None:
            del reply["meta_info"][name]
        else:
            reply["meta_info"][name] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (spoil("output_token_logprobs"), "reply 0 .*logprobs.*--quantization fp8rl"),
        (spoil("policy_version"), "reply 0 .*policy versions.*--quantization fp8rl"),
        (spoil("output_token_logprobs", []), "1 tokens.* 0 logprobs.* 1 policy"),
        (spoil("policy_version", [3, 3]), "1 tokens.* 1 logprobs.* 2 policy"),
        (spoil("output_token_logprobs", [[-0.5, 9, None]]), "reply 0 .*does not return"),
        (spoil("output_token_logprobs", [[None, 0, None]]), "reply 0 .*logprob.*NaN or Inf"),
        (spoil("output_token_logprobs", [[-math.inf, 0, None]]), "reply 0 .*logprob.*NaN or Inf"),
    ],
)
def test_a_reply_that_breaks_the_contract_is_refused(
    edit: Callable[[Reply], None], message: str
) -> None:
    client = FakeEngine()
    client.edit = edit
    with pytest.raises(ValueError, match=message):
        rollout(client, [[5]], {})


def test_a_lost_reply_is_noticed() -> None:
    class Forgetful(FakeEngine):
        def generate(self, payload: dict[str, Any]) -> list[Reply]:
            return super().generate(payload)[1:]

    with pytest.raises(ValueError, match=r"1 replies.* 2 requests"):
        rollout(Forgetful(), PROMPTS, {})


def test_the_expected_version_is_checked_before_and_after_sampling() -> None:
    client = FakeEngine(version=4)
    assert rollout(client, PROMPTS, {}, expected_version=4).policy_versions == [4]
    client.payloads.clear()
    with pytest.raises(ValueError, match=r"version 4\b.*update\(.*version=5"):
        rollout(client, PROMPTS, {}, expected_version=5)
    assert not client.payloads
    client.edit = spoil("policy_version", [5])
    with pytest.raises(ValueError, match=r"reply 0 .*\[5\].* 4\b"):
        rollout(client, [[5]], {}, expected_version=4)
    assert rollout(client, [[5]], {}).policy_versions == [5]


def test_an_aborted_sequence_is_kept_as_far_as_it_got() -> None:
    client = FakeEngine()
    client.edit = spoil("finish_reason", {"type": "abort", "message": "Aborted"})
    result = rollout(client, PROMPTS, {})
    assert result.finish_reasons == ["abort", "abort"]
    assert result.tokens == [[0], [10, 11]]

    def aborted_while_it_waited(reply: Reply) -> None:
        reply["meta_info"]["finish_reason"] = {"type": "abort", "message": "Abort in waiting queue"}
        del reply["meta_info"]["policy_version"]

    client.edit = aborted_while_it_waited
    result = rollout(client, PROMPTS, {})
    assert result.tokens == result.logprobs == result.versions == [[], []]
    assert result.mask_BT.shape == (2, 0)


def test_a_refusal_by_the_engine_is_an_engine_error() -> None:
    client = FakeEngine()
    refusal = {"type": "abort", "status_code": 503, "message": "quarantined: update 4 broke off"}
    client.edit = spoil("finish_reason", refusal)
    with pytest.raises(EngineError, match=r"request 0.*quarantined") as raised:
        rollout(client, PROMPTS, {})
    assert raised.value.status == 503


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

    def control(self, message: dict[str, Any]) -> dict[str, Any]:
        shape = {"decoder_layers": 2, "layers": [0, 1], "experts": 4, "top_k": 2}
        return super().control(message) | {"routed_experts": shape if self.captures else None}

    def generate(self, payload: dict[str, Any]) -> list[Reply]:
        replies = super().generate(payload)
        if payload.get("return_routed_experts"):
            prompts = payload["text"] if "text" in payload else payload["input_ids"]
            for prompt, reply in zip(prompts, replies, strict=True):
                ids = [*map(ord, prompt)] if isinstance(prompt, str) else prompt
                experts = experts_of([*ids, *reply["output_ids"]][:-1]).int()
                encoded = base64.b64encode(experts.numpy().tobytes()).decode()
                reply["meta_info"].setdefault("routed_experts", encoded)
        return replies


def experts_of(tokens: list[int]) -> torch.Tensor:
    """What ``FakeMoE`` routes tokens to, ``[tokens, 2, 2]``."""
    first = torch.tensor(tokens)[:, None] + torch.tensor([0, 1])
    return torch.stack([first % 4, (first + 1) % 4], dim=-1)


def test_routed_experts_are_of_prompt_and_response_but_the_last_token() -> None:
    client = FakeMoE()
    result = rollout(client, PROMPTS, {"n": 2}, routed_experts=True)
    assert client.payloads[0]["return_routed_experts"] is True
    assert result.routed_experts is not None
    for prompt, tokens, experts in zip(
        result.prompt_tokens, result.tokens, result.routed_experts, strict=True
    ):
        assert torch.equal(experts, experts_of([*prompt, *tokens][:-1]).to(torch.uint8))


def test_routed_experts_are_only_asked_for_when_wanted() -> None:
    client = FakeMoE()
    assert rollout(client, PROMPTS, {}).routed_experts is None
    assert "return_routed_experts" not in client.payloads[0]
    client.captures = False
    with pytest.raises(ValueError, match="--enable-return-routed-experts"):
        rollout(client, PROMPTS, {}, routed_experts=True)
    assert len(client.payloads) == 1  # refused before anything was sampled


@pytest.mark.parametrize(
    ("tokens", "message"),
    [(9, "144 bytes.* 2 tokens"), (None, "no routed experts")],
)
def test_experts_of_another_length_or_missing_are_refused(tokens: int | None, message: str) -> None:
    sent = tokens and base64.b64encode(experts_of([1] * tokens).int().numpy().tobytes()).decode()
    client = FakeMoE()
    client.edit = lambda reply: reply["meta_info"].update(routed_experts=sent)
    with pytest.raises(ValueError, match=f"reply 0 .*{message}"):
        rollout(client, PROMPTS, {}, routed_experts=True)


def test_a_response_without_a_token_has_no_experts() -> None:
    def aborted_while_it_waited(reply: Reply) -> None:
        reply["meta_info"]["finish_reason"] = {"type": "abort", "message": "Abort in waiting queue"}
        reply["meta_info"]["routed_experts"] = None
        del reply["meta_info"]["policy_version"]

    client = FakeMoE()
    client.edit = aborted_while_it_waited
    result = rollout(client, PROMPTS, {}, routed_experts=True)
    assert [e.shape for e in result.routed_experts or []] == [(0, 2, 2)] * 2


@contextmanager
def serve(engine: FakeEngine, refuse: str | None = None) -> Iterator[str]:
    """A server on 127.0.0.1 with SGLang's /generate and the plugin's /fp8rl; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer: Any
            if self.path == "/generate" and refuse is not None:
                status, answer = 503, {"detail": refuse}
            else:
                routes = {"/fp8rl": engine.control, "/generate": engine.generate}
                status, answer = 200, routes[self.path](body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(timeout=30)
        server.server_close()


@pytest.mark.timeout(60)
def test_over_http_the_result_is_the_same() -> None:
    sampling = {"n": 2, "temperature": 0.5}
    for prompts in (PROMPTS, ["ab", "c"]):
        with serve(FakeEngine()) as url:
            over_http = rollout(url, prompts, sampling, expected_version=3)
        assert over_http == rollout(FakeEngine(), prompts, sampling)
        with serve(FakeMoE()) as url:
            over_http = rollout(url, prompts, sampling, routed_experts=True)
        here = rollout(FakeMoE(), prompts, sampling, routed_experts=True)
        pairs = zip(over_http.routed_experts or [], here.routed_experts or [], strict=True)
        assert [torch.equal(a, b) for a, b in pairs] == [True] * 4


@pytest.mark.timeout(60)
def test_over_http_a_quarantined_engine_is_an_engine_error() -> None:
    with (
        serve(FakeEngine(), refuse="quarantined: update 4 broke off") as url,
        pytest.raises(EngineError, match="update 4 broke off") as raised,
    ):
        rollout(url, PROMPTS, {})
    assert raised.value.status == 503


@pytest.mark.timeout(120)
def test_importing_the_bridge_loads_no_sglang(tmp_path: Path) -> None:
    list_modules = "print([m for m in sys.modules if m.startswith('sglang')])"
    package = "import sys, trainer_bridge, trainer_bridge.rollout, trainer_bridge.correction; "

    def run(code: str) -> str:
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=100, check=True
        ).stdout.strip()

    assert run(package + list_modules) == "[]"
    # The same look finds a module that did get loaded.
    (tmp_path / "sglang_probe.py").touch()
    probe = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import sglang_probe; "
    assert run(probe + list_modules) == "['sglang_probe']"
