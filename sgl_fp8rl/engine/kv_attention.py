"""Hooks on SGLang's attention backends: store K and V with our scales, attend with them.

SGLang itself keeps scales as Python floats, which a captured graph freezes, and stores without
saturation. Shape suffixes: T tokens, H KV heads, G query heads of a KV head, D head dim.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch

from sgl_fp8rl.engine.kv_calibrate import calibrate
from sgl_fp8rl.engine.kv_decode import fused_forward, mark
from sgl_fp8rl.kv_cache.backends import FA3, TRTLLM_MHA
from sgl_fp8rl.kv_cache.quant_error import observe
from sgl_fp8rl.kv_cache.quantized import Caches, LayerKV, layer_kv
from sgl_fp8rl.kv_cache.scales import ScaledLayer
from sgl_fp8rl.ops.paged_decode import Codes, Pages, attend
from sgl_fp8rl.ops.reference import FP8_DTYPE

REFERENCE_ROWS = 128
"""Tokens whose scores the reference keeps at once."""
Hook = Callable[..., Any]
"""Called with SGLang's own function first, then with its arguments."""


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
        out = self.original(
            self.backend,
            q,
            k,
            v,
            self.layer,
            self.forward_batch,
            save_kv_cache=False,
            **self.kwargs,
        )
        return out  # type: ignore[no-any-return]

    @property
    def caches(self) -> Caches:
        """The pool's buffers of the layer."""
        buffers = self.backend.token_to_kv_pool.get_kv_buffer(self.layer.layer_id)
        return buffers  # type: ignore[no-any-return]

    def store_prefill(self, read_back: bool = False) -> Caches | None:
        """``store``; where that is due, scales are measured before it and the error after it."""
        if not self._stores:
            return None
        if self.mine.is_due:
            assert isinstance(self.mine, ScaledLayer)
            calibrate(self.mine, self.q, self.k, self.v)
        codes = self.store(read_back)
        if self.mine.is_observed:
            observe(self.mine, self.k, self.v, self.forward_batch.out_cache_loc, self.caches)
        return codes

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


@for_scaled_layers
def folded_decode(call: Call) -> torch.Tensor:
    """AROUND ``forward_decode`` of torch_native and FlashInfer: scales are folded into q and out.

    The backend attends to codes: ``(q * k_scale) . c_k`` and ``(p @ c_v) * v_scale``. It cannot to
    those of INT8, which the reference attends to, on a CPU.
    """
    call.store()
    if not isinstance(call.mine, ScaledLayer):
        return _by_reference(call)
    return _folded(call, call.k, call.v)


@for_scaled_layers
def folded_extend(call: Call) -> torch.Tensor:
    """AROUND ``forward_extend`` of torch_native and FlashInfer.

    FlashInfer's ragged kernel attends to its K and V arguments, not to the cache: it gets what
    decode will read back. Codes are exact in BF16.
    """
    metadata = getattr(call.backend, "forward_metadata", None)
    ragged = bool(getattr(metadata, "use_ragged", False))
    codes = call.store_prefill(read_back=ragged)
    if not isinstance(call.mine, ScaledLayer):
        return _by_reference(call)
    return _folded(call, *(codes or (call.k, call.v)))


def _folded(call: Call, k: Any, v: Any) -> torch.Tensor:
    assert isinstance(call.mine, ScaledLayer)
    out = call.attend(_times_heads(call.q, call.mine.k_scale_h), k, v)
    return _times_heads(out, call.mine.v_scale_h, out=out)


def _by_reference(call: Call) -> torch.Tensor:
    """Some tokens of a sequence at a time, over what the cache holds: torch_native has pages of one
    token, and the reference keeps the scores of all."""
    mine, layer, batch = call.mine, call.layer, call.forward_batch
    codes, window = mine.codes(call.caches), _window(layer)
    q_NQD = mine.query(call.q.reshape(-1, layer.tp_q_head_num, layer.head_dim))
    table_BT = call.backend.req_to_token_pool.req_to_token[batch.req_pool_indices]
    is_extend = batch.forward_mode.is_extend()
    counts_B = batch.extend_seq_lens if is_extend else torch.ones_like(batch.seq_lens)
    out = []
    for row, q_nQD in enumerate(q_NQD.split(counts_B.tolist())):
        length = int(batch.seq_lens[row]) - len(q_nQD)
        for part in q_nQD.split(REFERENCE_ROWS):
            length += len(part)
            pages = Pages(table_BT[row : row + 1], 1, batch.seq_lens.new_tensor([length]))
            out.append(attend(part, codes, pages, layer.scaling, window))
    return torch.cat(out).to(call.q.dtype).view(-1, layer.tp_q_head_num * layer.head_dim)


