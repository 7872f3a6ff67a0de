"""Hooks at the attention functions of transformers models: they observe the inputs, or
fake-quantize K and V (``fp8_attention.py``)."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Observe = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor | None], None]
"""``KVCalibrator.observe``: layer, key and value ``[B, heads, T, D]``, mask ``[B, T]``."""
FAKE_QUANTIZED = "fake_quantized_kv"
"""Attribute of an attention module: what attends in ``fp8_attention``, where it has one."""


class Watch:
    """The attention modules of one model, and the mask of its current batch."""

    def __init__(self, observe: Observe, model: nn.Module) -> None:
        self._observe = observe
        self._layers = attention_layers(model)
        self._model = model
        self._outermost: nn.Module | None = None
        self._mask: torch.Tensor | None = None

    def see(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Observe a call of the attention function if ``module`` belongs to this model."""
        if (layer := self._layers.get(module)) is None:
            return
        if query.shape[2] != key.shape[2]:
            raise ValueError(
                f"layer {layer} has Q of {query.shape[2]} tokens and K of {key.shape[2]}; observe "
                f"whole sequences, without a KV cache that holds earlier tokens"
            )
        self._observe(layer, key, value, self._mask)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Have transformers' attention functions report here, and keep the mask of each batch
        during its forward pass."""
        install()
        hooks = []
        for module in self._model.modules():
            signature = inspect.signature(module.forward)
            # a model or its decoder, whichever is called; layers get other masks
            if {"input_ids", "attention_mask"} <= signature.parameters.keys():
                before = functools.partial(self._enter, signature)
                hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
                hooks.append(module.register_forward_hook(self._leave, always_call=True))
        _watches.append(self)
        try:
            yield
        finally:
            _watches.remove(self)
            for hook in hooks:
                hook.remove()

    def _enter(
        self,
        signature: inspect.Signature,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if self._outermost is not None:
            return
        self._outermost = module
        mask = signature.bind_partial(*args, **kwargs).arguments.get("attention_mask")
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2):
            what = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise ValueError(
                f"attention_mask is {what}, which does not mark padding; under watch() pass "
                f"[batch, tokens], 0 where a token is padding, or None"
            )
        self._mask = mask

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if module is self._outermost:
            self._outermost = self._mask = None


_watches: list[Watch] = []


@functools.cache
def install() -> None:
    """Have transformers' attention functions go through the hooks, which pass on whatever is
    neither watched nor fake-quantized, as long as this process lives.

    Every attention layer of transformers gets its function, also the eager one, from
    ``get_interface`` in each forward, and calls it with itself, query, key and value.
    """
    from transformers.modeling_utils import AttentionInterface

    original = getattr(AttentionInterface, "get_interface", None)
    if original is None:
        raise ValueError(
            "this transformers has no AttentionInterface.get_interface; install 5.0 or newer, "
            "or call observe() in the model's attention"
        )
    AttentionInterface.get_interface = _hooked(original)


def _hooked(get_interface: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_interface)
    def get_hooked(*args: Any, **kwargs: Any) -> Any:
        attend = get_interface(*args, **kwargs)

        @functools.wraps(attend)
        def attend_hooked(
            module: nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            # a compiled graph would keep reporting after the context, or never start
            if not torch.compiler.is_compiling():
                for watch in tuple(_watches):
                    watch.see(module, query, key, value)
            kv: Any = getattr(module, FAKE_QUANTIZED, None)
            if kv is not None:
                return kv.attend(attend, module, query, key, value, *args, **kwargs)
            return attend(module, query, key, value, *args, **kwargs)

        return attend_hooked

    return get_hooked


def attention_layers(model: nn.Module) -> dict[nn.Module, int]:
    """The attention modules of a transformers model's decoder, and the layer of each."""
    config = text_config(model)
    return {
        module: int(module.layer_idx)  # type: ignore[arg-type]
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        # a vision tower's layers have a config of another type
        and type(getattr(module, "config", None)) is type(config)
    }


def text_config(model: nn.Module) -> Any:
    """The config of a transformers model's decoder, also inside a wrapper."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "get_text_config"):
            return config.get_text_config(decoder=True)
    raise ValueError(
        f"{type(model).__name__} is not a transformers model; make KVCalibrator(layers=..., "
        f"kv_heads=...) and call observe() in its attention"
    )
