"""Products of experts on the CPU that stand for tiles, with times of their own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.gemm.expert_tiles import ExpertShape
from sgl_fp8rl.engine.tuning import expert_bench_inputs
from sgl_fp8rl.engine.tuning.expert_bench_inputs import GEMMS, ExpertBenchInputs
from tests import experts_fakes

Tensor = torch.Tensor
SHAPE = ExpertShape(4, 256, 128, 3)
STAGES = "num_stages"
"""By it a test says which product is meant."""


def config(block: int = 16, **options: Any) -> dict[str, Any]:
    sizes = {"BLOCK_SIZE_M": block, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}
    return {**sizes, **options}


def exact(*args: Any, **options: Any) -> None:
    """The product as good tiles have it."""
    experts_fakes.product(*args, **options)


def clipping(*args: Any, **options: Any) -> None:
    """Right as long as no activation is above 10, as no normal one is."""
    codes, *rest = args
    scales = rest[3]
    values = (codes.float().unflatten(1, (-1, 128)) * scales.unsqueeze(2)).clamp(-10, 10)
    clipped = (values / scales.unsqueeze(2)).flatten(1).to(codes.dtype)
    exact(clipped, *rest, **options)


def one_row_left_out(*args: Any, **options: Any) -> None:
    """The last row keeps what its memory held."""
    out = args[3].view(args[8].numel(), -1)
    before = out[-1].clone()
    exact(*args, **options)
    out[-1] = before


def neighbours_scale(*args: Any, **options: Any) -> None:
    """The last expert takes the first one's scales."""
    scales = args[5].clone()
    scales[-1] = scales[0]
    exact(*args[:5], scales, *args[6:], **options)


def weighted_otherwise(*args: Any, **options: Any) -> None:
    """The first product by the routes' weights, the second not."""
    exact(*args[:12], not args[12], *args[13:], **options)


def raising(*_: Any, **__: Any) -> None:
    raise RuntimeError("out of shared memory")


class Bench:
    """SGLang's functions in loops, and a timer that says what it is told.

    Args:
        us: the time of ``(kernel, config)``; ``align`` is a kernel too.
        wrong: what computes a product with ``num_stages`` of this key.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        us: Callable[[str, dict[str, Any]], float],
        wrong: dict[int, Callable[..., None]] | None = None,
    ) -> None:
        self.us, self.wrong = us, wrong or {}
        self.ran: list[tuple[str, dict[str, Any]]] = []
        patch.setattr(compat, "invoke_fused_moe_kernel", self._product, raising=False)
        patch.setattr(compat, "moe_align_block_size", self._align, raising=False)
        patch.setattr(expert_bench_inputs, "ROTATED_BYTES", 0)  # two routings

    def _product(self, *args: Any, **options: Any) -> None:
        down, given = args[12], args[14]
        self.ran.append((GEMMS[down], {**given, "USE_TMA": options["b_use_tma"]}))
        self.wrong.get(given.get(STAGES, 0), exact)(*args, **options)

    def _align(self, topk_ids: Tensor, block: int, experts: int) -> Any:
        self.ran.append(("align", {"BLOCK_SIZE_M": block}))
        return experts_fakes.align(topk_ids, block, experts)

    def timer(self, run: Callable[[int], object], sets: int) -> float:
        for index in range(sets):
            run(index)
        return self.us(*self.ran[-1])

    def inputs(self, shape: ExpertShape = SHAPE) -> ExpertBenchInputs:
        return ExpertBenchInputs(shape, "cpu", self.timer)
