"""Read a trainer's weights, one parameter at a time, whatever holds them.

A parameter of an FSDP2 model (``fully_shard``) is a DTensor: every rank gathers it, in the same
order, and rank 0, or a few, go on with it. The whole model is never gathered at once.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from sgl_fp8rl.formats import suffixes_of
from sgl_fp8rl.formats.weight_format import WEIGHT_DTYPES
from sgl_fp8rl.protocol.manifest import ManifestError, twice
from sgl_fp8rl.protocol.values import attempt
from trainer_bridge.sources import hf_names
from trainer_bridge.sources.adapters import has_adapters, merged
from trainer_bridge.sources.hf_names import named_modules, unwrapped

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
Named = list[tuple[str, torch.Tensor]]
PLAIN = torch.Tensor, torch.nn.Parameter
"""Types whose elements are those of their memory; subclasses may hold anything."""


@dataclass(frozen=True)
class Source:
    """One parameter of the trainer and the HF tensors that it holds."""

    shape: torch.Size
    dtype: torch.dtype
    """The parameter's own."""
    held_as: torch.dtype
    """What ``read`` gives: the parameter's own dtype, or ``sent_as`` where it is sharded."""
    sent_as: torch.dtype
    """What its tensors are sent as, where they are copied into a bucket."""
    cuts: tuple[tuple[str, hf_names.Cut], ...]
    """None of a parameter that the engine keeps nothing of: it is not read either."""

    def announce(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Names with meta tensors, views of the whole parameter; nothing is gathered."""
        whole = torch.empty(self.shape, dtype=dtype, device="meta")
        return ((name, cut(whole)) for name, cut in self.cuts)

    @torch.no_grad()
    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """The whole parameter, contiguous; a collective where it is sharded."""
        if isinstance(parameter, DTensor):
            held: DTensor = parameter.detach().to(self.sent_as)  # type: ignore[assignment]
            home, mesh = held.to_local().device, held.device_mesh
            if home.type != mesh.device_type:  # of FSDP2's CPU offload: NCCL gathers on GPUs alone
                held = held.to(mesh.device_type)  # type: ignore[assignment]
            codes = held.dtype.itemsize == 1
            whole = (_as_bytes(held) if codes else held).full_tensor().contiguous().to(home)
            return whole.view(held.dtype) if codes else whole
        return plain(parameter.detach()).contiguous()


def named_tensors(model_or_named_tensors: nn.Module | NamedTensors) -> Named:
    """(Name, tensor) of a module's checkpoint, of a mapping, or of an iterable of pairs.

    A module may be wrapped, and have adapters of PEFT, which are merged. A parameter that is whole
    on this rank comes as a plain tensor. One that ``fp8_forward`` has quantized comes as codes and
    scales, unless FSDP2 gathers it as it is.

    Raises:
        ManifestError: the parameters of a module are not those of its checkpoint, or it is none,
            nor a mapping or pairs; a name comes twice, or what it names is no tensor.
    """
    if isinstance(model_or_named_tensors, nn.Module):
        # tied parameters come once, under their first name, as in a checkpoint
        named = _checkpointed(model_or_named_tensors)
        return [(name, _whole_here(tensor)) for name, tensor in named]
    if isinstance(model_or_named_tensors, Mapping):
        model_or_named_tensors = model_or_named_tensors.items()
    if not isinstance(model_or_named_tensors, Iterable):  # torch.compile, twice, makes a function
        raise ManifestError(
            f"the weights are a {type(model_or_named_tensors).__name__}; pass a module, a mapping, "
            f"or (name, tensor) pairs"
        )
    pairs: dict[str, torch.Tensor] = {}
    for name, tensor in model_or_named_tensors:
        if name in pairs:
            raise ManifestError(twice(name))
        if not isinstance(tensor, torch.Tensor):
            raise ManifestError(f"{name} {_why_unreadable(tensor)}")
        pairs[name] = _whole_here(tensor)
    return _companions_behind([*pairs.items()])


def listed(model_or_named_tensors: nn.Module | NamedTensors) -> tuple[Named, Exception | None]:
    """As ``named_tensors``, and what failed there: then a model's parameters as it holds them,
    which still say what other ranks wait for this one."""
    named, fault = attempt(named_tensors, model_or_named_tensors)
    if fault is not None and isinstance(model_or_named_tensors, nn.Module):
        named = list(model_or_named_tensors.named_parameters())
    return named or [], fault


def check_readable(name: str, tensor: Any) -> None:
    """Check that a tensor has elements that can be read on this rank."""
    why = _why_unreadable(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
    if why is not None:
        raise ManifestError(f"{name} {why}")


def _why_unreadable(tensor: Any) -> str | None:
    if not isinstance(tensor, torch.Tensor):
        return f"is a {type(tensor).__name__}; send a tensor"
    if is_lazy(tensor):
        return "is not initialized; run the model's first forward pass before"
    if tensor.is_meta:
        return "has no data here (it is on the meta device, as offloaded weights are); load it"
    if tensor.layout != torch.strided:
        return f"is not dense ({tensor.layout}); send tensor.to_dense()"
    if type(tensor) not in PLAIN:
        _, fault = attempt(lambda: plain(tensor.detach()))
        if fault is not None:
            return f"is a {type(tensor).__name__} whose values cannot be read; dequantize it"
    elif tensor.numel() and not tensor.untyped_storage().nbytes():
        return "has no data here (its memory is freed, as that of sharded weights is); gather it"
    return None


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in memory of their own, where a subclass may hold them in another way."""
    if type(tensor) in PLAIN:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def sources(
    named: Named,
    family: str | None,
    dtype: torch.dtype,
    as_they_are: Collection[str] = (),
    ignored: Collection[str] = (),
) -> list[Source]:
    """Plan how to read named tensors.

    Weights in FP32 or FP16 are sent in ``dtype``, the engine's, since it rounds them to that, and
    can read back what it was sent. Those ``as_they_are``, which the engine keeps in FP32, FP8 codes
    and their scales go as they are.

    Args:
        family: ``model_type`` of the module that they are parameters of; None where the names are
            those of an HF checkpoint already.
        ignored: HF tensors that the engine keeps nothing of; they are not sent.
    """
    companions = {name + suffix for name, t in named for suffix in suffixes_of(t.dtype)}
    kept = {*companions, *as_they_are}
    return [
        Source(
            tensor.shape,
            tensor.dtype,
            tensor.dtype if name in kept or not isinstance(tensor, DTensor) else sent,
            tensor.dtype if name in kept else sent,
            tuple(
                (hf_name, cut)
                for hf_name, cut in (
                    ((name, hf_names.whole),)
                    if family is None
                    else hf_names.split(name, tuple(tensor.shape), family)
                )
                if hf_name not in ignored
            ),
        )
        for name, tensor in named
        for sent in (dtype if tensor.dtype in WEIGHT_DTYPES else tensor.dtype,)
    ]


def _reshard(module: nn.Module) -> None:
    """Have FSDP2 show the parameters that its optimizer steps, here and in modules inside: a
    forward pass leaves those of the root whole, and a step after it does not reach them."""
    if isinstance(module, FSDPModule):
        module.reshard()
    elif isinstance(module, FullyShardedDataParallel):
        raise ManifestError(
            "the model is wrapped by FSDP1, which flattens its parameters; shard it by "
            "fully_shard (FSDP2), or pass an iterator of whole tensors"
        )


def _checkpointed(model: nn.Module) -> Named:
    """Parameters, and those buffers that a checkpoint holds, such as a router's bias.

    In one walk, since each takes about a millisecond of an update; but a model may have a
    ``named_parameters`` of its own, or adapters.
    """
    if has_adapters(model):
        for module in model.modules():
            _reshard(module)
        model = merged(model)
    inside = unwrapped(model)
    listing = getattr(inside.named_parameters, "__func__", None)
    is_own = listing is not nn.Module.named_parameters
    found: Named = []
    buffers: Named = []
    seen: set[int] = set()
    for prefix, module in named_modules(model):  # those outside come before those inside
        _reshard(module)
        quantized = vars(module).get("fp8_parameters", {})
        for name, parameter in () if is_own else module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                whole_name = f"{prefix}.{name}" if prefix else name
                if name in quantized:
                    found.extend(quantized[name].tensors(whole_name, parameter))
                else:
                    found.append((whole_name, parameter))
        for name, buffer in module.named_buffers(prefix, recurse=False) if module._buffers else ():
            last = name.rpartition(".")[2]
            saved = last not in module._non_persistent_buffers_set
            if saved and buffer.is_floating_point():
                buffers.append((name, buffer))
    if is_own:
        found.extend(inside.named_parameters())
    return found + buffers


def _companions_behind(named: Named) -> Named:
    """Each weight's scales directly after it, so that no weight waits for scales much later."""
    weights = {
        name + suffix: index
        for index, (name, tensor) in enumerate(named)
        for suffix in suffixes_of(tensor.dtype)
    }
    if not weights:
        return named

    def place(index: int) -> tuple[int, bool]:
        name = named[index][0]
        return weights.get(name, index), name in weights

    return [named[index] for index in sorted(range(len(named)), key=place)]


def _whole_here(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor) and mesh_size(tensor.device_mesh) == 1:
        return tensor.to_local()
    return tensor


@lru_cache(64)  # torch counts anew at each call, and this is asked for every parameter
def mesh_size(mesh: DeviceMesh) -> int:
    """Ranks of a mesh."""
    return mesh.size()


def _as_bytes(codes: DTensor) -> DTensor:
    """Gloo gathers no FP8."""
    local = codes.to_local().view(torch.uint8)
    mesh, placements, shape = codes.device_mesh, codes.placements, codes.shape
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=shape, stride=codes.stride()
    )
