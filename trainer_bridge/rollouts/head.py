"""Logprobs of some tokens, computed in chunks inside of the head: their logits are never all there.

While a model runs, the forward of its head is replaced, so hooks of FSDP2, checkpointing and
adapters below the head do as ever. What the model does with logits (a cap, a factor) is known by
its config, and checked on a constant that the head returns. Where it is something else, and where
the head is no plain linear, all logits are computed at once.

Shapes: B sequences, L tokens of the longest, N tokens that are asked for, C of a chunk, H hidden, V
vocabulary.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

logger = logging.getLogger(__name__)

CHUNK_BYTES = 256 << 20
"""Of a chunk's logits in FP32."""
PROBE = 20.0
"""What the head returns as each token's only logit: what the model makes of it is checked."""
ROUNDING = 2**-6
"""Of BF16, twice. Healthy: 2**-9."""


@dataclass(frozen=True)
class After:
    """What a model does with the logits of its head, by its config."""

    factor: float = 1.0
    cap: float | None = None
    """``cap * tanh(x / cap)``, of Gemma 2."""

    @classmethod
    def of(cls, config: Any) -> "After":
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        factor = getattr(text, "logit_scale", None) or 1.0  # Cohere
        factor /= getattr(text, "logits_scaling", None) or 1.0  # Granite
        return cls(factor, getattr(text, "final_logit_softcapping", None))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """In FP32, in place."""
        logits *= self.factor
        if self.cap is not None:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits

    def back(self, grad: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The gradient of what ``apply`` was given, from that of what it made; in place."""
        if self.cap is not None:
            grad *= 1 - (logits / self.cap).square_()
        return grad.mul_(self.factor)


class _Logprobs(torch.autograd.Function):
    """``log_softmax(after(hidden @ weight^T + bias) / temperature)`` of a token of each row."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        after: After,
        temperature: float,
    ) -> torch.Tensor:
        device = hidden_NH.device.type
        autocast = torch.is_autocast_enabled(device)
        ctx.dtype = torch.get_autocast_dtype(device) if autocast else hidden_NH.dtype
        ctx.after, ctx.temperature = after, temperature
        found_N = hidden_NH.new_empty(len(hidden_NH), dtype=torch.float32)
        sums_N = torch.empty_like(found_N)
        head = weight_VH.to(ctx.dtype), None if bias_V is None else bias_V.to(ctx.dtype)
        for part in _chunks(hidden_NH, weight_VH):
            logits_CV = _logits(hidden_NH[part].to(ctx.dtype), *head, after) / temperature
            most_C1 = logits_CV.amax(1, keepdim=True)
            logits_CV -= most_C1
            own_C = logits_CV.gather(1, targets_N[part, None])[:, 0]
            sum_C = logits_CV.exp_().sum(1).log()
            found_N[part] = own_C - sum_C
            sums_N[part] = most_C1[:, 0] + sum_C
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, sums_N)
        return found_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad_N,) = grads
        hidden_NH, weight_VH, bias_V, targets_N, sums_N = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        head = weight_VH.to(ctx.dtype), None if bias_V is None else bias_V.to(ctx.dtype)
        of_hidden = torch.empty_like(hidden_NH) if wanted[0] else None
        of_weight = weight_VH.new_zeros(weight_VH.shape, dtype=torch.float32) if wanted[1] else None
        of_bias = (
            bias_V.new_zeros(bias_V.shape, dtype=torch.float32)
            if bias_V is not None and wanted[2]
            else None
        )
        for part in _chunks(hidden_NH, weight_VH):
            hidden_CH = hidden_NH[part].to(ctx.dtype)
            logits_CV = _logits(hidden_CH, *head, ctx.after)
            grad_CV = (logits_CV / ctx.temperature - sums_N[part, None]).exp_().neg_()
            ones_C1 = grad_CV.new_ones(len(grad_CV), 1)
            grad_CV.scatter_add_(1, targets_N[part, None], ones_C1)
            grad_CV *= grad_N[part, None] / ctx.temperature
            grad_CV = ctx.after.back(grad_CV, logits_CV)
            if of_bias is not None:
                of_bias += grad_CV.sum(0)
            rounded_CV = grad_CV.to(ctx.dtype)
            if of_hidden is not None:
                of_hidden[part] = rounded_CV @ head[0]
            if of_weight is not None:
                of_weight += rounded_CV.T @ hidden_CH
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight_VH.dtype),
            None if of_bias is None else of_bias.to(bias_V.dtype),
            *[None] * 3,
        )


