"""The FP8 codes of a trainer's parameter: made once for each of its values, gathered by FSDP2.

Shape suffixes: N output features, K input features; n, k = N, K in blocks of 128. Parameters of
experts have a dimension of experts before them.
"""

import weakref
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook

from sgl_fp8rl.formats import QUANTIZED
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.protocol.manifest import ManifestError
from trainer_bridge.shards.codes_memory import SUFFIX, Codes, CodesMemory

_steps = 0
"""Steps of all optimizers of this process."""


class FP8Parameter:
    """The codes of one parameter of a module.

    They are made where they are asked for, and kept until the parameter has another value: another
    version, memory or registration in its module, or an optimizer has stepped since, which may
    write where torch counts no version. So may others, through ``.data``: an update makes them
    anew.

    Args:
        dtype: the engine's, to which weights are rounded before they are quantized.
    """

    def __init__(self, name: str, dtype: torch.dtype, format_: WeightFormat = QUANTIZED) -> None:
        self.name, self.dtype, self.format = name, dtype, format_
        self._made: CodesMemory | None = None
        self._made_of: tuple[Any, ...] = ()
        self._shard: DTensor | None = None
        _count_steps()

    def __reduce__(self) -> Any:
        """A copy has codes of its own, which it makes."""
        return FP8Parameter, (self.name, self.dtype, self.format)

    def codes(self, weight: torch.Tensor, *, anew: bool = False) -> Codes:
        """The codes of the parameter as its module has it now.

        Args:
            anew: whatever torch knows of it.

        Raises:
            ManifestError: it holds NaN or Inf; a GPU does not look, and its codes are NaN.
        """
        if isinstance(weight, GatheredCodes):
            return weight.codes
        values = (weight.to_local() if isinstance(weight, DTensor) else weight).detach()
        versions = tuple(
            object() if each.is_inference() else each._version  # uncounted: no two are the same
            for each in (weight, getattr(weight, "_local_tensor", weight))  # either is written to
        )
        storage = weakref.ref(values.untyped_storage())  # its address may be given to another
        state = versions, _steps, storage, values.data_ptr(), values.dtype
        if self._made is None or not self._made.fits([values], self.dtype):
            self._made = CodesMemory([values], self.dtype, format_=self.format)
            self._made_of = ()
        if anew or self._made_of != state:
            try:
                self._made.write([values])
            except ValueError as error:
                raise ManifestError(f"{self.name} {error}") from error
            self._made_of = state
        return self._made.codes[0]

    def registered(self, parameter: Any) -> None:
        """Its module has it anew. FSDP2 does so at each all-gather, whose result has the address
        and the version of the one before."""
        if isinstance(parameter, GatheredCodes):
            return
        self._shard = None
        if isinstance(parameter, DTensor) and moves_codes(parameter):
            self._shard = parameter
            local: Any = parameter._local_tensor
            # what FSDP2 looks for; on this object alone, so that optimizers see a plain tensor
            local.fsdp_pre_all_gather = self._before_all_gather
            local.fsdp_post_all_gather = self._after_all_gather
        else:
            self._made, self._made_of = None, ()

    def moved(self, parameter: torch.Tensor) -> None:
        """Its module was moved or cast, which may have put another shard into the same DTensor, and
        gives the memory of a GPU back."""
        self._made, self._made_of = None, ()
        self.registered(parameter)

    def tensors(self, name: str, parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """What an update sends: codes and scales, or the parameter that FSDP2 gathers as it is."""
        if not isinstance(parameter, DTensor):
            pair: tuple[torch.Tensor, ...] = self.codes(parameter, anew=True)
        elif moves_codes(parameter):
            mesh, placements = parameter.device_mesh, parameter.placements
            pair = tuple(
                DTensor.from_local(part, mesh, placements, run_check=False)
                for part in self.codes(parameter, anew=True)
            )
        else:
            return [(name, parameter)]
        return list(zip((name, name + SUFFIX), pair, strict=True))

    def _before_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], None]:
        """The codes and scales of this rank's rows, as bytes; FSDP2 looks for five arguments."""
        assert self._shard is not None
        return tuple(part.view(torch.uint8) for part in self.codes(self._shard)), None

    def _after_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: None,
        dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        codes, scales = outputs
        gathered = Codes(codes.view(QUANTIZED.dtypes[0]), scales.view(torch.float32))
        if out is None:
            return GatheredCodes(gathered, dtype), ()
        out.codes = gathered
        return None


class GatheredCodes(torch.Tensor):
    """What FSDP2 gathered: it has the shape and the dtype of the parameter, and codes alone.

    Args:
        dtype: of the parameter and its gradient, in a forward.
    """

    codes: Codes
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type["GatheredCodes"], codes: Codes, dtype: torch.dtype) -> "GatheredCodes":
        shape, device = codes.codes_NK.shape, codes.codes_NK.device
        gathered: GatheredCodes = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device
        )
        gathered.codes = codes
        return gathered

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        """All is done in ``__new__``."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GatheredCodes({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.as_strided.default):  # FSDP2's, of the same shape
            return cls(args[0].codes, args[0].dtype)
        raise NotImplementedError(
            f"{func} needs a weight that FSDP2 gathered as FP8 codes; read it between forward and "
            f"backward passes, when it is sharded"
        )


def moves_codes(sharded: DTensor) -> bool:
    """Whether FSDP2 gathers this parameter as codes: the rows of each rank are whole blocks, or
    whole experts, and lie where they are computed with."""
    mesh, (*replicas, shard) = sharded.device_mesh, sharded.placements
    block = 1 if sharded.dim() > 2 else QUANTIZED.block[0]
    return (
        type(shard) is Shard
        and shard.dim == 0
        and all(isinstance(placement, Replicate) for placement in replicas)
        and mesh.size(mesh.ndim - 1) > 1  # FSDP2 gathers one tensor where there is nothing to do
        and sharded.shape[0] % (block * mesh.size(mesh.ndim - 1)) == 0
        and sharded._local_tensor.device.type == mesh.device_type  # not offloaded
    )


@cache
def _count_steps() -> None:
    register_optimizer_step_post_hook(_stepped)


def _stepped(*_: Any) -> None:
    global _steps
    _steps += 1
