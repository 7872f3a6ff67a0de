"""What MLA keeps of ``kv_b_proj`` beside it, to attend to latents: ``w_kc`` and ``w_vc``.

They are not parameters. SGLang makes them when a checkpoint is loaded; here its own method writes
them again after each update, in place. ``kv_b_proj`` is BF16, and they are its rows.
"""

import torch
from torch import nn

NAMES = ("w_kc", "w_vc")


class DerivedTensors:
    """Those of one model; none where it has no MLA.

    They are allocated at once, so that they never move: CUDA graphs read them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers = {n: m for n, m in model.named_modules() if hasattr(m, NAMES[0])}
        self.refresh()

    def refresh(self) -> None:
        """Make them from the weights as they are now."""
        if self._layers:
            self._model.post_load_weights()  # type: ignore[operator]

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name: ``w_kc`` [heads, qk_nope, kv_lora] and ``w_vc`` [heads, kv_lora, v]."""
        return {f"{n}.{x}": getattr(m, x) for n, m in self._layers.items() for x in NAMES}
