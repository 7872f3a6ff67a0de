"""Send a model with PEFT adapters as the model that they make of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer_bridge.sources import named_tensors


@contextmanager
def merged(model: Any) -> Iterator[nn.Module]:
    """What an update sends of a model; afterwards its parameters are what they were, to the bit.

    Subtracting an adapter again would not do: it leaves the rounding of both sums in the weights.
    """
    if not hasattr(model, "merge_adapter"):
        yield model
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = [m.get_base_layer() for m in model.modules() if isinstance(m, BaseTunerLayer)]
    kept = {p: p.detach().clone() for layer in adapted for p in layer.parameters()}
    try:
        with torch.no_grad():
            model.merge_adapter()
        yield MergedView(model)
    finally:
        with torch.no_grad():
            model.unmerge_adapter()
            for parameter, before in kept.items():
                parameter.copy_(before)


class MergedView(nn.Module):
    """A PEFT model whose adapters are merged, under the names of the model without adapters."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        base = model.get_base_model()
        self.config = base.config
        kept = f"modules_to_save.{model.active_adapter}."
        named = [
            (name.replace(".token_adapter", "").replace(".base_layer.", ".").replace(kept, ""), t)
            for name, t in named_tensors(base)
        ]
        # what adapters are made of, and what another one than the active one saves
        parts = model.prefix, "original_module", "modules_to_save.", "trainable_tokens_"
        self._named = [
            (name, tensor) for name, tensor in named if not any(part in name for part in parts)
        ]

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[Any]:
        return iter(self._named)
