"""A hook on attention modules: in a decode step, one kernel between QKV projection and attention
replaces SGLang's QK-norm, rotary embedding and copies, and our store.

``mark`` selects the modules once, when the cache exists; all others, and all steps but plain
decode, run the original code. Scales and errors are measured in prefill only, which never runs
this.
"""

import logging
from typing import Any

import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.ops.qk_rope import HEAD_DIMS, Norms
from sgl_fp8rl.receiver.kv.quantized import layer_kv

logger = logging.getLogger(__name__)


def mark(model: torch.nn.Module) -> set[str]:
    """Mark the attention modules that run ``fused_forward``.

    Returns:
        The hook targets of their classes.
    """
    targets, marked = set(), 0
    for module in model.modules():
        target = f"{type(module).__module__}.{type(module).__qualname__}.forward"
        if target in compat.DECODED_ATTENTION and is_fusable(module):
            module.fp8rl_is_fused = True  # type: ignore[assignment]
            targets.add(target)
            marked += 1
    logger.info("fp8rl: one kernel norms, rotates and stores in decode for %d layers", marked)
    return targets


def is_fusable(attention: Any) -> bool:
    """Whether the kernel computes the same as this module's own ``forward``."""
    deterministic = compat.get_exec().deterministic
    return (
        layer_kv(attention.attn) is not None
        # other kernels, which round differently
        and deterministic.rl_on_policy_target is None
        and not deterministic.enable_deterministic_inference
        and not getattr(attention, "use_fused_qk_norm_rope", False)
        and _has_plain_heads(attention)
        and _is_plain(attention.rotary_emb, attention.head_dim)
        and _norms_fit(attention)
    )


def fused_forward(
    original: Any,
    attention: Any,
    positions: torch.Tensor,
    hidden_states: Any,
    forward_batch: Any,
    *more: Any,
    **others: Any,
) -> torch.Tensor:
    """AROUND ``forward`` of the classes in ``compat.DECODED_ATTENTION``, which does what is asked
    besides."""
    if more or others or not _is_decode(attention, positions, hidden_states, forward_batch):
        out = original(attention, positions, hidden_states, forward_batch, *more, **others)
        return out  # type: ignore[no-any-return]
    if hidden_states.is_cuda:
        from sgl_fp8rl.ops.qk_rope_triton import norm_rope_store
    else:
        from sgl_fp8rl.ops.qk_rope import norm_rope_store
    layer = attention.attn
    mine = layer.fp8rl_layer
    qkv, _ = attention.qkv_proj(hidden_states)
    q = norm_rope_store(
        qkv,
        positions,
        attention.rotary_emb.cos_sin_cache,
        _norms(attention),
        forward_batch.out_cache_loc,
        mine.codes(compat.get_token_to_kv_pool().get_kv_buffer(layer.layer_id)),
    )
    out = layer(q, None, None, forward_batch, save_kv_cache=False, fp8rl_q_is_ready=True)
    output, _ = attention.o_proj(out)
    return output  # type: ignore[no-any-return]


def _is_decode(attention: Any, positions: Any, hidden_states: Any, forward_batch: Any) -> bool:
    return (
        getattr(attention, "fp8rl_is_fused", False)
        and forward_batch.forward_mode.is_decode()
        # SGLang passes quantized activations to some models, as tuples
        and isinstance(hidden_states, torch.Tensor)
        and hidden_states.dtype == torch.bfloat16
        and len(hidden_states) > 0
        and positions.dtype == torch.int64
        and positions.shape == hidden_states.shape[:1]  # M-RoPE has three for each token
        and not torch.compiler.is_compiling()
    )


def _has_plain_heads(attention: Any) -> bool:
    layer = attention.attn
    return (
        layer.qk_head_dim == layer.v_head_dim == layer.head_dim == attention.head_dim
        and attention.head_dim in HEAD_DIMS
        and layer.tp_q_head_num == attention.num_heads
        and layer.tp_k_head_num == layer.tp_v_head_num == attention.num_kv_heads
        and attention.num_heads % attention.num_kv_heads == 0
        and not layer.is_cross_attention
    )


def _is_plain(rotary: Any, head_dim: int) -> bool:
    """Whether it rotates whole heads in FP32 with its table, pairing the halves (NeoX style).

    So do subclasses that only compute another table (Llama 3, YaRN).
    """
    base = compat.RotaryEmbedding
    return (
        isinstance(rotary, base)
        and type(rotary).forward_cuda is base.forward_cuda
        and type(rotary).forward is base.forward
        and not rotary.use_fallback_kernel  # rotates in BF16
        and rotary.is_neox_style
        and rotary.head_size == rotary.rotary_dim == head_dim
        and rotary.cos_sin_cache.dtype == torch.float32
    )


def _norms_fit(attention: Any) -> bool:
    if not hasattr(attention, "q_norm"):
        return True
    q_norm, k_norm = attention.q_norm, attention.k_norm
    return q_norm.variance_epsilon == k_norm.variance_epsilon and all(
        type(norm) is compat.RMSNorm
        and norm.weight.dtype == torch.bfloat16
        and norm.weight.shape == (attention.head_dim,)
        and not norm.cast_x_before_out_mul
        and norm.variance_size_override is None
        for norm in (q_norm, k_norm)
    )


def _norms(attention: Any) -> Norms | None:
    if not hasattr(attention, "q_norm"):
        return None
    q_norm, k_norm = attention.q_norm, attention.k_norm
    return Norms(q_norm.weight.data, k_norm.weight.data, q_norm.variance_epsilon)
