"""Layers of a trainer that compute as the engine's FP8 layers do, with gradients.

The forward is the engine's: codes of the weight times codes of the activations. The gradient of the
weight passes straight through the quantization: it is that of a BF16 layer. The gradient of the
input is computed with the weight that the codes stand for.

Shape suffixes: M tokens, T experts of a token, R = M * T rows sorted by expert, E experts, H
hidden, N output features, K input features.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sgl_fp8rl.formats import QUANTIZED
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.ops import block_linear
from sgl_fp8rl.ops.reference import BLOCK
from trainer_bridge.fp8.fp8_weights import FP8Parameter

_USUAL_GATE = "_default_apply_gate"
"""What transformers calls ``act_fn(gate) * up``, of experts that define no other."""


class FP8Module(nn.Module):
    """A module some of whose parameters have codes."""

    fp8_parameters: dict[str, FP8Parameter]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        found = self.__dict__.get("fp8_parameters", {}).get(name)
        if found is not None:  # FSDP2 shards a parameter, has gathered it, or freed it again
            found.registered(value)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, parameter in self.fp8_parameters.items():
            parameter.moved(getattr(self, name))
        return self

    def _multiply(
        self,
        name: str,
        x_MK: torch.Tensor,
        bias: torch.Tensor | None = None,
        counts: list[int] | None = None,
    ) -> torch.Tensor:
        """By a weight; where there are counts, each expert's rows by its own."""
        weight, parameter = getattr(self, name), self.fp8_parameters[name]
        if isinstance(weight, DTensor):
            raise ValueError(
                f"{parameter.name} is sharded, and a forward needs all of its rows; call the "
                f"module that fully_shard wrapped, or its unshard() first"
            )
        with torch.autocast(x_MK.device.type, enabled=False):
            y_MN: torch.Tensor = _Product.apply(  # type: ignore[no-untyped-call]
                x_MK, weight, bias, parameter, counts
            )
        return y_MN


class FP8Linear(FP8Module, nn.Linear):
    """``nn.Linear`` with the forward of an FP8 layer."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = _as_autocast(input)
        y_MN = self._multiply("weight", x.reshape(-1, x.shape[-1]).contiguous(), self.bias)
        return y_MN.view(*x.shape[:-1], y_MN.shape[-1])


class FP8Experts(FP8Module):
    """The forward of experts that transformers keeps as 3-D parameters with [gate; up] rows."""

    gate_up_proj: nn.Parameter
    act_fn: Callable[[torch.Tensor], torch.Tensor]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """The weighted sum of each token's experts, taken in FP32: ``[M, H]``."""
        x_MH, ids_R = _as_autocast(hidden_states), top_k_index.flatten()
        order_R = ids_R.argsort(stable=True)
        tokens_R = order_R // top_k_index.shape[-1]
        counts = torch.bincount(ids_R, minlength=len(self.gate_up_proj)).tolist()
        gate_up = self._multiply("gate_up_proj", x_MH[tokens_R], counts=counts)
        gate, up = gate_up.chunk(2, dim=-1)
        down_RH = self._multiply("down_proj", self.act_fn(gate) * up, counts=counts)
        weighted_RH = down_RH.float() * top_k_weights.flatten()[order_R].float().unsqueeze(-1)
        out_MH = torch.zeros_like(x_MH, dtype=torch.float32).index_add(0, tokens_R, weighted_RH)
        return out_MH.to(hidden_states.dtype)


def convert(
    module: nn.Module, name: str, dtype: torch.dtype, format_: WeightFormat = QUANTIZED
) -> None:
    """Have a module compute as an FP8 layer; parameters, hooks and names stay."""
    check_kind(module, name)
    names: tuple[str, ...] = ("weight",)
    fp8_class: type = FP8Linear
    if is_experts(module):
        names = "gate_up_proj", "down_proj"
        fp8_class = _experts_class(type(module))  # type: ignore[arg-type]
    module.fp8_parameters = {  # type: ignore[assignment]
        each: FP8Parameter(f"{name}.{each}", dtype, format_) for each in names
    }
    module.__class__ = fp8_class


