"""Read the replies of a rollout, and check each against itself and against what was committed.

A reply of other types than SGLang's loses its own sample, as a refused request does, and so does
one that breaks the logprob contract (no versions, logprobs of other tokens, tokens of another
policy). Where each reply breaks it, the engine or its options are wrong.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch

from sgl_fp8rl.protocol.policy import CHECKPOINT, RUN_LENGTH, Policy
from sgl_fp8rl.protocol.values import are_whole, excerpt
from trainer_bridge.engines.engine_client import EngineError, sentence_of
from trainer_bridge.rollouts.routed_experts import ExpertLayout

LARGEST_LOGPROB = torch.finfo(torch.float32).max
"""Of either sign; ``Rollout.logprobs_BT`` holds float32."""


class ContractError(EngineError, ValueError):
    """A reply breaks the logprob contract."""


class Sample(NamedTuple):
    """One response, as ``Rollout`` has it."""

    prompt_tokens: list[int]
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    runs: list[str]
    finish_reason: str
    experts: torch.Tensor | None
    text: str | None


def read_sample(
    reply: Any,
    prompt: str | list[int],
    index: int,
    expected_version: int | None,
    committed: Policy | None,
    layout: ExpertLayout | None,
) -> Sample | EngineError:
    """The sample of a reply, or why there is none."""
    error = error_of(reply, index)
    if error is not None:
        return error
    try:
        tokens, logprobs, versions, runs = _of_tokens(reply, index)
        policies = set(zip(runs, versions, strict=True))
        check_policies(policies, expected_version, committed, f"reply {index}")
        if isinstance(prompt, str):
            if reply.get("prompt_token_ids") is None:
                raise ValueError(
                    f"rollout: reply {index} lacks the token ids of its prompt; pass prompts as "
                    f"token ids"
                )
            prompt = list(reply["prompt_token_ids"])
        experts = None
        if layout is not None:
            count = len(prompt) + len(tokens) if tokens else 0
            experts = layout.read(reply["meta_info"], count, index)
    except ValueError as broken:
        return ContractError(str(broken))
    reason = reply["meta_info"]["finish_reason"]["type"]
    text = reply.get("text")
    text = text if isinstance(text, str) else None
    return Sample(prompt, tokens, logprobs, versions, runs, reason, experts, text)


def lost(prompt: str | list[int], layout: ExpertLayout | None) -> Sample:
    """Stands for a sample that there is none of."""
    known = [] if isinstance(prompt, str) else prompt
    experts = None if layout is None else layout.read({}, 0, 0)
    return Sample(known, [], [], [], [], "error", experts, None)


def error_of(reply: Any, index: int) -> EngineError | None:
    """Why a request failed, if it did: it got no reply, was refused, or its reply is malformed."""
    if isinstance(reply, EngineError):
        return reply
    meta: Any = reply.get("meta_info") if isinstance(reply, dict) else None
    finish: Any = meta.get("finish_reason") if isinstance(meta, dict) else None
    if not _is_finish(finish):
        return _malformed(index, "finish_reason", finish)
    if finish["type"] == "abort" and finish.get("status_code") is not None:
        why = sentence_of(finish.get("message"))
        return EngineError(
            f"rollout: the engine refused request {index}: {why}", int(finish["status_code"])
        )
    # what is missing here is missed where it is needed
    runs, experts = meta.get("policy_run"), meta.get("routed_experts")
    prompt, versions = reply.get("prompt_token_ids"), meta.get("policy_version")
    entries = meta.get("output_token_logprobs")
    sound = {
        "output_ids": are_whole(reply.get("output_ids"), 0),
        "prompt_token_ids": prompt is None or are_whole(prompt, 0),
        "output_token_logprobs": entries is None or _are_entries(entries),
        "policy_version": versions is None or are_whole(versions, CHECKPOINT.version),
        "policy_run": runs is None or _are_runs(runs),
        "routed_experts": experts is None or isinstance(experts, str),
    }
    for name in [name for name, is_sound in sound.items() if not is_sound]:
        return _malformed(index, name, reply.get(name, meta.get(name)))
    return None


def _malformed(index: int, name: str, value: Any) -> EngineError:
    return EngineError(
        f"rollout: reply {index} has {excerpt(value)} as its {name}; see that SGLang's /generate "
        f"answers there, and report it with the engine's version if it does"
    )


def _is_finish(finish: Any) -> bool:
    return (
        isinstance(finish, dict)
        and isinstance(finish.get("type"), str)
        and isinstance(finish.get("status_code"), int | None)
    )


def _are_entries(value: Any) -> bool:
    """Whether these are (logprob, token, ...) of tokens: lists, or an ``sgl.Engine``'s tuples."""
    return (
        isinstance(value, list)
        and set(map(type, value)) <= {list, tuple}
        and min(map(len, value), default=2) >= 2
        and {type(entry[0]) for entry in value} <= {float, int, type(None)}
    )


