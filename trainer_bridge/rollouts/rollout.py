"""Sample from the engine, and check that its logprobs are the ones the trainer can recompute.

SGLang's logprob of a sampled token is log_softmax(logits / temperature) over the whole vocabulary,
or log_softmax(logits) where the server was started with SGLANG_RETURN_ORIGINAL_LOGPROB ("raw").
With other sampling options (top-p, penalties, a grammar, ...) that number differs from the
probability the token was sampled with, or from what the trainer's forward pass can compute.
Such a request is refused: its importance weights would be wrong and look healthy.

Shapes: B sequences (prompts times n), T tokens of the longest response.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from sgl_fp8rl.protocol.values import listed, seconds, token_rows, whole
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.rollouts.replies import ContractError, Sample, lost, read_sample
from trainer_bridge.rollouts.routed_experts import ExpertLayout
from trainer_bridge.rollouts.sampling import read_sampling
from trainer_bridge.rollouts.serving_engines import clipped_by, sample_on, serving_engines

logger = logging.getLogger(__name__)

COMPLETE = ("stop", "length")
"""Finish reasons of a response that the engine ended as it was asked to."""
SEED = 42
"""SGLang's, of a request that names none."""
PAD_VERSION = -2  # padding of versions_BT: -1 is the checkpoint, updates count from 0


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
    """"stop", "length" (it has ``max_new_tokens``), "abort" (cut short, for instance by an update;
    its tokens are kept), or "error" (the request failed, or its reply is not to be trained on: no
    tokens)."""
    temperature: float
    """The trainer divides its logits by this before log_softmax (1.0 for greedy sampling)."""
    routed_experts: list[torch.Tensor] | None = None
    """If requested: the MoE experts of each token of prompt and response except the last, uint8 or
    int16 [tokens - 1, layers, experts per token] (``trainer_bridge.rollouts.routed_experts``)."""
    runs: list[list[str]] = field(default_factory=list)
    """The run of each token's version, as ``update`` named it; empty for the checkpoint."""
    errors: dict[int, EngineError] = field(default_factory=dict)
    """Why requests failed, by the index of the sequence."""
    kv_clipped: float | None = None
    """The largest share of a layer's K or V that an engine's FP8 KV cache clipped under the scales
    it has now, asked for after the last reply; None where no cache is FP8."""

    @cached_property
    def is_complete_B(self) -> torch.Tensor:
        """True where a response ended by itself or at ``max_new_tokens``, bool [B]. Leave the other
        rows, which failed or were cut short, out of baseline and loss. Whoever does not train on
        responses of ``max_new_tokens`` either finds them by their finish reason, "length"."""
        return torch.tensor(
            [reason in COMPLETE for reason in self.finish_reasons], dtype=torch.bool
        )

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
    prompts: Sequence[Any] | np.ndarray[Any, Any] | torch.Tensor,
    sampling: Mapping[str, Any],
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
        prompts: the token ids of each, as a list, an array or a tensor of integers, without
            padding; or strings for the engine's own tokenizer.
        sampling: SGLang's sampling parameters. Stopping and length options and any temperature are
            fine; options that make the logprobs wrong are refused. ``sampling_seed`` is of a
            prompt's first sample; the next ones count up from it. An engine with
            ``--enable-deterministic-inference`` samples the same for the same seed and weights, in
            a later call as well: pass another one there for other samples, n away or more.
        expected_version: the policy version that every token must come from. By default tokens are
            at least as new as the last update that this process made of this engine. In either case
            they must be of that update's run. If it made none, any run and version is accepted.
        routed_experts: whether to return the experts of every token, for ``replay_routing``; the
            engine must run with ``--enable-return-routed-experts``.
        timeout: seconds for all responses; what takes longer fails. None waits for the last.

    Returns:
        The sequences in the order of the prompts, n for each. Each is a request of its own: where
        one fails, or its reply is malformed or breaks the logprob contract (see the module), the
        others are kept, and ``errors`` says why.

    Raises:
        ValueError: an argument is wrong, no engine serves the expected policy, experts are not
            captured, or every reply breaks the logprob contract: the engine or its options are
            wrong.
        EngineError: the engine cannot be reached, its status is malformed, or every request
            failed; in quarantine the error's ``status`` is 503.
    """
    prompts = _read_prompts(prompts)
    n, temperature, sampling_params = read_sampling(sampling)
    timeout = seconds("rollout: timeout", timeout)
    if expected_version is not None:
        expected_version = whole("rollout: expected_version", expected_version, least=-1)
    serving, committed = serving_engines(engine, expected_version)
    for each in serving:
        if each.status["logprobs"]["raw"] and temperature != 1.0:
            raise ValueError(
                f"rollout: {each.name} returns raw logprobs but would sample at temperature "
                f"{temperature}; start it without SGLANG_RETURN_ORIGINAL_LOGPROB, or use "
                f"temperature 1"
            )
    layout = ExpertLayout.of(serving[0].status) if routed_experts else None

    # The same as SGLang's own n, which prefills a prompt alone first and fails for all n at once.
    repeated: list[Any] = [prompt for prompt in prompts for _ in range(n)]
    replies = sample_on(serving, _requests(prompts, n, sampling_params, routed_experts), timeout)

    samples: list[Sample] = []
    errors: dict[int, EngineError] = {}
    for index, (prompt, reply) in enumerate(zip(repeated, replies, strict=True)):
        sample = read_sample(reply, prompt, index, expected_version, committed, layout)
        if isinstance(sample, EngineError):
            errors[index], sample = sample, lost(prompt, layout)
        samples.append(sample)
    if len(errors) == len(samples):
        # a ContractError, which is a ValueError, only where it is what all say
        raise min(errors.values(), key=lambda error: isinstance(error, ContractError))
    for index, error in list(errors.items())[:1]:
        logger.warning(
            "rollout: %d of %d samples failed; sample %d: %s",
            *(len(errors), len(samples), index, error),
        )
    return Rollout(
        prompt_tokens=[sample.prompt_tokens for sample in samples],
        tokens=[sample.tokens for sample in samples],
        logprobs=[sample.logprobs for sample in samples],
        versions=[sample.versions for sample in samples],
        finish_reasons=[sample.finish_reason for sample in samples],
        temperature=temperature,
        routed_experts=[sample.experts for sample in samples if sample.experts is not None]
        if layout
        else None,
        runs=[sample.runs for sample in samples],
        errors=errors,
        kv_clipped=clipped_by(serving),
    )


def _requests(
    prompts: Sequence[Any], n: int, sampling_params: dict[str, Any], routed_experts: bool
) -> list[list[dict[str, Any]]]:
    """n requests to SGLang's ``/generate`` for each prompt. With
    ``--enable-deterministic-inference`` a seed decides the sample, so each copy of a prompt has
    another one; else SGLang reads none."""
    base = sampling_params.get("sampling_seed", SEED)
    copies: Counter[Any] = Counter()
    requests = []
    for prompt in prompts:
        asked: dict[str, Any] = {"input_ids": prompt, "return_logprob": True}
        if isinstance(prompt, str):
            asked = {"text": prompt, "return_prompt_token_ids": True, "return_logprob": True}
        if routed_experts:
            asked["return_routed_experts"] = True
        key = prompt if isinstance(prompt, str) else tuple(prompt)
        first = base + copies[key]
        copies[key] += n
        sampled_by = [
            sampling_params if seed == base else {**sampling_params, "sampling_seed": seed}
            for seed in range(first, first + n)
        ]
        requests.append([{**asked, "sampling_params": each} for each in sampled_by])
    return requests


def _read_prompts(prompts: Any) -> list[Any]:
    """Strings, or lists of token ids."""
    rows = listed("rollout: prompts", prompts)
    if not rows:
        raise ValueError("rollout: prompts is empty; pass at least one prompt")
    if all(isinstance(row, str) for row in rows):
        return list(rows)
    return token_rows("rollout: prompts", rows)


def _pad(rows: Sequence[Sequence[Any]], dtype: Any, value: int) -> torch.Tensor:
    """[B, T] of a NumPy dtype; NumPy reads lists four times as fast as torch."""
    padded_BT = np.full((len(rows), max(map(len, rows), default=0)), value, dtype)
    for index, row in enumerate(rows):
        padded_BT[index, : len(row)] = row
    with torch.inference_mode(False):  # as above
        return torch.from_numpy(padded_BT)
