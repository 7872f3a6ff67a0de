"""Sample from the engine, and check that its logprobs are the ones the trainer can recompute.

SGLang's logprob of a sampled token is log_softmax(logits / temperature) over the whole vocabulary,
or log_softmax(logits) where the server was started with SGLANG_RETURN_ORIGINAL_LOGPROB ("raw").
With other sampling options (top-p, penalties, a grammar, ...) that number differs from the
probability the token was sampled with, or from what the trainer's forward pass can compute.
Such a request is refused: its importance weights would be wrong and look healthy.

Shapes: B sequences (prompts times n), T tokens of the longest response.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from trainer_bridge.engine_client import EngineError
from trainer_bridge.replies import (
    NO_REPLY,
    check_policies,
    error_of,
    prompt_tokens,
    read_reply,
)
from trainer_bridge.routed_experts import ExpertLayout
from trainer_bridge.serving_engines import sample_on, serving_engines

GREEDY_BELOW = 1e-6  # SGLang samples greedily below this temperature, from unscaled logits
SEED = 42
"""SGLang's, of a request that names none."""
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
    """Token ids of each prompt; none for a string whose request failed."""
    tokens: list[list[int]]
    """Sampled token ids, without the prompt."""
    logprobs: list[list[float]]
    """Natural log of each token's sampling probability (greedy: of its softmax probability)."""
    versions: list[list[int]]
    """Policy version that sampled each token, a number within its run; -1 is the checkpoint that
    the engine started from."""
    finish_reasons: list[str]
    """"stop", "length", "abort" (cut short, for instance by an update; its tokens are kept), or
    "error" (the request failed: no tokens)."""
    temperature: float
    """The trainer divides its logits by this before log_softmax (1.0 for greedy sampling)."""
    routed_experts: list[torch.Tensor] | None = None
    """If requested: the MoE experts of each token of prompt and response except the last, uint8 or
    int16 [tokens - 1, layers, experts per token] (``trainer_bridge.routed_experts``)."""
    runs: list[list[str]] = field(default_factory=list)
    """The run of each token's version, as ``update`` named it; empty for the checkpoint."""
    errors: dict[int, EngineError] = field(default_factory=dict)
    """Why requests failed, by the index of the sequence."""

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
        with torch.inference_mode(False):  # it is kept, and a gradient may need it
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
    timeout: float | None = None,
) -> Rollout:
    """Sample ``sampling["n"]`` (default 1) responses to each prompt, with logprobs and versions.

    Args:
        engine: an ``sgl.Engine``, an ``http://`` address, or an ``EngineClient``; or a list of
            them, over which prompts are spread. Engines of a list that cannot be reached or serve
            another policy are left out, with a warning.
        prompts: lists of token ids, or strings for the engine's own tokenizer.
        sampling: SGLang's sampling parameters. Stopping and length options and any temperature are
            fine; options that make the logprobs wrong are refused. ``sampling_seed`` is of a
            prompt's first sample; the next ones count up from it.
        expected_version: the policy version that every token must come from. By default tokens are
            at least as new as the last update that this process made of this engine. In either case
            they must be of that update's run. If it made none, any run and version is accepted.
        routed_experts: whether to return the experts of every token, for ``replay_routing``; the
            engine must run with ``--enable-return-routed-experts``.
        timeout: seconds for all responses; what takes longer fails. None waits for the last.

    Returns:
        The sequences in the order of the prompts, n for each. Each is a request of its own: where
        one fails, or its reply is malformed, the others are kept, and ``errors`` says why.

    Raises:
        ValueError: the request or a reply breaks the logprob contract (see the module), or experts
            are missing or damaged.
        EngineError: the engine cannot be reached, its status is malformed, or every request
            failed; in quarantine the error's ``status`` is 503.
    """
    _check_prompts(prompts)
    n, temperature, sampling_params = _read_sampling(sampling)
    serving, committed = serving_engines(engine, expected_version)
    for each in serving:
        if each.status["logprobs"]["raw"] and temperature != 1.0:
            raise ValueError(
                f"rollout: {each.name} returns raw logprobs but would sample at temperature "
                f"{temperature}; start it without SGLANG_RETURN_ORIGINAL_LOGPROB, or use "
                f"temperature 1"
            )
    expert_layout = ExpertLayout.of(serving[0].status) if routed_experts else None

    if not isinstance(prompts[0], str):
        prompts = [[int(token) for token in prompt] for prompt in prompts]
    # The same as SGLang's own n, which prefills a prompt alone first and fails for all n at once.
    repeated: list[Any] = [prompt for prompt in prompts for _ in range(n)]
    replies = sample_on(serving, _requests(prompts, n, sampling_params, routed_experts), timeout)

    experts: list[torch.Tensor] = []
    result = Rollout([], [], [], [], [], temperature, experts if routed_experts else None)
    for index, (prompt, reply) in enumerate(zip(repeated, replies, strict=True)):
        error = error_of(reply, index)
        if error is not None:
            result.errors[index], reply = error, NO_REPLY
        reason, tokens, logprobs, versions, runs = read_reply(reply, index)
        policies = set(zip(runs, versions, strict=True))
        check_policies(policies, expected_version, committed, f"reply {index}")
        result.prompt_tokens.append(prompt_tokens(prompt, reply, index))
        result.tokens.append(tokens)
        result.logprobs.append(logprobs)
        result.versions.append(versions)
        result.runs.append(runs)
        result.finish_reasons.append(reason)
        if expert_layout is not None:
            count = len(result.prompt_tokens[-1]) + len(tokens) if tokens else 0
            experts.append(expert_layout.read(reply["meta_info"], count, index))
    if len(result.errors) == len(repeated):
        raise result.errors[0]
    return result


