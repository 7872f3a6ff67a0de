"""Hooks on SGLang's attention backends: store K and V with our scales, attend with them.

SGLang itself keeps scales as Python floats, which a captured graph freezes, and stores without
saturation. Shape suffixes: B sequences, P pages, N query tokens, Q query heads, H KV heads, D head
dim.
"""

from typing import Any

import torch

from sgl_fp8rl.engine.attention.backends import FA3, TRTLLM_MHA
from sgl_fp8rl.engine.attention.kv_call import Call, for_scaled_layers
from sgl_fp8rl.engine.attention.kv_prefill import attend_to_values, fa3_extend
from sgl_fp8rl.engine.compat.wrapping import Hook
from sgl_fp8rl.ops.heads import scale_heads
from sgl_fp8rl.ops.paged_decode import Pages, attend
from sgl_fp8rl.ops.paged_prefill import reference
from sgl_fp8rl.receiver.kv.scales import ScaledLayer


@for_scaled_layers
def folded_decode(call: Call) -> torch.Tensor:
    """AROUND ``forward_decode`` of torch_native and FlashInfer: scales are folded into q and out.

    The backend attends to codes: ``(q * k_scale) . c_k`` and ``(p @ c_v) * v_scale``. It cannot to
    those of INT8, which the reference attends to, on a CPU.
    """
    call.store()
    if isinstance(call.mine, ScaledLayer):
        return _folded(call, call.k, call.v)
    pages = Pages(_slots(call), 1, call.forward_batch.seq_lens)
    codes = call.mine.codes(call.caches)
    return call.flat(attend(call.mine.query(call.q_NQD), codes, pages, *call.scores))


@for_scaled_layers
def folded_extend(call: Call) -> torch.Tensor:
    """AROUND ``forward_extend`` of torch_native and FlashInfer.

    FlashInfer's ragged kernel attends to its K and V arguments, not to the cache: it gets what
    decode will read back. Codes are exact in BF16.
    """
    metadata = getattr(call.backend, "forward_metadata", None)
    ragged = bool(getattr(metadata, "use_ragged", False))
    codes = call.store_prefill(read_back=ragged)
    if isinstance(call.mine, ScaledLayer):
        return _folded(call, *(codes or (call.k, call.v)))
    return attend_to_values(call, _slots(call), 1, reference(*call.scores))


def _folded(call: Call, k: Any, v: Any) -> torch.Tensor:
    assert isinstance(call.mine, ScaledLayer)
    out = call.attend(scale_heads(call.q, call.mine.k_scale_h), k, v)
    return scale_heads(out, call.mine.v_scale_h, out=out)


def _slots(call: Call) -> torch.Tensor:
    """The slots of each sequence's tokens, as pages of one token."""
    table: torch.Tensor = call.backend.req_to_token_pool.req_to_token
    return table[call.forward_batch.req_pool_indices]


@for_scaled_layers
def paged_decode(call: Call) -> torch.Tensor:
    """AROUND ``TRTLLMHAAttnBackend.forward_decode``: our kernel, by the backend's page tables.

    With the keyword ``fp8rl_q_is_ready`` q is what ``LayerKV.query`` returns (``kv_decode.py``).
    """
    mine, backend, layer = call.mine, call.backend, call.layer
    call.store()
    is_ready = call.kwargs.get("fp8rl_q_is_ready")
    q_NQD = call.q_NQD if is_ready else mine.query(call.q_NQD)
    lengths_B = backend.forward_metadata.cache_seqlens_int32
    table_BP = backend._get_layer_page_table(layer, call.forward_batch)
    pages = Pages(table_BP, backend.page_size, lengths_B)
    out_NQD = _paged_attention(call, q_NQD, pages)
    # a q that is ready may be in FP16
    return out_NQD.to(torch.bfloat16).flatten(1) if is_ready else call.flat(out_NQD)


def _paged_attention(call: Call, q_NQD: torch.Tensor, pages: Pages) -> torch.Tensor:
    mine = call.mine
    codes, workspace = mine.codes(call.caches), mine.scales.decode_workspace
    if workspace is None:  # a CPU
        return attend(q_NQD, codes, pages, *call.scores)
    from sgl_fp8rl.ops.paged_decode_cuda import attend as attend_on_gpu

    # with the first layer of a step, in a captured graph, too; or where two batches take turns
    if mine.layer_index == 0 or workspace.planned is not pages.lengths_B:
        workspace.plan(pages.lengths_B)
    q = q_NQD.to(torch.float16 if codes.token_scales_HS is not None else torch.bfloat16)
    return attend_on_gpu(q, codes, pages, workspace, *call.scores)


HOOKS: dict[str, dict[str, Hook]] = {
    "torch_native": {"extend": folded_extend, "decode": folded_decode},
    "flashinfer": {"extend": folded_extend, "decode": folded_decode},
    FA3: {"extend": fa3_extend},
    TRTLLM_MHA: {"decode": paged_decode},
}
"""What is put around ``forward_extend`` and ``forward_decode``, by SGLang's name of the backend, as
in ``backends.BACKENDS``."""
