"""Prefill over an 8-bit KV cache in 16 bits: FlashAttention-3 over the values of its pages.

Every new token is stored first, so a prompt attends to what decode will read.
"""

from typing import Any

import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.attention.kv_call import Call, for_scaled_layers
from sgl_fp8rl.ops.paged_prefill import Group, Kernel, attend


@for_scaled_layers
def fa3_extend(call: Call) -> torch.Tensor:
    """AROUND ``FlashAttentionBackend.forward_extend``.

    Raises:
        RuntimeError: the layer asks for more than causal attention with a window, a logit cap and
            sinks.
    """
    asked = {
        name for name, value in call.kwargs.items() if value is not None and value is not False
    }
    if more := sorted(asked - {"sinks"}):
        raise RuntimeError(
            f"prefill over an 8-bit KV cache lacks {', '.join(more)}, which attention layer "
            f"{call.layer.layer_id} asks for; start the model without --kv-cache-dtype"
        )
    call.store_prefill()
    table_BP, page_size = call.backend.forward_metadata.page_table, call.backend.page_size
    return attend_to_values(
        call,
        table_BP,
        page_size,
        fa3(*call.scores, num_splits=call.backend.num_splits),
    )


def attend_to_values(
    call: Call, table_BP: torch.Tensor, page_size: int, kernel: Kernel
) -> torch.Tensor:
    """Attention over what the cache holds of these pages; the new tokens are stored."""
    mine, batch = call.mine, call.forward_batch
    workspace = mine.scales.prefill_workspace
    assert workspace is not None
    # with the first layer of a batch; or where two batches take turns. Within prefill graphs SGLang
    # cuts out_cache_loc anew for each layer, so it cannot tell batches apart
    if mine.layer_index == 0 or workspace.planned is not batch.seq_lens_cpu:
        lengths = batch.seq_lens_cpu.tolist()
        workspace.plan(batch.seq_lens_cpu, batch.extend_seq_lens_cpu, lengths, table_BP, page_size)
    q_NQD = mine.query(call.q_NQD).to(workspace.k_WD.dtype)
    return call.flat(attend(q_NQD, mine.codes(call.caches), workspace, kernel))


def fa3(
    scale: float,
    window: int | None = None,
    logit_cap: float = 0.0,
    sinks_Q: torch.Tensor | None = None,
    num_splits: int = 0,
) -> Kernel:
    """FlashAttention-3 of SGLang's wheels.

    Args:
        window: a token sees so many before it; None for all.
        logit_cap: scores become ``logit_cap * tanh(score / logit_cap)``; 0 for none.
        sinks_Q: of each query head, a score that has no value.
        num_splits: of a sequence; 0 where FA3 chooses them by the batch.
    """

    def kernel(
        q_NQD: torch.Tensor,
        k_WHD: torch.Tensor,
        v_WHD: torch.Tensor,
        group: Group,
        heads: slice,
        out_NQD: torch.Tensor,
    ) -> None:
        found: Any = compat.flash_attn_varlen_func(
            q_NQD,
            k_WHD,
            v_WHD,
            cu_seqlens_q=group.starts_q,
            cu_seqlens_k=group.starts_k,
            seqused_k=group.lengths_k,
            max_seqlen_q=group.longest_q,
            max_seqlen_k=group.longest_k,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window, 0),
            softcap=logit_cap,
            num_splits=num_splits,
            sinks=None if sinks_Q is None else sinks_Q[heads],
            out=out_NQD,
        )
        if found.data_ptr() != out_NQD.data_ptr():  # FA3 from elsewhere may not know ``out``
            out_NQD.copy_(found)

    return kernel
