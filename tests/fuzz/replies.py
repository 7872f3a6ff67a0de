"""What a rollout reads: a status, and the replies of SGLang's /generate."""

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.fuzz.decoder import LONGEST, Decoder, to_json
from trainer_bridge.engines import engine_client
from trainer_bridge.engines.engine_client import EngineError, HTTPEngine
from trainer_bridge.rollouts.replies import ContractError
from trainer_bridge.rollouts.rollout import rollout

SOUND, MUTATED = "http://sound", "http://mutated"
STATUS: dict[str, Any] = {
    "run": "a",
    "version": 3,
    "state": "serving",
    "reason": "",
    "logprobs": {"raw": False},
    "routed_experts": {"decoder_layers": 2, "layers": [1], "experts": 4, "top_k": 2},
    "kv_clipped": 0.25,
}
STATUSES = STATUS, {**STATUS, "state": "quarantined", "reason": "NaN"}
EXPERTS = np.tile(np.array([[0, 0], [2, 1]], np.int32), (3, 1, 1))
"""Of a prompt of two tokens and a response of two; the first layer is dense."""
REPLY: dict[str, Any] = {
    "text": "ab",
    "output_ids": [10, 11],
    "prompt_token_ids": [97, 98],
    "meta_info": {
        "finish_reason": {"type": "length", "length": 2},
        "output_token_logprobs": [[-0.5, 10, None], [-1.5, 11, None]],
        "policy_version": [3, 3],
        "policy_run": ["a", ""],
        "routed_experts": base64.b64encode(EXPERTS.tobytes()).decode(),
    },
}
REFUSED = {"type": "abort", "message": "the engine is quarantined", "status_code": 503}
REPLIES = REPLY, {**REPLY, "meta_info": {"finish_reason": REFUSED}}

Answers = dict[str, list[bytes]]
"""Bodies that a server answers, by the URL."""


def post_all(
    answers: Answers, url: str, messages: Sequence[Any], headers: Any, read: Any, *_: Any
) -> list[Any]:
    bodies = answers[url]
    assert len(bodies) == len(messages)
    return [read((200, body)) for body in bodies]


def decode_status(answers: Answers, data: bytes) -> None:
    answers[f"{MUTATED}/fp8rl"] = [data]
    sample(MUTATED)


def decode_reply(answers: Answers, data: bytes) -> None:
    """Beside a sound one, which is kept."""
    answers[f"{SOUND}/generate"] = [to_json(REPLY), data]
    fault = sample(SOUND)
    if fault is not None and fault.status is None:
        raise fault
    assert fault is None or len(str(fault)) < LONGEST  # a refusal, in the engine's words


def sample(address: str) -> EngineError | None:
    """Sample two sequences, of which the first has a sound reply; why the second has none."""
    engine = HTTPEngine(address, None)
    result = rollout(engine, ["ab", "ab"], {}, routed_experts=True)
    assert result.tokens[0] == REPLY["output_ids"] and 0 not in result.errors
    assert result.tokens_BT.shape == result.logprobs_BT.shape == result.versions_BT.shape
    assert bool(result.logprobs_BT.isfinite().all())
    assert [len(row) for row in result.runs] == [len(row) for row in result.tokens]
    tokens, prompt = result.tokens[1], result.prompt_tokens[1]
    assert result.routed_experts is not None
    rows = len(prompt) + len(tokens) - 1 if tokens else 0
    assert len(result.routed_experts[1]) == rows
    return result.errors.get(1)


@contextmanager
def decoders() -> Iterator[list[Decoder]]:
    answers: Answers = {
        f"{SOUND}/fp8rl": [to_json(STATUS)],
        f"{MUTATED}/generate": [to_json(REPLY)] * 2,
    }
    refused = EngineError, ContractError, ValueError
    status, reply = partial(decode_status, answers), partial(decode_reply, answers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_client, "post_all", partial(post_all, answers))
        yield [
            Decoder("status", STATUSES, status, refused),
            Decoder("generated reply", REPLIES, reply, refused),
        ]
