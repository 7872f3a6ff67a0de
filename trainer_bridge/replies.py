"""Read the replies of a rollout, and check each against itself and against what was committed."""

import math
from itertools import pairwise
from typing import Any

from sgl_fp8rl.protocol.policy import CHECKPOINT, Policy
from trainer_bridge.engine_client import EngineError

NO_REPLY: dict[str, Any] = {
    "output_ids": [],
    "prompt_token_ids": [],
    "meta_info": {"finish_reason": {"type": "error"}},
}
"""Stands for the reply to a request that failed."""


def error_of(reply: dict[str, Any] | EngineError, index: int) -> EngineError | None:
    """Why a request failed, if it did."""
    if isinstance(reply, EngineError):
        return reply
    finish = reply["meta_info"]["finish_reason"]
    if finish["type"] != "abort" or finish.get("status_code") is None:
        return None
    return EngineError(
        f"rollout: the engine refused request {index}: {finish.get('message')}",
        int(finish["status_code"]),
    )


def check_policies(
    found: set[tuple[str, int]], expected: int | None, committed: Policy | None, where: str
) -> None:
    """Check what serves, or sampled, against what the caller or this process's updates say.

    The checkpoint belongs to no run; who expects it may have it back.
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


def read_reply(
    reply: dict[str, Any], index: int
) -> tuple[str, list[int], list[float], list[int], list[str]]:
    """Finish reason, tokens, logprobs, versions and runs of a reply, checked against each other."""
    meta, tokens = reply["meta_info"], list(reply["output_ids"])
    reason = meta["finish_reason"]["type"]
    # SGLang's reply to a request that was aborted while it waited (again) has no versions, and
    # tokens of an unknown policy are useless.
    if not tokens or (reason == "abort" and "policy_version" not in meta):
        return reason, [], [], [], []

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
    if not all(logprob is not None and math.isfinite(logprob) for logprob in logprobs):
        raise ValueError(
            f"rollout: reply {index} has a logprob that is not a finite number; "
            f"look for NaN or Inf in the weights that the engine serves"
        )
    return reason, tokens, logprobs, list(versions), _runs_of(runs)


def prompt_tokens(prompt: str | list[int], reply: dict[str, Any], index: int) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    if "prompt_token_ids" not in reply:
        raise ValueError(
            f"rollout: reply {index} lacks the token ids of its prompt; pass prompts as token ids"
        )
    return list(reply["prompt_token_ids"])
