"""SGLang's symbols that we import, as ``module:name`` by our names for them."""

from sgl_fp8rl.engine.compat.hook_targets import STOCK_UPDATES

_QUANTIZATION = "srt.layers.quantization"
_BY_MODULE = {
    # plugin framework
    "srt.plugins": "load_plugins",
    "srt.plugins.hook_registry": "HookRegistry HookType",
    "srt.runtime_context": "get_exec get_model_args=get_model get_schedule publish",
    "srt.server_args": "ServerArgs add_quantization_method_choices",
    "srt.arg_groups.overrides": "resolved_view",
    "srt.environ": "RUST_SERVER=envs.SGLANG_RUST_SERVER",
    # quantization
    _QUANTIZATION: "BASE_QUANTIZATION_METHODS QUANTIZATION_METHODS",
    f"{_QUANTIZATION}.fp8": "Fp8Config Fp8LinearMethod Fp8MoEMethod",
    f"{_QUANTIZATION}.unquant": "UnquantizedLinearMethod UnquantizedFusedMoEMethod",
    "srt.layers.linear": "LinearBase WEIGHT_LOADER_V2_SUPPORTED",
    "srt.layers.moe.fused_moe_triton": "FusedMoE",
    "srt.layers.moe.token_dispatcher": "StandardCombineInput",
    "srt.model_executor.model_runner_components.weight_updater": (
        "derived_weight_cache_error=_unsupported_derived_weight_cache_error"
    ),
    # GEMMs and what feeds them
    "srt.layers.deep_gemm_wrapper": "deep_gemm_warmup=compile_utils",
    "srt.layers.deep_gemm_wrapper.entrypoint": "deep_gemm_nt=gemm_nt_f8f8bf16",
    f"{_QUANTIZATION}.fp8_utils": (
        "deep_gemm_linear=deepgemm_w8a8_block_fp8_linear_with_fallback get_fp8_gemm_runner_backend "
        "triton_block_fp8_matmul=w8a8_block_fp8_matmul_triton"
    ),
    "srt.layers.moe.moe_runner.triton_utils": "moe_align_block_size try_get_optimal_moe_config",
    "kernels.ops.moe.fused_moe_triton_kernels": "invoke_fused_moe_kernel",
    "srt.layers.activation": "SiluAndMul",
    "srt.layers.layernorm": "RMSNorm",
    "srt.batch_invariant_ops": "is_batch_invariant_mode_enabled",
    # embeddings of images and of tokens
    "srt.managers.mm_utils": "init_mm_embedding_cache",
    "srt.layers.vocab_parallel_embedding": "Embedding=VocabParallelEmbedding",
    # attention and KV cache
    "srt.layers.radix_attention": "AttentionType RadixAttention",
    "srt.layers.rotary_embedding": "RotaryEmbedding",
    "srt.model_executor.forward_context": "get_token_to_kv_pool",
    "srt.mem_cache.allocator": "TokenToKVPoolAllocator",
    "srt.mem_cache.memory_pool": "MHATokenToKVPool MLATokenToKVPool",
    "kernels.ops.attention.flash_attention": "flash_attn_varlen_func",
    "srt.constants": "GPU_MEMORY_ALL_TYPES GPU_MEMORY_TYPE_KV_CACHE HEALTH_CHECK_RID_PREFIX",
    # loading
    "srt.distributed": "get_tp_group",
    "srt.configs.model_config": "AttentionArch is_deepseek_dsa",
    "srt.configs.load_config": "LoadFormat",
    "srt.model_loader.loader": "DefaultModelLoader DummyModelLoader",
    # serving
    "srt.entrypoints.engine": "Engine",
    "srt.entrypoints.http_server": "http_app=app",
    "srt.utils.auth": "AuthLevel auth_level",
    "srt.utils.network": "get_zmq_socket",
    "srt.managers.schedule_batch": "FINISH_ABORT",
    "srt.managers.schedule_policy": "CLIP_MAX_NEW_TOKENS",
    "srt.managers.io_struct": (
        "AbortReq AttachHiCacheStorageReqOutput CheckWeightsReqOutput ContinueGenerationReqInput "
        "PauseGenerationReqInput ReleaseMemoryOccupationReqOutput ResumeMemoryOccupationReqOutput "
        "RpcReqInput RpcReqOutput msgpack_decode msgpack_encode sock_recv sock_send "
        + " ".join(STOCK_UPDATES.values())
    ),
    # sampling
    "srt.sampling.sampling_batch_info": "SamplingBatchInfo",
    "srt.sampling.sampling_params": "SamplingParams",
    "srt.layers.sampler": "RETURN_ORIGINAL_LOGPROB=SGLANG_RETURN_ORIGINAL_LOGPROB Sampler",
    "srt.utils.async_probe": "sanitize_nan_logits",
    "srt.state_capturer.routed_experts": "get_global_experts_capturer",
    # CPU platform
    "srt.platforms": "current_platform",
    "srt.platforms.cpu": "CpuDeviceMixin",
    "srt.platforms.device_mixin": "PlatformEnum",
    "srt.platforms.interface": "SRTPlatform",
    "srt.models.deepseek_common.attention_backend_handler": "AttentionBackendRegistry",
    "srt.models.deepseek_common.attention_forward_methods.forward_methods": "AttnForwardMethod",
}
"""Names in each module of SGLang; ``ours=theirs`` where we have another."""
SYMBOLS = {
    name.partition("=")[0]: f"sglang.{module}:{name.rpartition('=')[2]}"
    for module, names in _BY_MODULE.items()
    for name in names.split()
}
