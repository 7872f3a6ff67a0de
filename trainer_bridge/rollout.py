"""Sample from the engine, and check that its logprobs are the ones the trainer can recompute.

SGLang's logprob of a sampled token is log_softmax(logits / temperature) over the whole vocabulary,
or log_softmax(logits) where the server was started with SGLANG_RETURN_ORIGINAL_LOGPROB ("raw").
With other sampling options (top-p, penalties, a grammar, ...) that number differs from the
probability the token was sampled with, or from what the trainer's forward pass can compute.
Such a request is refused: its importance weights would be wrong and look healthy.

Shapes: B sequences (prompts times n), T tokens of the longest response.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from trainer_bridge.engine_client import EngineError, connect
from trainer_bridge.routed_experts import ExpertLayout

GREEDY_BELOW = 1e-6  # SGLang samples greedily below this temperature, from unscaled logits
PAD_VERSION = -2  # padding of versions_BT: -1 is the checkpoint, updates count from 0

# Sampling options that do not change any token's probability.
_HARMLESS = {
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "ignore_eos",
    "no_stop_trim",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "sampling_seed",
}

# Options that do, each with the values that turn it off. The first of them is always sent, because
# a server fills in omitted options from its --preferred-sampling-params.
_SWITCHED_OFF: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (-1, 0),
    "min_p": (0.0,),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_new_tokens": (0,),  # masks the stop tokens until then
    "logit_bias": (None, {}),
    "json_schema": (None, ""),
    "regex": (None, ""),
    "ebnf": (None, ""),
    "structural_tag": (None, ""),
}


@dataclass(frozen=True)
class Rollout:
    """Sampled sequences, one list entry each; the n samples of a prompt are adjacent."""

    prompt_tokens: list[list[int]]
    """Token ids of each prompt."""
    tokens: list[list[int]]
    """Sampled token ids, without the prompt."""
    logprobs: list[list[float]]
    """Natural log of each token's sampling probability (greedy: of its softmax probability)."""
    versions: list[list[int]]
    """Policy version that sampled each token; -1 is the checkpoint the engine started from."""
    finish_reasons: list[str]
    """"stop", "length", or "abort" (cut short, for instance by an update; its tokens are kept)."""
    temperature: float
    """The trainer divides its logits by this before log_softmax (1.0 for greedy sampling)."""
    routed_experts: list[torch.Tensor] | None = None
    """If requested: the MoE experts of each token of prompt and response except the last, uint8 or
    int16 [tokens - 1, layers, experts per token] (``trainer_bridge.routed_experts``)."""

    @cached_property
    def tokens_BT(self) -> torch.Tensor:
        """Token ids, int64 [B, T], padded with 0."""
        return _pad(self.tokens, np.int64, 0)

    @cached_property
    def logprobs_BT(self) -> torch.Tensor:
        """Rollout logprobs, float32 [B, T], padded with 0."""
        return _pad(self.logprobs, np.float32, 0)

    @cached_property
    def versions_BT(self) -> torch.Tensor:
        """Policy versions, int64 [B, T], padded with PAD_VERSION."""
        return _pad(self.versions, np.int64, PAD_VERSION)

    @cached_property
    def mask_BT(self) -> torch.Tensor:
        """True where there is a token, bool [B, T]."""
        lengths_B = [len(row) for row in self.tokens]
        columns_T = torch.arange(max(lengths_B, default=0))
        return columns_T < torch.tensor(lengths_B, dtype=torch.int64)[:, None]

    @property
    def policy_versions(self) -> list[int]:
        """All policy versions that sampled a token here, ascending."""
        return sorted(set().union(*self.versions))

    @property
    def mixed_version_sequences(self) -> list[int]:
        """Indices of the sequences that more than one policy version sampled."""
        return [index for index, row in enumerate(self.versions) if len(set(row)) > 1]


def rollout(
    engine: Any,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    sampling: dict[str, Any],
    *,
    expected_version: int | None = None,
    routed_experts: bool = False,
) -> Rollout:
    """Sample ``sampling["n"]`` (default 1) responses to each prompt, with logprobs and versions.

    Args:
        engine: an ``sgl.Engine``, an ``http://`` address, or an ``EngineClient``.
        prompts: lists of token ids, or strings for the engine's own tokenizer.
        sampling: SGLang's sampling parameters. Stopping and length options and any temperature are
            fine; options that make the logprobs wrong are refused.
        expected_version: the policy version that every token must come from; None accepts any.
        routed_experts: whether to return the experts of every token, for ``replay_routing``; the
            engine must run with ``--enable-return-routed-experts``.

    Returns:
        The sequences in the order of the prompts, n for each.

    Raises:
        ValueError: the request or a reply breaks the logprob contract (see the module), or experts
            are missing or damaged.
        EngineError: the engine refused or failed; in quarantine its ``status`` is 503.
    """
    _check_prompts(prompts)
    n, temperature, sampling_params = _read_sampling(sampling)
    client = connect(engine)
    layout = client.control({"op": "layout"})
    if layout["logprobs"]["raw"] and temperature != 1.0:
        raise ValueError(
            f"rollout: the engine returns raw logprobs but would sample at temperature "
            f"{temperature}; start it without SGLANG_RETURN_ORIGINAL_LOGPROB, or use temperature 1"
        )
    if expected_version is not None and layout["version"] != expected_version:
        raise ValueError(
            f"rollout: the engine serves policy version {layout['version']}, not the expected "
            f"{expected_version}; call update(..., version={expected_version}) first"
        )
    expert_layout = ExpertLayout.of(layout) if routed_experts else None

    # Repeating the prompts samples the same as SGLang's own n, which first prefills the prompts one
    # by one.
    repeated: list[Any] = [prompt for prompt in prompts for _ in range(n)]
    payload: dict[str, Any] = {"sampling_params": sampling_params, "return_logprob": True}
    if expert_layout is not None:
        payload["return_routed_experts"] = True
    if isinstance(prompts[0], str):
        payload |= {"text": repeated, "return_prompt_token_ids": True}
    else:
        payload["input_ids"] = repeated = [[int(token) for token in row] for row in repeated]
    replies = client.generate(payload)
    if len(replies) != len(repeated):
        raise ValueError(
            f"rollout: the engine sent {len(replies)} replies to {len(repeated)} requests; "
            f"check proxies between this trainer and the engine"
        )

    experts: list[torch.Tensor] = []
    result = Rollout([], [], [], [], [], temperature, experts if routed_experts else None)
    for index, (prompt, reply) in enumerate(zip(repeated, replies, strict=True)):
        reason, tokens, logprobs, versions = _read_reply(reply, index)
        if expected_version is not None and set(versions) - {expected_version}:
            raise ValueError(
                f"rollout: reply {index} has tokens of policy versions {sorted(set(versions))}, "
                f"expected only {expected_version}; do not update while this rollout runs, "
                f"or leave expected_version out"
            )
        result.prompt_tokens.append(_prompt_tokens(prompt, reply, index))
        result.tokens.append(tokens)
        result.logprobs.append(logprobs)
        result.versions.append(versions)
        result.finish_reasons.append(reason)
        if expert_layout is not None:
            count = len(result.prompt_tokens[-1]) + len(tokens) if tokens else 0
            experts.append(expert_layout.read(reply["meta_info"], count, index))
    return result


