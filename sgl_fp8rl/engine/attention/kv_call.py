"""A call of one of SGLang's attention backends, for a layer whose KV cache is ours.

Shape suffixes: T tokens, H KV heads, D head dim.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch

from sgl_fp8rl.engine.control.kv_calibrate import calibrate
from sgl_fp8rl.receiver.kv.quantized import Caches, LayerKV, layer_kv
from sgl_fp8rl.receiver.kv.scales import ScaledLayer


class Call(NamedTuple):
    """Of a backend, for one of our layers."""

    original: Any
    """SGLang's own function."""
    mine: LayerKV
    """Our part of the layer."""
    backend: Any
    q: torch.Tensor
    k: Any
    v: Any
    layer: Any
    forward_batch: Any
    save_kv_cache: bool
    kwargs: dict[str, Any]

    def attend(self, q: torch.Tensor, k: Any, v: Any) -> torch.Tensor:
        """By SGLang's own function, which stores nothing."""
        given = self.backend, q, k, v, self.layer, self.forward_batch
        return self.original(*given, save_kv_cache=False, **self.kwargs)  # type: ignore[no-any-return]

    @property
    def scores(self) -> tuple[float, int | None, float, torch.Tensor | None]:
        """What our kernels make scores of: scale, window, cap, and the sinks of query heads."""
        layer, window = self.layer, int(self.layer.sliding_window_size)
        sinks_Q = self.kwargs.get("sinks")
        return layer.scaling, window if window >= 0 else None, layer.logit_cap or 0.0, sinks_Q

    @property
    def q_NQD(self) -> torch.Tensor:
        return self.q.reshape(-1, self.layer.tp_q_head_num, self.layer.head_dim)

    def flat(self, out_NQD: torch.Tensor) -> torch.Tensor:
        """As the backend returns it, in the dtype of the model."""
        if (out_NQD.is_cuda, out_NQD.dtype, self.q.dtype) == (True, torch.float16, torch.bfloat16):
            from sgl_fp8rl.ops.kv_int8_triton import to_bf16

            return to_bf16(out_NQD).flatten(1)
        return out_NQD.to(self.q.dtype).flatten(1)

    @property
    def caches(self) -> Caches:
        """The pool's buffers of the layer."""
        buffers = self.backend.token_to_kv_pool.get_kv_buffer(self.layer.layer_id)
        return buffers  # type: ignore[no-any-return]

    def store_prefill(self, read_back: bool = False) -> Caches | None:
        """``store``; where that is due, scales are measured before it."""
        if not self._stores:
            return None
        if self.mine.is_due:
            assert isinstance(self.mine, ScaledLayer)
            calibrate(self.mine, self.k, self.v)
        return self.store(read_back)

    def store(self, read_back: bool = False) -> Caches | None:
        """Write the codes into the pool's buffers, instead of SGLang's unsaturated cast.

        Returns:
            what was stored, if ``read_back``.
        """
        if not self._stores:
            return None
        layer, slots_T = self.layer, self.forward_batch.out_cache_loc
        k_THD = self.k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        v_THD = self.v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        return self.mine.store(k_THD, v_THD, slots_T, self.caches, read_back)

    @property
    def _stores(self) -> bool:
        return self.save_kv_cache and self.k is not None


def for_scaled_layers(attend: Callable[[Call], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A hook that calls ``attend`` for our layers. Other layers run the original."""

    @wraps(attend)
    def hook(
        original: Any,
        backend: Any,
        q: torch.Tensor,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        given = backend, q, k, v, layer, forward_batch, save_kv_cache
        mine = layer_kv(layer)
        if mine is None:
            return original(*given, **kwargs)  # type: ignore[no-any-return]
        return attend(Call(original, mine, *given, kwargs))

    return hook
