"""Rollout engines on the CPU, healthy ones and ones with a fault: a transformers Qwen3 whose layers
compute block FP8 by the reference, and a sampler that may report the wrong logprobs.

Shapes: B sequences, L prompt tokens, T response tokens, V vocabulary, D head dimension.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sgl_fp8rl.ops.kv import kv_codes
from sgl_fp8rl.ops.reference import (
    FP8_MAX,
    dequantize_activation,
    dequantize_weight,
    quantize_activation,
    quantize_weight,
)

OUTLIER_EVERY = 4  # one in so many of K's channels gets large, with the one that RoPE turns it with
OUTLIER_GAIN = 1000.0  # with QK-norm |k| is about 1 elsewhere, and E4M3 ends at 448


class Fp8Linear(nn.Module):
    """W8A8 block FP8. Codes and scales may be changed until the first forward."""

    def __init__(self, weight_NK: torch.Tensor) -> None:
        super().__init__()
        self.codes_NK, self.scale_inv_nk = quantize_weight(weight_NK)

    @cached_property
    def _weight_NK(self) -> torch.Tensor:
        return dequantize_weight(self.codes_NK, self.scale_inv_nk)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = dequantize_activation(*quantize_activation(x)) @ self._weight_NK.T
        return y.to(x.dtype)


def bf16_engine(model: PreTrainedModel) -> PreTrainedModel:
    """A copy in BF16."""
    return copy.deepcopy(model).to(torch.bfloat16)


def fp8_engine(model: PreTrainedModel) -> PreTrainedModel:
    """A copy in BF16 whose linear layers compute FP8, lm_head aside."""
    engine = bf16_engine(model)
    for name, layer in [*engine.model.named_modules()]:
        if isinstance(layer, nn.Linear):
            parent, _, attribute = name.rpartition(".")
            setattr(engine.model.get_submodule(parent), attribute, Fp8Linear(layer.weight.data))
    return engine


def _fp8_kv_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **options: Any,
) -> Any:
    """SDPA on K and V as an FP8 cache returns them; ``module.kv_scales`` are the layer's two."""
    read = [
        kv_codes(x.transpose(1, 2).flatten(0, 1), scale.expand(x.shape[1])).to(x.dtype)
        * scale.to(x.dtype)
        for x, scale in zip((key, value), module.kv_scales, strict=True)
    ]
    key, value = (
        flat.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)
        for flat, x in zip(read, (key, value), strict=True)
    )
    return sdpa_attention_forward(module, query, key, value, mask, **options)


def _watching_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **options: Any,
) -> Any:
    """SDPA that notes the largest |K| and |V| into ``module.kv_scales``."""
    found = torch.stack([x.float().abs().amax() for x in (key, value)]) / FP8_MAX
    module.kv_scales = torch.maximum(module.kv_scales, found)
    return sdpa_attention_forward(module, query, key, value, mask, **options)


for _name, _function in (("fp8_kv", _fp8_kv_attention), ("watched_kv", _watching_attention)):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, sdpa_mask)


def with_fp8_kv(engine: PreTrainedModel, tokens_BL: torch.Tensor | None) -> PreTrainedModel:
    """Give the engine an FP8 KV cache, in place, with the scales of what ``tokens_BL`` make of K
    and V, or with scales of 1 where there are none."""
    attentions = [layer.self_attn for layer in engine.model.layers]
    for attention in attentions:
        attention.kv_scales = torch.ones(2) if tokens_BL is None else torch.zeros(2)
    if tokens_BL is not None:
        engine.set_attn_implementation("watched_kv")
        with torch.no_grad():
            engine(tokens_BL)
    engine.set_attn_implementation("fp8_kv")
    return engine