def _chunks(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> Iterator[slice]:
    size = max(1, CHUNK_BYTES // (4 * len(weight_VH)))
    for begin in range(0, len(hidden_NH), size):
        yield slice(begin, begin + size)


def _logits(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, after: After
) -> torch.Tensor:
    """FP32 or wider, a tensor of its own."""
    with torch.autocast(hidden_CH.device.type, enabled=False):
        logits_CV = functional.linear(hidden_CH, weight_VH, bias_V)
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    return after.apply(logits_CV.to(wide, copy=True))


@dataclass
class Selected:
    """Tokens whose logprobs are asked for, and these once the head ran."""

    head: nn.Linear
    after: After
    shape: torch.Size
    """[B, L] of the tokens that the model is given."""
    rows_N: torch.Tensor
    positions_N: torch.Tensor
    """Of the hidden state that predicts each token."""
    targets_N: torch.Tensor
    temperature: float
    logprobs_N: torch.Tensor | None = None
    """FP32; None where the head ran as it is."""

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Have the head compute the logprobs in the forward pass inside, and return ``PROBE``."""

        def forward(hidden_BLH: torch.Tensor) -> torch.Tensor:
            if hidden_BLH.shape[:-1] != self.shape or isinstance(self.head.weight, DTensor):
                return nn.Linear.forward(self.head, hidden_BLH)
            device = hidden_BLH.device
            rows_N, positions_N, targets_N = (
                each.to(device) for each in (self.rows_N, self.positions_N, self.targets_N)
            )
            found: Any = _Logprobs.apply(  # type: ignore[no-untyped-call]
                hidden_BLH[rows_N, positions_N],
                *(self.head.weight, self.head.bias, targets_N, self.after, self.temperature),
            )
            self.logprobs_N = found
            # connected, so that hooks on the model's output see the backward pass
            return _instead_of(found.sum(), PROBE).to(hidden_BLH.dtype).repeat(*self.shape, 1)

        vars(self.head)["forward"] = forward
        try:
            yield
        finally:
            del vars(self.head)["forward"]

    def found(self, logits: Any) -> torch.Tensor | None:
        """The logprobs, of the model's output; None where it did something else with ``PROBE`` than
        is known, which ends the use of this head."""
        if self.logprobs_N is None or not isinstance(logits, torch.Tensor):
            return None
        wanted = float(self.after.apply(torch.tensor(PROBE)))
        is_known = logits.shape == (*self.shape, 1)
        if is_known and bool(((logits.detach() - wanted).abs() <= ROUNDING * abs(wanted)).all()):
            return self.logprobs_N + _instead_of(logits.sum(), 0.0)
        _unknown.add(self.head)
        logger.warning(
            "response_logprobs: the model does something with the logits of its head that is not "
            "known here, so all logits are in memory at once (logged once a model)"
        )
        return None


def _instead_of(value: torch.Tensor, constant: float) -> torch.Tensor:
    """The constant, FP32, with a gradient of 0 for ``value``, even where that is NaN."""
    return torch.where(value.new_zeros((), dtype=torch.bool), value.float(), constant)


_unknown: "WeakSet[nn.Module]" = WeakSet()


def head_of(model: nn.Module) -> tuple[nn.Linear, After] | None:
    """A plain linear head that no compiled module and no replica runs, and what follows it."""
    for module in model.modules():
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            return None
        find = getattr(module, "get_output_embeddings", None)
        if find is None:
            continue
        head, config = find(), getattr(module, "config", None)
        is_plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
        compiled = (m for m in model.modules() if _is_compiled(m))
        if (
            not is_plain
            or config is None
            or head in _unknown
            or any(m is head for c in compiled for m in c.modules())
        ):
            return None
        return head, After.of(config)
    return None


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