def _window(layer: Any) -> int | None:
    return layer.sliding_window_size if layer.sliding_window_size >= 0 else None


@for_scaled_layers
def fa3_extend(call: Call) -> torch.Tensor:
    """AROUND ``FlashAttentionBackend.forward_extend``: FP8 attention over the cache.

    SGLang casts q to E4M3 without a scale and without saturation, so it is given codes of q. What
    q was divided by is in the descale of K, which SGLang takes from the layer (``fa3_descales``).
    """
    call.store_prefill()
    assert isinstance(call.mine, ScaledLayer)
    codes = torch.empty_like(call.q, dtype=FP8_DTYPE)
    return call.attend(_times_heads(call.q, call.mine.q_factor_h, out=codes), call.k, call.v)


def fa3_descales(model: torch.nn.Module) -> dict[str, Hook]:
    """Give each layer with an FP8 KV cache of ours the descales that SGLang passes to FA3: views
    of our buffers, one for each KV head, which an update writes in place.
    """
    for layer in model.modules():
        if isinstance(mine := layer_kv(layer), ScaledLayer):
            (k_descale_h,) = mine.factors[FA3]
            layer.k_scale, layer.v_scale = k_descale_h, mine.v_scale_h
    return {}


@for_scaled_layers
def paged_decode(call: Call) -> torch.Tensor:
    """AROUND ``TRTLLMHAAttnBackend.forward_decode``: our kernel, by the backend's page tables.

    With the keyword ``fp8rl_q_is_ready`` q is what ``LayerKV.query`` returns (``kv_decode.py``).
    """
    mine, backend, layer = call.mine, call.backend, call.layer
    call.store()
    codes = mine.codes(call.caches)
    q = call.q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
    dtype = call.q.dtype
    if call.kwargs.get("fp8rl_q_is_ready"):
        dtype = torch.bfloat16  # of the model, where q may be FP16
    else:
        q = mine.query(q)
    lengths_B = backend.forward_metadata.cache_seqlens_int32
    table_BP = backend._get_layer_page_table(layer, call.forward_batch)
    pages = Pages(table_BP, backend.page_size, lengths_B)
    out = _paged_attention(q, codes, pages, layer, call.kwargs.get("sinks"), mine)
    return out.to(dtype).view(-1, layer.tp_q_head_num * layer.head_dim)


def _paged_attention(
    q_NQD: torch.Tensor,
    codes: Codes,
    pages: Pages,
    layer: Any,
    sinks_Q: torch.Tensor | None,
    mine: LayerKV,
) -> torch.Tensor:
    workspace = mine.scales.workspace
    kind = layer.scaling, _window(layer), layer.logit_cap or 0.0, sinks_Q
    if workspace is None:  # a CPU
        return attend(q_NQD, codes, pages, *kind)
    from sgl_fp8rl.ops.paged_decode_cuda import attend as attend_on_gpu

    # with the first layer of a step, in a captured graph, too; or where two batches take turns
    if mine.layer_index == 0 or workspace.planned is not pages.lengths_B:
        workspace.plan(pages.lengths_B)
    q = q_NQD.to(torch.float16 if codes.token_scales_HS is not None else torch.bfloat16)
    return attend_on_gpu(q, codes, pages, workspace, *kind)


def _times_heads(
    x: torch.Tensor, factor_H: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply query heads by a factor of their KV head, into ``out`` or a new tensor."""
    if x.is_cuda:
        from sgl_fp8rl.ops.heads_triton import scale_heads
    else:
        from sgl_fp8rl.ops.heads import scale_heads
    return scale_heads(x, factor_H, out)


@dataclass(frozen=True)
class BackendHooks:
    """What is put around one of SGLang's attention backends."""

    extend: Hook | None = None
    """AROUND ``forward_extend``; None where it serves no prefill."""
    decode: Hook | None = None
    """AROUND ``forward_decode``."""
    attach: Callable[[torch.nn.Module], Mapping[str, Hook]] = lambda model: {}
    """Prepares the model for it; returns hooks on the model's own modules, by target."""


HOOKS = {
    "torch_native": BackendHooks(folded_extend, folded_decode),
    "flashinfer": BackendHooks(folded_extend, folded_decode),
    FA3: BackendHooks(extend=fa3_extend, attach=fa3_descales),
    TRTLLM_MHA: BackendHooks(
        decode=paged_decode, attach=lambda model: dict.fromkeys(mark(model), fused_forward)
    ),
}
"""By SGLang's name of the backend, as in ``backends.BACKENDS``."""
