"""Logprobs and entropies of some tokens from their hidden states, computed in chunks of tokens, in
the backward pass again.

Shapes: B sequences, L tokens of the longest, N tokens that are asked for, C of a chunk, H hidden, V
vocabulary, R rows of the weight.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

CHUNK_BYTES = 256 << 20
"""Of a chunk's logits in FP32."""
ROWS = 1 << 14
"""Of the weight, whose product of a chunk is in memory before it is summed in FP32."""
FACTORS = "logit_scale", "lm_head_multiplier", "output_multiplier"
"""Options of Cohere, Falcon-H1 and Muse."""


@dataclass(frozen=True)
class Asked:
    """Response tokens of a batch, and what is wanted of them."""

    index_N: torch.Tensor
    """Of the logits that predict each token, of B * L."""
    targets_N: torch.Tensor
    temperature: float
    entropy: bool

    def on(self, device: torch.device) -> "Asked":
        """With its indices there."""
        index_N, targets_N = self.index_N.to(device), self.targets_N.to(device)
        return replace(self, index_N=index_N, targets_N=targets_N)


Found = list[torch.Tensor]
"""Logprobs, and entropies where they are asked for, FP32 [N]."""


@dataclass(frozen=True)
class After:
    """What a model does with the logits of its head, by its config."""

    factor: float = 1.0
    cap: float | None = None
    """``cap * tanh(x / cap)``, of Gemma 2."""

    @classmethod
    def of(cls, config: Any) -> "After":
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        factor = prod(getattr(text, name, None) or 1.0 for name in FACTORS)
        factor /= getattr(text, "logits_scaling", None) or 1.0  # Granite
        return cls(factor, getattr(text, "final_logit_softcapping", None))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """In place."""
        logits *= self.factor
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)


@dataclass(frozen=True)
class _Chunk:
    """Some of the tokens. A method has two or three tensors [C, V] at once."""

    hidden_CH: torch.Tensor
    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None
    targets_C1: torch.Tensor
    after: After
    temperature: float

    def logits(self) -> torch.Tensor:
        """Over the temperature, FP32 or wider."""
        logits_CV = functional.linear(self.hidden_CH, self.weight_VH, self.bias_V)
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        return self.after.apply(logits_CV).div_(self.temperature)

    def scores(self, entropy: bool) -> torch.Tensor:
        """[4, C]: logprobs, entropies, and the largest logit and the log of the sum of powers,
        apart, as rounding asks for."""
        logits_CV = self.logits()
        most_C1 = logits_CV.amax(1, keepdim=True)
        own_C1 = logits_CV.sub_(most_C1).gather(1, self.targets_C1)
        powers_CV = logits_CV.exp() if entropy else logits_CV.exp_()
        sum_C1 = powers_CV.sum(1, keepdim=True)
        log_C1 = entropy_C1 = sum_C1.log()
        if entropy:
            entropy_C1 = log_C1 - logits_CV.mul_(powers_CV).sum(1, keepdim=True) / sum_C1
        return torch.cat([own_C1 - log_C1, entropy_C1, most_C1, log_C1], 1).T

    def gradient(
        self, scores_4C: torch.Tensor, own_C: torch.Tensor, of_entropy_C: torch.Tensor | None
    ) -> torch.Tensor:
        """Of the head's logits, from those of logprobs and entropies."""
        _, entropy_C1, most_C1, log_C1 = scores_4C[..., None]
        logits_CV = self.logits()
        slope_CV = None
        if self.after.cap is not None:
            slope_CV = logits_CV * (self.temperature / self.after.cap)
            slope_CV.square_().neg_().add_(1)
        logits_CV.sub_(most_C1).sub_(log_C1)
        own_C1 = own_C[:, None].to(logits_CV)
        if of_entropy_C is None:
            grad_CV = logits_CV.exp_().mul_(-own_C1)
        else:
            grad_CV = logits_CV.exp()
            factor_CV = logits_CV.add_(entropy_C1).mul_(of_entropy_C[:, None]).add_(own_C1)
            grad_CV.mul_(factor_CV).neg_()
        grad_CV.scatter_add_(1, self.targets_C1, own_C1)
        grad_CV *= self.after.factor / self.temperature
        return (grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)).to(self.hidden_CH.dtype)


class Scores(torch.autograd.Function):
    """``Found``, of ``after(hidden @ weight^T + bias) / temperature``."""

    @staticmethod
    def forward(ctx: Any, after: After, asked: Asked, *inputs: Any) -> tuple[torch.Tensor, ...]:
        ctx.after, ctx.asked, ctx.dtype = after, asked, logits_dtype(inputs[0])
        parts = [chunk.scores(asked.entropy) for _, chunk in _chunks(ctx, *inputs)]
        wide = torch.promote_types(ctx.dtype, torch.float32)
        scores_4N = torch.cat([inputs[0].new_zeros(4, 0, dtype=wide), *parts], 1)
        ctx.save_for_backward(*inputs, scores_4N)
        return tuple(scores_4N[: 2 if asked.entropy else 1].float())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, own_N: torch.Tensor, of_entropy_N: torch.Tensor | None = None) -> Any:
        *inputs, scores_4N = ctx.saved_tensors
        dtypes = inputs[0].dtype, scores_4N.dtype, scores_4N.dtype  # the head's are FP32 sums
        of_hidden, of_weight, of_bias = (
            torch.zeros(x.shape, dtype=dtype, device=x.device) if wanted else None
            for x, wanted, dtype in zip(inputs, ctx.needs_input_grad[2:], dtypes, strict=True)
        )
        for part, chunk in _chunks(ctx, *inputs):
            of_entropy_C = None if of_entropy_N is None else of_entropy_N[part]
            grad_CV = chunk.gradient(scores_4N[:, part], own_N[part], of_entropy_C)
            if of_hidden is not None:
                of_part = (grad_CV @ chunk.weight_VH).to(of_hidden.dtype)
                of_hidden.flatten(0, 1)[ctx.asked.index_N[part]] = of_part
            if of_weight is not None:
                parts = zip(of_weight.split(ROWS), grad_CV.split(ROWS, 1), strict=True)
                for sum_RH, grad_CR in parts:
                    sum_RH += grad_CR.T @ chunk.hidden_CH
            if of_bias is not None:
                of_bias += grad_CV.sum(0, dtype=of_bias.dtype)
            del grad_CV
        of_head = (None if x is None else x.to(inputs[1].dtype) for x in (of_weight, of_bias))
        return None, None, of_hidden, *of_head


def _chunks(
    ctx: Any, hidden_BLH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None
) -> Iterator[tuple[slice, _Chunk]]:
    asked = ctx.asked
    weight_VH, bias_V = weight_VH.to(ctx.dtype), None if bias_V is None else bias_V.to(ctx.dtype)
    size = max(1, CHUNK_BYTES // (4 * len(weight_VH)))
    for begin in range(0, len(asked.index_N), size):
        part = slice(begin, begin + size)
        hidden_CH = hidden_BLH.flatten(0, 1)[asked.index_N[part]].to(ctx.dtype)
        targets_C1 = asked.targets_N[part, None]
        yield part, _Chunk(hidden_CH, weight_VH, bias_V, targets_C1, ctx.after, asked.temperature)


def logits_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Of a linear layer's output, as autocast has it."""
    return functional.linear(hidden.new_empty(0, 1), hidden.new_empty(1, 1)).dtype