def check_sampling(sampling: dict[str, Any]) -> None:
    """Check sampling parameters before there is an engine.

    Raises:
        ValueError: ``rollout`` would refuse them.
    """
    _read_sampling(sampling)


def _requests(
    prompts: Sequence[Any], n: int, sampling_params: dict[str, Any], routed_experts: bool
) -> list[list[dict[str, Any]]]:
    """n requests for each prompt. With ``--enable-deterministic-inference`` a seed decides the
    sample, so each copy of a prompt has another one; else SGLang reads none."""
    base = sampling_params.get("sampling_seed", SEED)
    copies: Counter[Any] = Counter()
    requests = []
    for prompt in prompts:
        key = prompt if isinstance(prompt, str) else tuple(prompt)
        seeds = [base + copies[key] + sample for sample in range(n)]
        copies[key] += n
        requests.append(
            [
                _request(
                    prompt,
                    sampling_params if seed == base else {**sampling_params, "sampling_seed": seed},
                    routed_experts,
                )
                for seed in seeds
            ]
        )
    return requests


def _request(
    prompt: str | Sequence[int], sampling_params: dict[str, Any], routed_experts: bool
) -> dict[str, Any]:
    """The JSON of one request to SGLang's ``/generate``."""
    request: dict[str, Any] = {"sampling_params": sampling_params, "return_logprob": True}
    if routed_experts:
        request["return_routed_experts"] = True
    if isinstance(prompt, str):
        return request | {"text": prompt, "return_prompt_token_ids": True}
    return request | {"input_ids": prompt}


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


def _pad(rows: Sequence[Sequence[Any]], dtype: Any, value: int) -> torch.Tensor:
    """[B, T] of a NumPy dtype; NumPy reads lists four times as fast as torch."""
    padded_BT = np.full((len(rows), max(map(len, rows), default=0)), value, dtype)
    for index, row in enumerate(rows):
        padded_BT[index, : len(row)] = row
    with torch.inference_mode(False):  # as above
        return torch.from_numpy(padded_BT)
