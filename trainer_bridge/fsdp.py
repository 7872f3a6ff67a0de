"""Read a trainer's weights, one parameter at a time, whatever holds them.

A parameter of an FSDP2 model (``fully_shard``) is a DTensor: every rank gathers it, in the same
order, and only rank 0 goes on with it. The whole model is never gathered at once.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sgl_fp8rl.numerics.reference import FP8_DTYPE
from sgl_fp8rl.weight_update.manifest import SCALE_SUFFIX
from trainer_bridge import hf_names

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Source:
    """One parameter of the trainer and the HF tensors that it holds."""

    parameter: torch.Tensor
    dtype: torch.dtype
    """What its tensors are sent as."""
    cuts: tuple[tuple[str, hf_names.Cut], ...]

    def announce(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names with meta tensors of the right shape and dtype; nothing is gathered."""
        whole = torch.empty(self.parameter.shape, dtype=self.dtype, device="meta")
        return ((name, cut(whole)) for name, cut in self.cuts)

    @torch.no_grad()
    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors with their values; a collective where the parameter is sharded."""
        tensor = self.parameter.detach().to(self.dtype)
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return ((name, cut(whole).contiguous()) for name, cut in self.cuts)


def sources(
    model_or_named_tensors: nn.Module | NamedTensors,
    dtype: torch.dtype,
    as_they_are: Collection[str] = (),
) -> list[Source]:
    """Plan how to read a module, or named tensors that already have HF names.

    Matrices in FP32 or FP16 are sent in ``dtype``, the engine's, since it rounds them to that
    before it quantizes. Small tensors keep their dtype, and so do those ``as_they_are``, which the
    engine keeps in FP32. FP8 codes and their scales go as they are.
    """
    if isinstance(model_or_named_tensors, nn.Module):
        family = hf_names.model_type(model_or_named_tensors)
        # tied parameters come once, under their first name, as in a checkpoint
        named = [(hf_names.clean(n), t) for n, t in _checkpointed(model_or_named_tensors)]
        return [
            Source(
                p,
                p.dtype if name in as_they_are else _sent_as(p, dtype),
                tuple(hf_names.split(name, tuple(p.shape), family)),
            )
            for name, p in named
        ]
    pairs = list(pairs_of(model_or_named_tensors))
    codes = {name + SCALE_SUFFIX for name, tensor in pairs if tensor.dtype == FP8_DTYPE}
    return [
        Source(
            tensor,
            tensor.dtype if name in codes or name in as_they_are else _sent_as(tensor, dtype),
            ((name, _whole),),
        )
        for name, tensor in pairs
    ]


def is_sharded(model_or_named_tensors: nn.Module | NamedTensors) -> bool:
    """Whether the ranks of the trainer must read together."""
    if isinstance(model_or_named_tensors, nn.Module):
        return any(isinstance(p, DTensor) for p in model_or_named_tensors.parameters())
    return any(isinstance(tensor, DTensor) for _, tensor in pairs_of(model_or_named_tensors))


def pairs_of(named_tensors: NamedTensors) -> Iterable[tuple[str, torch.Tensor]]:
    """(Name, tensor) of a mapping or of an iterable of pairs."""
    return named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors


def _checkpointed(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and those buffers that a checkpoint holds, such as a router's bias."""
    yield from model.named_parameters()
    saved = {hf_names.clean(name) for name in model.state_dict()}
    for name, buffer in model.named_buffers():
        if hf_names.clean(name) in saved and buffer.is_floating_point():
            yield name, buffer


def _sent_as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() and _is_wide_matrix(tensor) else tensor.dtype


def _is_wide_matrix(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 1 and tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