def _check_prompts(prompts: Sequence[str] | Sequence[Sequence[int]]) -> None:
    if isinstance(prompts, str) or not prompts:
        raise ValueError("rollout: prompts is a string or empty; pass a non-empty list of prompts")
    texts = sum(isinstance(prompt, str) for prompt in prompts)
    if texts not in (0, len(prompts)) or not all(isinstance(p, Sequence) for p in prompts):
        raise ValueError(
            "rollout: prompts are neither all strings nor all lists of token ids; pass one kind"
        )


def _read_sampling(sampling: dict[str, Any]) -> tuple[int, float, dict[str, Any]]:
    """Samples per prompt, the temperature of the logprobs, and the parameters to send."""
    given = {name: value for name, value in sampling.items() if value is not None}
    n = given.pop("n", 1)
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"rollout: sampling['n'] = {n!r} is not a positive integer; pass one")
    if n > 1 and "sampling_seed" in given:
        raise ValueError(
            f"rollout: sampling['sampling_seed'] with n = {n} gives {n} copies of one sample; "
            f"leave the seed out, or call rollout once for each seed"
        )
    temperature = given.pop("temperature", 1.0)
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(
            f"rollout: sampling['temperature'] = {temperature!r} is not a temperature; "
            f"pass a finite number, 0 or more"
        )
    for name, off in _SWITCHED_OFF.items():
        if given.pop(name, off[0]) not in off:
            raise ValueError(
                f"rollout: sampling[{name!r}] = {sampling[name]!r} makes the engine's logprobs "
                f"differ from what the trainer computes; leave it out, or set it to {off[0]!r}"
            )
    if unknown := sorted(given.keys() - _HARMLESS):
        raise ValueError(
            f"rollout: sampling has {unknown}, which may change the logprobs; use only n, "
            f"temperature, {', '.join(sorted(_HARMLESS))}"
        )
    off_values = {name: off[0] for name, off in _SWITCHED_OFF.items()}
    sent = {**given, **off_values, "temperature": temperature}
    return n, 1.0 if temperature < GREEDY_BELOW else float(temperature), sent


def _read_reply(reply: dict[str, Any], index: int) -> tuple[str, list[int], list[float], list[int]]:
    """Finish reason, tokens, logprobs and versions of one reply, checked against each other."""
    meta, tokens = reply["meta_info"], list(reply["output_ids"])
    finish = meta["finish_reason"]
    reason = finish["type"]
    if reason == "abort" and finish.get("status_code") is not None:
        raise EngineError(
            f"rollout: the engine refused request {index}: {finish.get('message')}",
            int(finish["status_code"]),
        )
    # SGLang's reply to a request that was aborted while it waited (again) has no versions, and
    # tokens of an unknown policy are useless.
    if not tokens or (reason == "abort" and "policy_version" not in meta):
        return reason, [], [], []

    entries, versions = meta.get("output_token_logprobs"), meta.get("policy_version")
    if entries is None or versions is None:
        missing = "logprobs" if entries is None else "policy versions"
        raise ValueError(
            f"rollout: reply {index} has no {missing}; check that the engine runs with "
            f"--quantization fp8rl and that no proxy drops parts of meta_info"
        )
    if not len(tokens) == len(entries) == len(versions):
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
    return reason, tokens, logprobs, list(versions)


def _prompt_tokens(prompt: str | list[int], reply: dict[str, Any], index: int) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    if "prompt_token_ids" not in reply:
        raise ValueError(
            f"rollout: reply {index} lacks the token ids of its prompt; pass prompts as token ids"
        )
    return list(reply["prompt_token_ids"])


def _pad(rows: Sequence[Sequence[Any]], dtype: Any, value: int) -> torch.Tensor:
    """[B, T] of a NumPy dtype; NumPy reads lists four times as fast as torch."""
    padded_BT = np.full((len(rows), max(map(len, rows), default=0)), value, dtype)
    for index, row in enumerate(rows):
        padded_BT[index, : len(row)] = row
    return torch.from_numpy(padded_BT)