def plant_outliers(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that computes the same (but for rounding) with K beyond E4M3's range: what K's norm
    gains on some pairs of RoPE's channels, Q's norm loses."""
    planted = copy.deepcopy(model)
    for layer in planted.model.layers:
        attention = layer.self_attn
        for norm, gain in ((attention.k_norm, OUTLIER_GAIN), (attention.q_norm, 1 / OUTLIER_GAIN)):
            norm.weight.data.view(2, -1)[:, ::OUTLIER_EVERY] *= gain
    return planted


def spoil_scales(
    engine: PreTrainedModel, spoil: Callable[[torch.Tensor], torch.Tensor]
) -> PreTrainedModel:
    """Change the scales of one matrix of an FP8 engine, in place."""
    layer = engine.model.layers[1].mlp.down_proj
    layer.scale_inv_nk = spoil(layer.scale_inv_nk)
    return engine


@dataclass(frozen=True)
class Sampled:
    """Responses, and the logprobs that an engine may report for their tokens."""

    tokens_BT: torch.Tensor
    mask_BT: torch.Tensor
    processed_BT: torch.Tensor
    """log_softmax(logits / temperature), the contract."""
    raw_BT: torch.Tensor
    """log_softmax(logits)."""
    renormalised_BT: torch.Tensor
    """Log of the probability that the token was sampled with, after top-p."""


@torch.no_grad()
def sample(
    engine: PreTrainedModel,
    prompts_BL: torch.Tensor,
    length: int,
    generator: torch.Generator,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    end: int | None = None,
) -> Sampled:
    """Sample ``length`` tokens to each prompt, or until ``end``. Temperature 0 is greedy."""
    tokens_B1, cache, columns = prompts_BL, None, []
    alive_B = torch.ones(len(prompts_BL), dtype=torch.bool)
    for _ in range(length):
        out = engine(tokens_B1, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits_BV = out.past_key_values, out.logits[:, -1].float()
        raw_BV = logits_BV.log_softmax(1)
        processed_BV = (logits_BV / temperature).log_softmax(1) if temperature else raw_BV
        kept_BV = _nucleus(processed_BV, top_p)
        if temperature:
            tokens_B1 = kept_BV.exp().multinomial(1, generator=generator)
        else:
            tokens_B1 = logits_BV.argmax(1, keepdim=True)
        picked = [x_BV.gather(1, tokens_B1)[:, 0] for x_BV in (processed_BV, raw_BV, kept_BV)]
        columns.append((tokens_B1[:, 0], alive_B, *picked))
        if end is not None:
            alive_B = alive_B & (tokens_B1[:, 0] != end)
    return Sampled(*(torch.stack(column, 1) for column in zip(*columns, strict=True)))


def _nucleus(logprobs_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Log of the distribution that is left of the most probable tokens that reach ``top_p``."""
    if top_p == 1.0:
        return logprobs_BV
    ordered_BV, order_BV = logprobs_BV.sort(1, descending=True)
    before_BV = ordered_BV.exp().cumsum(1) - ordered_BV.exp()
    ordered_BV = ordered_BV.masked_fill(before_BV >= top_p, -torch.inf).log_softmax(1)
    return torch.empty_like(ordered_BV).scatter_(1, order_BV, ordered_BV)


@torch.no_grad()
def trainer_logprobs(
    model: PreTrainedModel, prompts_BL: torch.Tensor, tokens_BT: torch.Tensor, temperature: float
) -> torch.Tensor:
    """FP32 [B, T]: log_softmax(logits / temperature) of each response token."""
    return logprobs_of(model, prompts_BL, tokens_BT, temperature)


def logprobs_of(
    model: PreTrainedModel, prompts_BL: torch.Tensor, tokens_BT: torch.Tensor, temperature: float
) -> torch.Tensor:
    """The same, with a gradient."""
    whole_BL = torch.cat([prompts_BL, tokens_BT], 1)[:, :-1]
    logits_BTV = model(whole_BL, use_cache=False).logits[:, prompts_BL.shape[1] - 1 :].float()
    logprobs_BTV = F.log_softmax(logits_BTV / temperature, dim=-1)
    return logprobs_BTV.gather(2, tokens_BT[..., None])[..., 0]
