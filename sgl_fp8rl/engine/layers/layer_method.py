"""What our methods of linear layers share: a layer goes to another method with the sizes and
loaders that SGLang asked for."""

from typing import Any

from sgl_fp8rl.engine import compat


class LayerMethod:
    """A mixin; ``create_weights`` remembers its arguments in these."""

    sizes: tuple[Any, ...]
    options: dict[str, Any]

    def hand_over(self, layer: Any, method: Any, **options: Any) -> None:
        """Give the layer another method, and its weights in the place of those that it has."""
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]:
            delattr(layer, name)
        layer.quant_method = method
        method.create_weights(layer, *self.sizes, **self.options | options)

    def keep_bf16(self, layer: Any, reason: str) -> None:
        """Give the layer BF16 weights."""
        layer.fp8rl_reason = reason
        # SGLang chose the loader by the name of our class; BF16 parameters need the other
        loader = layer.weight_loader
        self.hand_over(layer, compat.UnquantizedLinearMethod(), weight_loader=loader)
