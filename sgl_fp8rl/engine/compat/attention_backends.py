"""SGLang's attention backends that an FP8 KV cache wraps, and what their hooks use."""

_ATTENTION = "sglang.srt.layers.attention"

# Wrapped where they serve an FP8 KV cache: importing FlashInfer takes seconds.
ATTENTION_BACKENDS = {
    "torch_native": f"{_ATTENTION}.torch_native_backend.TorchNativeAttnBackend",
    "flashinfer": f"{_ATTENTION}.flashinfer_backend.FlashInferAttnBackend",
    "fa3": f"{_ATTENTION}.flashattention_backend.FlashAttentionBackend",
    "trtllm_mha": f"{_ATTENTION}.trtllm_mha_backend.TRTLLMHAAttnBackend",
}
"""Class by SGLang's name of the backend."""
_FA3_METADATA = f"{_ATTENTION}.flashattention_backend.FlashAttentionMetadata"
FROM_SOURCE = frozenset({ATTENTION_BACKENDS["fa3"], _FA3_METADATA})
"""Classes that cannot be imported without a GPU: ``check_attributes`` reads their source."""
_PLANNER = f"{_ATTENTION}.flashinfer_backend.FlashInferIndicesUpdaterDecode"
_MLA_PLANNER = f"{_ATTENTION}.flashinfer_mla_backend.FlashInferMLAIndicesUpdaterDecode"
FLASHINFER_PLANS = (f"{_PLANNER}.call_begin_forward", f"{_MLA_PLANNER}.call_begin_forward")
"""Wrapped where FlashInfer decodes."""

ATTRIBUTES: dict[str, str] = {
    "sglang.srt.layers.radix_attention.RadixAttention": (
        "attn_type head_dim is_cross_attention layer_id logit_cap qk_head_dim scaling "
        "sliding_window_size tp_k_head_num tp_q_head_num tp_v_head_num use_irope v_head_dim"
    ),
    ATTENTION_BACKENDS["torch_native"]: (
        "forward_decode forward_extend forward_metadata req_to_token_pool token_to_kv_pool"
    ),
    ATTENTION_BACKENDS["flashinfer"]: (
        "forward_decode forward_extend forward_metadata token_to_kv_pool"
    ),
    f"{_ATTENTION}.flashinfer_backend.PrefillMetadata": "use_ragged",
    _PLANNER: "call_begin_forward",
    _MLA_PLANNER: "call_begin_forward",
    ATTENTION_BACKENDS["fa3"]: (
        "forward_extend forward_metadata num_splits page_size token_to_kv_pool"
    ),
    _FA3_METADATA: "page_table",
    ATTENTION_BACKENDS["trtllm_mha"]: (
        "_get_layer_page_table forward_decode forward_metadata page_size token_to_kv_pool"
    ),
    f"{_ATTENTION}.trtllm_mha_backend.TRTLLMMHAMetadata": "cache_seqlens_int32",
}
"""As in ``attributes.py``."""
