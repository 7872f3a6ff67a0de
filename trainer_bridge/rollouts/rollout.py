"""Sample from the engine, and check that its logprobs are the ones the trainer can recompute.

SGLang's logprob of a sampled token is log_softmax(logits / temperature) over the whole vocabulary,
or log_softmax(logits) where the server was started with SGLANG_RETURN_ORIGINAL_LOGPROB ("raw").
With other sampling options (top-p, penalties, a grammar, ...) that number differs from the
probability the token was sampled with, or from what the trainer's forward pass can compute.
Such a request is refused: its importance weights would be wrong and look healthy.

Shapes: B sequences (prompts times n), T tokens of the longest response.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from sgl_fp8rl.protocol.values import listed, seconds, token_rows, whole
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.rollouts.batch import Rollout
from trainer_bridge.rollouts.replies import ContractError, Sample, lost, read_sample
from trainer_bridge.rollouts.routed_experts import ExpertLayout
from trainer_bridge.rollouts.sampling import read_sampling, seeded
from trainer_bridge.rollouts.serving_engines import caches_of, sample_on, serving_engines

logger = logging.getLogger(__name__)


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
            fine; options that make the logprobs wrong are refused. ``sampling_seed`` (default 42)
            is of the training: with the policy's version, the rank and the number of the call at
            that version it gives each request a seed of its own. With
            ``--enable-deterministic-inference`` the same calls in another process sample the same.
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
    version = max(each.status["version"] for each in serving)
    requests = _requests(prompts, n, seeded(sampling_params, version), routed_experts)
    replies = sample_on(serving, requests, timeout)

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
    clipped, scales = caches_of(serving)
    groups = [number for number in range(len(prompts)) for _ in range(n)]
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
        groups=groups,
        texts=_texts(samples),
        kv_clipped=clipped,
        kv_scales=scales and [scales[number % len(serving)] for number in groups],  # as dealt
    )


def _texts(samples: Sequence[Sample]) -> list[str] | None:
    """None where the engine has no tokenizer."""
    if all(sample.text is None for sample in samples):
        return None
    return [sample.text or "" for sample in samples]


def _requests(
    prompts: Sequence[Any], n: int, sampled_by: Iterator[dict[str, Any]], routed_experts: bool
) -> list[list[dict[str, Any]]]:
    """n requests to SGLang's ``/generate`` for each prompt."""
    requests = []
    for prompt in prompts:
        asked: dict[str, Any] = {"input_ids": prompt, "return_logprob": True}
        if isinstance(prompt, str):
            asked = {"text": prompt, "return_prompt_token_ids": True, "return_logprob": True}
        if routed_experts:
            asked["return_routed_experts"] = True
        requests.append([{**asked, "sampling_params": each} for each in islice(sampled_by, n)])
    return requests


def _read_prompts(prompts: Any) -> list[Any]:
    """Strings, or lists of token ids."""
    rows = listed("rollout: prompts", prompts)
    if not rows:
        raise ValueError("rollout: prompts is empty; pass at least one prompt")
    if all(isinstance(row, str) for row in rows):
        return list(rows)
    return token_rows("rollout: prompts", rows)
