"""A hook on SGLang's sampler: plain sampling without passes over the vocabulary besides the draw.

Stock converts logits to probabilities, and these to log-probabilities of all tokens, to keep one
number per row: twenty reads and writes of ``[batch, vocabulary]`` in FP32, here three. The random
numbers are stock's, so the same seed gives the same tokens.
"""

import logging
from collections.abc import Sequence
from dataclasses import fields
from functools import cache, partial
from typing import Any

import torch

from sgl_fp8rl.constants import NAME
from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.layers import lost_rows
from sgl_fp8rl.ops.sample import exponential_noise

logger = logging.getLogger(__name__)


def fast_sample(
    original: Any,
    sampler: Any,
    logits_output: Any,
    sampling_info: Any,
    return_logprob: bool,
    top_logprobs_nums: Sequence[int],
    token_ids_logprobs: Sequence[Any],
    positions: torch.Tensor,
    **more: Any,
) -> Any:
    """AROUND ``Sampler.forward``: draw if only the temperature shapes the distribution, and note
    the rows that have none.

    SGLang handles everything else: greedy rows, top-k, top-p, min-p, deterministic or on-policy
    sampling, sampling masks, watermarks, and log-probabilities of other tokens or before the
    temperature. Like SGLang's own path this does not synchronize.
    """
    of_tokens = top_logprobs_nums, token_ids_logprobs
    given = sampler, logits_output, sampling_info, return_logprob, *of_tokens, positions
    stock = partial(original, *given, **more)
    if compat.get_model_args().quantization != NAME:
        return stock()
    logits_BV = logits_output.next_token_logits
    wanted = return_logprob and (
        compat.RETURN_ORIGINAL_LOGPROB
        or any(number > 0 for number in top_logprobs_nums)
        or any(ids is not None for ids in token_ids_logprobs)
    )
    if more or wanted or not (_is_plain(sampler, sampling_info) and _is_served(logits_BV)):
        if sampling_info.is_all_greedy:
            tokens_B = stock()
            lost_B = lost_rows.lost_of_greedy(logits_BV, tokens_B)
        else:
            lost_B = lost_rows.lost_before_draw(logits_BV, sampling_info.temperatures)
            tokens_B = stock()
        lost_rows.note(logits_output, lost_B)
        return tokens_B
    logits_BV = sampler._preprocess_logits(logits_BV, sampling_info)
    if logits_BV.is_cuda:
        from sgl_fp8rl.ops.sample_triton import sample
    else:
        from sgl_fp8rl.ops.sample import sample
    tokens_B, logprobs_B = sample(
        logits_BV, sampling_info.temperatures, exponential_noise(logits_BV)
    )
    lost_rows.note(logits_output, logprobs_B.isnan())
    if return_logprob:
        logits_output.next_token_logprobs = logprobs_B
    sampler._sync_token_ids_across_tp(tokens_B, sampling_info)
    return tokens_B


@cache
def _knows_all_fields() -> bool:
    """Whether no field of a request's sampling is new: it might shape the distribution."""
    known = compat.SAMPLING_FIELDS.split()
    unknown = {field.name for field in fields(compat.SamplingBatchInfo)}.difference(known)
    if unknown:
        logger.warning(
            "SGLang's own sampler draws: SamplingBatchInfo.%s is new to sgl-fp8rl", min(unknown)
        )
    return not unknown


def _is_plain(sampler: Any, info: Any) -> bool:
    """Whether all requests sample from softmax(logits / T), decided on the host."""
    return (
        _knows_all_fields()
        and type(sampler) is compat.Sampler  # subclasses may draw differently
        and sampler.rl_on_policy_target is None
        and not sampler.enable_deterministic
        and not sampler.use_ascend_backend
        and info.sampling_seed is None
        and not info.is_all_greedy
        and not info.need_top_k_sampling
        and not info.need_top_p_sampling
        and not info.need_min_p_sampling
        and not any(info.return_sampling_masks or ())
    )


def _is_served(logits_BV: torch.Tensor) -> bool:
    return logits_BV.dtype == torch.float32 and logits_BV.stride(-1) == 1 and logits_BV.numel() > 0
