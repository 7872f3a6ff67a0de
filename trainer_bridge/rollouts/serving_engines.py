"""The engines of one rollout: which of them serve, and which prompts each samples."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sgl_fp8rl.protocol.policy import CHECKPOINT, RUN_LENGTH, Policy
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.protocol.values import are_whole
from trainer_bridge.engines.engine_client import (
    EngineClient,
    EngineError,
    call_all,
    check_fields,
    sentence_of,
)
from trainer_bridge.kv.fp8_attention import KVScales, scales_in
from trainer_bridge.rollouts.replies import check_policies
from trainer_bridge.rollouts.routed_experts import ExpertLayout
from trainer_bridge.session.kept import EngineConnection
from trainer_bridge.session.participant import Participant, participants_of

logger = logging.getLogger(__name__)

KV_CLIPPED = 1e-3
"""Share of a layer's K or V that an FP8 KV cache may clip. Measured scales clip nothing, and a
trainer's 99.99th percentile 1e-4; 1e-2 of K, as outliers of one channel make it, spoil a layer."""
CLIPPED_S = 5.0
"""How long a rollout that has its replies waits for that share, say while an update begins."""


@dataclass(frozen=True)
class ServingEngine:
    """An engine that serves what is to be sampled."""

    name: str
    client: EngineClient
    status: dict[str, Any]


def serving_engines(
    engines: Any, expected_version: int | None
) -> tuple[list[ServingEngine], Policy | None]:
    """The engines that serve, and the policy that this process updated them to last.

    Raises:
        ValueError: none of them serves the expected policy.
        EngineError: none can be reached, or what answers is not such an engine.
    """
    members = participants_of(engines)
    committed = _last_commit([member.connection for member in members])

    def asked(member: Participant) -> ServingEngine | ValueError:
        status = member.connection.client.control({"op": "status"}, member.timeout_s)
        _check_for_rollout(status, member.name)
        if len(members) > 1 and status["state"] == State.QUARANTINED.value:
            why = sentence_of(status.get("reason"))
            raise EngineError(f"{member.name} is quarantined: {why}", 503)
        try:
            serves = {(status["run"], status["version"])}
            check_policies(serves, expected_version, committed, member.name)
        except ValueError as error:
            return error
        return ServingEngine(member.name, member.connection.client, status)

    answers = call_all([(m.connection.client, partial(asked, m)) for m in members])
    found = [answer for answer in answers if isinstance(answer, ServingEngine)]
    faults = [answer for answer in answers if isinstance(answer, Exception)]
    if not found:
        raise faults[0]
    for fault in faults:
        logger.warning("a rollout goes on without an engine: %s", fault)
    return found, committed


def _last_commit(connections: Sequence[EngineConnection]) -> Policy | None:
    """The newest policy of the run that this process committed last."""
    known = [(each.committed_at, each.policy) for each in connections if each.policy is not None]
    if not known:
        return None
    _, last = max(known)
    return max(policy for _, policy in known if policy.run == last.run)


def check_status(whose: str, status: dict[str, Any], **more: bool) -> None:
    """Check that a status says what is served.

    Args:
        more: whether other fields are sound.
    """
    run = status.get("run")
    sound = {
        "run": isinstance(run, str) and len(run) <= RUN_LENGTH,
        "version": are_whole([status.get("version")], CHECKPOINT.version),
        "state": status.get("state") in [state.value for state in State],
    }
    check_fields(whose, status, sound | more)


def _check_for_rollout(status: dict[str, Any], where: str) -> None:
    logprobs, clipped = status.get("logprobs"), status.get("kv_clipped")
    more = {
        "logprobs": isinstance(logprobs, dict) and type(logprobs.get("raw")) is bool,
        "routed_experts": ExpertLayout.is_sound(status.get("routed_experts")),
        "kv_clipped": clipped is None or (type(clipped) in (int, float) and 0 <= clipped <= 1),
    }
    check_status(f"rollout: {where}", status, **more)


def caches_of(
    serving: Sequence[ServingEngine],
) -> tuple[float | None, list[KVScales | None] | None]:
    """The largest share of a layer's K or V that an engine's FP8 KV cache clipped so far under the
    scales in force, with a warning where it spoils a layer, and these scales of each engine; None
    where no cache is FP8."""

    def asked(each: ServingEngine) -> tuple[float, KVScales | None]:
        status = each.client.control({"op": "status"}, CLIPPED_S)
        _check_for_rollout(status, each.name)
        scales = None
        try:
            scales = scales_in(each.name, each.client.control({"op": "kv"}, CLIPPED_S))
        except EngineError as error:  # an update has begun
            logger.info("the KV scales of a rollout are not known: %s", error)
        return float(status.get("kv_clipped") or 0.0), scales

    scaled = [each for each in serving if each.status.get("kv_clipped") is not None]
    answers = call_all([(each.client, partial(asked, each)) for each in scaled])
    found = {
        engine.name: answer
        for engine, answer in zip(scaled, answers, strict=True)
        if not isinstance(answer, EngineError)
    }
    most = max((share for share, _ in found.values()), default=None)
    if most is not None and most > KV_CLIPPED:
        logger.warning(
            "rollout: an FP8 KV cache clipped %.2g of a layer's K or V; have the scales measured "
            "again, or send larger ones",
            most,
        )
    scales = [found[each.name][1] if each.name in found else None for each in serving]
    return most, scales if scaled else None


def sample_on(
    serving: Sequence[ServingEngine],
    requests: Sequence[Sequence[dict[str, Any]]],
    timeout: float | None,
) -> list[Any]:
    """Send the requests of each prompt, as many of each, to one engine: it prefills them once.

    Returns:
        the replies in the order of the requests, or an EngineError.
    """
    n = len(requests[0])
    shares = [range(number, len(requests), len(serving)) for number in range(len(serving))]
    calls = [
        (
            engine.client,
            partial(engine.client.sample, [each for i in share for each in requests[i]], timeout),
        )
        for engine, share in zip(serving, shares, strict=True)
        if share
    ]
    replies: list[Any] = [None] * (len(requests) * n)
    for share, answers in zip(shares, call_all(calls), strict=False):
        if isinstance(answers, EngineError):
            answers = [answers] * (len(share) * n)
        for place, index in enumerate(share):
            replies[index * n : (index + 1) * n] = answers[place * n : (place + 1) * n]
    return replies
