"""Replies of the wrong types: each loses one sample, and a malformed status one engine."""

import math
import pickle
from typing import Any

import pytest

from sgl_fp8rl.protocol.policy import Policy
from tests.trainer_bridge.test_rollout import FakeEngine, FakeMoE, Reply
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.rollouts.rollout import rollout
from trainer_bridge.session.kept import KEPT

PROMPTS = [[5], [6], [7]]
BROKEN = 1
"""The prompt whose reply is broken."""
MISSING = object()


class BrokenEngine(FakeMoE):
    """Answers one prompt of a rollout with something else, or a status."""

    def __init__(self, broken: Any = None, **status: Any) -> None:
        super().__init__()
        self.broken, self.status = broken, status

    def control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        found = super().control(message) | self.status
        return {name: value for name, value in found.items() if value is not MISSING}

    def reply(self, i: int, request: dict[str, Any]) -> Any:
        whole = super().reply(i, request)
        return whole if i != BROKEN else self.broken


def reply_with(path: str, value: Any) -> Any:
    """A sound reply to the broken prompt, but for one part."""
    request = {"input_ids": [6], "return_logprob": True, "return_routed_experts": True}
    reply: Any = FakeMoE().reply(BROKEN, request)
    *parents, name = path.split(".")
    inner = reply
    for parent in parents:
        inner = inner[parent]
    inner[name] = value
    if value is MISSING:
        del inner[name]
    return reply


FINISHES = (
    *(MISSING, None, "stop", {}, {"type": 1}),
    {"type": "abort", "status_code": "many"},
)
ENTRIES = (
    *(5, {"a": 1, "b": 2}, [-0.5, -1.5]),
    *([[-0.5, 10], entry] for entry in ([], [-0.5], ["-1.5", 11])),
)
PARTS: list[tuple[str, Any]] = [
    *(("meta_info", part) for part in (MISSING, [])),
    *(("output_ids", ids) for ids in (MISSING, None, 5, "ab")),
    *(("output_ids", [10, token]) for token in ("11", 11.0, True, -1, 2**63)),
    *(("prompt_token_ids", ids) for ids in (5, [[5]], {"0": 5})),
    *(("meta_info.finish_reason", finish) for finish in FINISHES),
    *(("meta_info.output_token_logprobs", entries) for entries in ENTRIES),
    ("meta_info.policy_version", 3),
    *(("meta_info.policy_version", [3, version]) for version in ("3", None, [3], -2, 2**63)),
    ("meta_info.policy_run", "aa"),
    *(("meta_info.policy_run", ["a", run]) for run in (0, ["a"], "a" * 65)),
    *(("meta_info.routed_experts", experts) for experts in (5, [1, 2])),
]
MALFORMED = [{}, [], None, "a page", 5, *(reply_with(path, value) for path, value in PARTS)]


def check_sentence(error: Exception) -> None:
    text = str(error)
    assert "\n" not in text and 40 < len(text) < 1000, text


def test_parts_of_sglangs_own_types_are_read() -> None:
    """In this process entries are tuples and a status is an ``IntEnum``; parts may be None."""
    reply: Reply = reply_with("meta_info.output_token_logprobs", [(-0.5, 10, None), (-1, 11, "b")])
    reply["meta_info"]["finish_reason"]["status_code"] = None
    reply["meta_info"]["routed_experts"] = reply["prompt_token_ids"] = None
    result = rollout(BrokenEngine(reply), PROMPTS, {})
    assert (result.errors, result.logprobs[BROKEN]) == ({}, [-0.5, -1])


def test_a_refusal_is_quoted_as_far_as_it_is_short() -> None:
    for message in (None, ["why"], "because " * 10_000):
        finish = {"type": "abort", "status_code": 503, "message": message}
        result = rollout(BrokenEngine(reply_with("meta_info.finish_reason", finish)), PROMPTS, {})
        assert result.errors[BROKEN].status == 503
        assert len(str(result.errors[BROKEN])) < 1100


LOGPROBS = (-math.inf, math.nan, None, 10**400, 1e300, -1e300)
"""That no float32 holds."""
BREACHES = [
    *(([[logprob, 10], [-1.5, 11]], "output_token_logprobs") for logprob in LOGPROBS),
    *(
        (part, "output_token_logprobs")
        for part in (MISSING, [[-0.5, 10]], [[-0.5, 10], [-1.5, 12]])
    ),
    *((versions, "policy_version") for versions in (MISSING, [3, 4], [3])),
    *((runs, "policy_run") for runs in (MISSING, ["a", "b"])),
    *((sent, "routed_experts") for sent in (MISSING, "é", "AAAA", "A", "A" * 43 + "=")),
]