def check_kind(module: nn.Module, name: str) -> None:
    """Check that a module can be converted.

    Raises:
        ValueError: it is neither ``nn.Linear`` nor experts as transformers keeps them, or is
            sharded or converted already, or not whole blocks.
    """
    if isinstance(module, FP8Module):
        raise ValueError(f"{name} computes with codes already; call fp8_forward once")
    if is_experts(module):
        check_experts(module, name)
    elif type(module) is not nn.Linear and not isinstance(module, FSDPModule):
        raise ValueError(
            f"{name} is a {type(module).__name__}, whose forward fp8_forward does not know; it "
            f"computes nn.Linear and experts of transformers, before anything wraps them"
        )
    if any(isinstance(each, DTensor) for each in module.parameters(recurse=False)):
        raise ValueError(
            f"{name} is sharded already; call fp8_forward before fully_shard, and without tensor "
            f"parallelism"
        )
    weights = ((n, p) for n, p in module.named_parameters(recurse=False) if p.dim() > 1)
    for attribute, weight in weights:
        # gate and up are stacked, and begin with a block each
        rows, cols = weight.shape[-2] // (1 + attribute.startswith("gate_up")), weight.shape[-1]
        if rows % BLOCK or cols % BLOCK:
            raise ValueError(
                f"{name} has a weight of {rows}x{cols}, which is not whole blocks of {BLOCK}; "
                f"start the engine with --fp8rl-ragged bf16, or ignore the layer"
            )


@cache
def _experts_class(kind: type) -> type:
    return type(f"FP8{kind.__name__}", (FP8Experts, kind), {})


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the experts of a layer as 3-D parameters."""
    weight = getattr(module, "gate_up_proj", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 3


def check_experts(module: nn.Module, name: str) -> None:
    """Check that experts are stored and gated as ``FP8Experts`` computes them."""
    # transformers marks unusual memory layouts of experts modules
    usual = getattr(module, "is_concatenated", True) and not getattr(module, "is_transposed", False)
    if not usual or getattr(module, "has_bias", False):
        raise ValueError(
            f"{name} stores its experts interleaved, transposed or with a bias, which cannot be "
            f"computed in FP8 here; only experts with [gate; up] rows can"
        )
    gate = getattr(type(module), "_apply_gate", None)
    if not hasattr(module, "act_fn") or getattr(gate, "__name__", _USUAL_GATE) != _USUAL_GATE:
        raise ValueError(
            f"{name} has a gate of its own, which cannot be computed in FP8 here; only experts "
            f"that multiply act_fn(gate) by up can"
        )


def _as_autocast(x: torch.Tensor) -> torch.Tensor:
    """As ``F.linear`` takes its input under autocast."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class _Product(torch.autograd.Function):
    """``x @ weight.T + bias``; where there are counts, ``x @ weight.T`` of each expert's rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        parameter: FP8Parameter,
        counts: list[int] | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x_MK if ctx.needs_input_grad[1] else None, weight)
        ctx.parameter, ctx.counts = parameter, counts
        ctx.bias_dtype = None if bias is None else bias.dtype
        rounded = None if bias is None else bias.to(parameter.dtype)  # as the engine holds it
        codes, power_of_two = parameter.codes(weight), parameter.format.power_of_two_scales
        try:
            if counts is None:
                return block_linear.linear(x_MK, *codes, rounded, power_of_two=power_of_two)
            return block_linear.linear_by_expert(x_MK, counts, *codes, power_of_two=power_of_two)
        except ValueError as error:  # it refuses the activations
            raise ValueError(f"{parameter.name}, in a forward: {error}") from error

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: torch.Tensor) -> Any:
        x_MK, weight = ctx.saved_tensors
        dx_MK = dweight = dbias = None
        dy_MN = dy_MN.contiguous()
        with torch.autocast(dy_MN.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                codes = ctx.parameter.codes(weight)
                if ctx.counts is None:
                    dx_MK = block_linear.input_gradient(dy_MN, *codes)
                else:
                    dx_MK = block_linear.input_gradient_by_expert(dy_MN, ctx.counts, *codes)
            if ctx.needs_input_grad[1]:
                if ctx.counts is None:
                    dweight = dy_MN.t() @ x_MK
                else:
                    dweight = block_linear.weight_gradient_by_expert(dy_MN, x_MK, ctx.counts)
                dweight = dweight.to(weight.dtype)
            if ctx.needs_input_grad[2]:
                dbias = dy_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx_MK, dweight, dbias, None, None
