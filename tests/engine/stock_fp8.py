"""A plugin of SGLang that gives its own ``fp8`` arithmetic on a CPU, for tests of exports.

Stock SGLang reads config and weights, decides which layers are FP8, and keeps codes and scales; but
its kernels need a GPU, or a CPU with AMX. Only the two products are replaced, by the reference.
"""

from pathlib import Path
from typing import Any

import torch

NAME = "stock_fp8_on_cpu"


def install(folder: Path) -> Path:
    """Write metadata by which SGLang finds the plugin, where ``folder`` is on ``sys.path``."""
    info = folder / f"{NAME}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{NAME} = {__name__}:register\n")
    return folder


def register() -> None:
    """Replace the products; ``fp8rl`` has methods of its own."""
    from sgl_fp8rl.engine import compat
    from sgl_fp8rl.engine.layers.moe import experts_reference
    from sgl_fp8rl.ops.reference import fp8_linear

    def linear(
        _: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return fp8_linear(x, layer.weight, layer.weight_scale_inv, bias)

    def experts(_: Any, layer: Any, dispatch_output: Any) -> Any:
        topk_weights, topk_ids, _ = dispatch_output.topk_output
        out = experts_reference(layer, dispatch_output.hidden_states, topk_weights, topk_ids)
        return compat.StandardCombineInput(hidden_states=out)

    compat.Fp8LinearMethod.apply = linear
    compat.Fp8MoEMethod.apply = experts