@pytest.mark.guarantee("malformed", fault="a reply to a request of the wrong types")
@pytest.mark.guarantee("rollouts", fault="a reply that breaks the logprob contract")
@pytest.mark.parametrize(
    "broken", [*MALFORMED, *(reply_with(f"meta_info.{name}", part) for part, name in BREACHES)]
)
def test_a_broken_reply_loses_one_sample(broken: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = BrokenEngine(broken)
    KEPT.connection_to(engine).policy = Policy("a", 3)
    result = rollout(engine, PROMPTS, {}, expected_version=3, routed_experts=True)
    ((index, error),) = result.errors.items()
    check_sentence(error)
    assert index == BROKEN and f"reply {BROKEN} " in str(error)
    assert "1 of 3 samples failed; sample 1: rollout: reply 1 has" in caplog.text
    copied = pickle.loads(pickle.dumps(error))
    assert str(copied) == str(error) and isinstance(copied, EngineError)
    assert result.is_complete_B.tolist() == [True, False, True]
    assert result.finish_reasons == ["stop", "error", "stop"]
    assert result.tokens == [[0], [], [20, 21, 22]]
    assert result.logprobs[BROKEN] == result.versions[BROKEN] == result.runs[BROKEN] == []
    assert [len(experts) for experts in result.routed_experts or []] == [1, 0, 3]


def test_where_every_reply_breaks_the_contract_the_options_are_wrong() -> None:
    """A ValueError, as long as nothing else failed, and none of the replies is malformed."""
    engine = FakeEngine()
    engine.edit = lambda reply: reply.clear()
    with pytest.raises(EngineError, match="reply 0 ") as raised:
        rollout(engine, PROMPTS, {})
    check_sentence(raised.value)
    engine.edit = lambda reply: reply["meta_info"].pop("policy_version")
    with pytest.raises(ValueError, match=r"reply 0 .*--quantization fp8rl"):
        rollout(engine, PROMPTS, {})
    engine.refused[7] = EngineError("quarantined", 503)
    with pytest.raises(EngineError, match="quarantined") as raised:
        rollout(engine, PROMPTS, {})
    assert not isinstance(raised.value, ValueError)


def test_a_token_without_a_prompt_has_no_experts() -> None:
    engine = FakeMoE()
    engine.edit = lambda reply: reply.update(prompt_token_ids=[])
    result = rollout(engine, ["ab"], {}, routed_experts=True)
    assert result.routed_experts is not None and result.routed_experts[0].shape == (0, 2, 2)


LAYOUT = {"decoder_layers": 2, "layers": [0, 1], "experts": 4, "top_k": 2}
STATUSES: list[dict[str, Any]] = [
    *({name: MISSING} for name in ("run", "version", "logprobs", "state")),
    *({"run": run} for run in (None, 5, ["a"], "a" * 65)),
    *({"version": version} for version in (None, "3", 3.0, True, [3], -2, 2**63)),
    *({"logprobs": logprobs} for logprobs in (None, [], {}, {"raw": None}, {"raw": 1})),
    *({"state": state} for state in (None, 1, "asleep", [])),
    *({"routed_experts": experts} for experts in (5, [], {}, LAYOUT | {"layers": 1})),
    *({"routed_experts": LAYOUT | {"layers": layers}} for layers in ([2], [-1], ["0"], [True])),
    *({"routed_experts": LAYOUT | {name: 0}} for name in ("decoder_layers", "experts", "top_k")),
    {"routed_experts": LAYOUT | {"top_k": 5}},
    {"routed_experts": LAYOUT | {"experts": 2**15 + 1}},
    {"routed_experts": LAYOUT | {"more": 1}},
]


@pytest.mark.guarantee("malformed", fault="a status of the wrong types")
@pytest.mark.parametrize("broken", STATUSES)
def test_a_malformed_status_loses_one_engine(
    broken: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(EngineError) as raised:
        rollout(BrokenEngine(**broken), [[5]], {}, routed_experts=True)
    check_sentence(raised.value)
    (name,) = broken
    assert f"the engine has {'None' if broken[name] is MISSING else ''}" in str(raised.value)
    assert f" as its {name}" in str(raised.value)

    engines = [BrokenEngine(**broken), FakeMoE()]
    assert rollout(engines, PROMPTS, {}, routed_experts=True).errors == {}
    assert not engines[0].requests and len(engines[1].requests) == len(PROMPTS)
    assert "engine 0 has" in caplog.text


def test_a_long_reason_of_quarantine_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    engines = [BrokenEngine(state="quarantined", reason="NaN " * 10_000), FakeEngine()]
    rollout(engines, PROMPTS, {})
    assert "engine 0 is quarantined: NaN" in caplog.text and len(caplog.text) < 2000