def _are_runs(value: Any) -> bool:
    return (
        isinstance(value, list)
        and set(map(type, value)) <= {str}
        and max(map(len, value), default=0) <= RUN_LENGTH
    )


def check_policies(
    found: set[tuple[str, int]], expected: int | None, committed: Policy | None, where: str
) -> None:
    """Check policies that serve or sampled against the caller's version and this process's updates.

    The checkpoint belongs to no run; a caller that expects its version is given it.
    """
    for run, version in sorted(found):
        policy = Policy(run, version) if run else f"version {version}"
        if expected is not None and version != expected:
            raise ValueError(
                f"rollout: {where} has {policy}, not the expected version {expected}; update the "
                f"engine to it first, and not while a rollout runs"
            )
        if committed is None or (expected is not None and (run, version) == CHECKPOINT):
            continue
        if run != committed.run or (expected is None and version < committed.version):
            raise ValueError(
                f"rollout: {where} has {policy}, but this process updated the engine to "
                f"{committed}: it was started again, or another trainer updates it; call update, "
                f"or trainer_bridge.close(engine) to sample what it serves"
            )


def _runs_of(entries: list[str]) -> list[str]:
    """The run of each token: an empty entry stands for that of the token before."""
    runs = [""] * len(entries)
    starts = [index for index, entry in enumerate(entries) if entry]
    for start, stop in pairwise([*starts, len(entries)]):
        runs[start:stop] = [entries[start]] * (stop - start)
    return runs


def _of_tokens(
    reply: dict[str, Any], index: int
) -> tuple[list[int], list[float], list[int], list[str]]:
    """Tokens, logprobs, versions and runs of a reply, checked against each other."""
    meta, tokens = reply["meta_info"], list(reply["output_ids"])
    aborted = meta["finish_reason"]["type"] == "abort"
    # SGLang's reply to a request that was aborted while it waited (again) has no versions, and
    # tokens of an unknown policy are useless.
    if not tokens or (aborted and "policy_version" not in meta):
        return [], [], [], []

    entries, versions = meta.get("output_token_logprobs"), meta.get("policy_version")
    runs = meta.get("policy_run")
    if entries is None or versions is None or runs is None:
        missing = "logprobs" if entries is None else "policy versions"
        raise ValueError(
            f"rollout: reply {index} has no {missing}; check that the engine runs with "
            f"--quantization fp8rl and that no proxy drops parts of meta_info"
        )
    if not len(tokens) == len(entries) == len(versions) == len(runs):
        raise ValueError(
            f"rollout: reply {index} has {len(tokens)} tokens but {len(entries)} logprobs and "
            f"{len(versions)} policy versions; do not train on it, and report it with the engine's "
            f"version and options"
        )
    logprobs = [entry[0] for entry in entries]
    if tokens != [entry[1] for entry in entries]:
        raise ValueError(
            f"rollout: reply {index} has logprobs of tokens that it does not return; do not train "
            f"on it, and report it with the engine's version and options"
        )
    if not all(p is not None and abs(p) <= LARGEST_LOGPROB for p in logprobs):
        raise ValueError(
            f"rollout: reply {index} has a logprob that is not a finite number; "
            f"look for NaN or Inf in the weights that the engine serves"
        )
    return tokens, logprobs, list(versions), _runs_of(runs)
