"""SGLang's symbols that we import, by our names for them, as ``module:name``."""

from sgl_fp8rl.engine.compat.hook_targets import STOCK_UPDATES

SYMBOLS = {
    # plugin framework
    "HookRegistry": "sglang.srt.plugins.hook_registry:HookRegistry",
    "HookType": "sglang.srt.plugins.hook_registry:HookType",
    "load_plugins": "sglang.srt.plugins:load_plugins",
    "add_quantization_method_choices": "sglang.srt.server_args:add_quantization_method_choices",
    # quantization
    "BASE_QUANTIZATION_METHODS": "sglang.srt.layers.quantization:BASE_QUANTIZATION_METHODS",
    "QUANTIZATION_METHODS": "sglang.srt.layers.quantization:QUANTIZATION_METHODS",
    "WEIGHT_LOADER_V2_SUPPORTED": "sglang.srt.layers.linear:WEIGHT_LOADER_V2_SUPPORTED",
    "LinearBase": "sglang.srt.layers.linear:LinearBase",
    "FusedMoE": "sglang.srt.layers.moe.fused_moe_triton:FusedMoE",
    "Fp8Config": "sglang.srt.layers.quantization.fp8:Fp8Config",
    "StandardCombineInput": "sglang.srt.layers.moe.token_dispatcher:StandardCombineInput",
    "derived_weight_cache_error": "sglang.srt.model_executor.model_runner_components"
    ".weight_updater:_unsupported_derived_weight_cache_error",
    # compiling
    "deep_gemm_linear": "sglang.srt.layers.quantization.fp8_utils:"
    "deepgemm_w8a8_block_fp8_linear_with_fallback",
    "deep_gemm_warmup": "sglang.srt.layers.deep_gemm_wrapper:compile_utils",
    "publish": "sglang.srt.runtime_context:publish",
    "get_schedule": "sglang.srt.runtime_context:get_schedule",
    # routed experts
    "get_global_experts_capturer": "sglang.srt.state_capturer.routed_experts"
    ":get_global_experts_capturer",
    # embeddings of images
    "init_mm_embedding_cache": "sglang.srt.managers.mm_utils:init_mm_embedding_cache",
    # embeddings of tokens
    "Embedding": "sglang.srt.layers.vocab_parallel_embedding:VocabParallelEmbedding",
    # KV cache
    "RadixAttention": "sglang.srt.layers.radix_attention:RadixAttention",
    "AttentionType": "sglang.srt.layers.radix_attention:AttentionType",
    "HEALTH_CHECK_RID_PREFIX": "sglang.srt.constants:HEALTH_CHECK_RID_PREFIX",
    "get_model_args": "sglang.srt.runtime_context:get_model",
    # decode step
    "get_exec": "sglang.srt.runtime_context:get_exec",
    "get_token_to_kv_pool": "sglang.srt.model_executor.forward_context:get_token_to_kv_pool",
    "RMSNorm": "sglang.srt.layers.layernorm:RMSNorm",
    "RotaryEmbedding": "sglang.srt.layers.rotary_embedding:RotaryEmbedding",
    "flash_attn_varlen_func": "sglang.kernels.ops.attention.flash_attention:flash_attn_varlen_func",
    # loading
    "get_tp_group": "sglang.srt.distributed:get_tp_group",
    "AttentionArch": "sglang.srt.configs.model_config:AttentionArch",
    "is_deepseek_dsa": "sglang.srt.configs.model_config:is_deepseek_dsa",
    "LoadFormat": "sglang.srt.configs.load_config:LoadFormat",
    "DefaultModelLoader": "sglang.srt.model_loader.loader:DefaultModelLoader",
    "DummyModelLoader": "sglang.srt.model_loader.loader:DummyModelLoader",
    # serving
    "ServerArgs": "sglang.srt.server_args:ServerArgs",
    "resolved_view": "sglang.srt.arg_groups.overrides:resolved_view",
    "RUST_SERVER": "sglang.srt.environ:envs.SGLANG_RUST_SERVER",
    "Engine": "sglang.srt.entrypoints.engine:Engine",
    "http_app": "sglang.srt.entrypoints.http_server:app",
    "AttachHiCacheStorageReqOutput": "sglang.srt.managers.io_struct:AttachHiCacheStorageReqOutput",
    "CheckWeightsReqOutput": "sglang.srt.managers.io_struct:CheckWeightsReqOutput",
    "auth_level": "sglang.srt.utils.auth:auth_level",
    "AuthLevel": "sglang.srt.utils.auth:AuthLevel",
    "FINISH_ABORT": "sglang.srt.managers.schedule_batch:FINISH_ABORT",
    "AbortReq": "sglang.srt.managers.io_struct:AbortReq",
    "PauseGenerationReqInput": "sglang.srt.managers.io_struct:PauseGenerationReqInput",
    "ContinueGenerationReqInput": "sglang.srt.managers.io_struct:ContinueGenerationReqInput",
    "CLIP_MAX_NEW_TOKENS": "sglang.srt.managers.schedule_policy:CLIP_MAX_NEW_TOKENS",
    "RpcReqInput": "sglang.srt.managers.io_struct:RpcReqInput",
    "RpcReqOutput": "sglang.srt.managers.io_struct:RpcReqOutput",
    "msgpack_encode": "sglang.srt.managers.io_struct:msgpack_encode",
    "msgpack_decode": "sglang.srt.managers.io_struct:msgpack_decode",
    "SamplingBatchInfo": "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo",
    "SamplingParams": "sglang.srt.sampling.sampling_params:SamplingParams",
    "sock_send": "sglang.srt.managers.io_struct:sock_send",
    "sock_recv": "sglang.srt.managers.io_struct:sock_recv",
    "get_zmq_socket": "sglang.srt.utils.network:get_zmq_socket",
    "Sampler": "sglang.srt.layers.sampler:Sampler",
    "sanitize_nan_logits": "sglang.srt.utils.async_probe:sanitize_nan_logits",
    "RETURN_ORIGINAL_LOGPROB": "sglang.srt.layers.sampler:SGLANG_RETURN_ORIGINAL_LOGPROB",
    # GEMMs and what feeds them
    "deep_gemm_nt": "sglang.srt.layers.deep_gemm_wrapper.entrypoint:gemm_nt_f8f8bf16",
    "triton_block_fp8_matmul": "sglang.srt.layers.quantization.fp8_utils"
    ":w8a8_block_fp8_matmul_triton",
    "get_fp8_gemm_runner_backend": "sglang.srt.layers.quantization.fp8_utils"
    ":get_fp8_gemm_runner_backend",
    "try_get_optimal_moe_config": "sglang.srt.layers.moe.moe_runner.triton_utils"
    ":try_get_optimal_moe_config",
    "moe_align_block_size": "sglang.srt.layers.moe.moe_runner.triton_utils:moe_align_block_size",
    "invoke_fused_moe_kernel": "sglang.kernels.ops.moe.fused_moe_triton_kernels"
    ":invoke_fused_moe_kernel",
    "SiluAndMul": "sglang.srt.layers.activation:SiluAndMul",
    "is_batch_invariant_mode_enabled": "sglang.srt.batch_invariant_ops"
    ":is_batch_invariant_mode_enabled",
    # CPU platform
    "current_platform": "sglang.srt.platforms:current_platform",
    "CpuDeviceMixin": "sglang.srt.platforms.cpu:CpuDeviceMixin",
    "PlatformEnum": "sglang.srt.platforms.device_mixin:PlatformEnum",
    "SRTPlatform": "sglang.srt.platforms.interface:SRTPlatform",
    "MHATokenToKVPool": "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool",
    "MLATokenToKVPool": "sglang.srt.mem_cache.memory_pool:MLATokenToKVPool",
    "AttentionBackendRegistry": "sglang.srt.models.deepseek_common.attention_backend_handler"
    ":AttentionBackendRegistry",
    "AttnForwardMethod": "sglang.srt.models.deepseek_common.attention_forward_methods"
    ".forward_methods:AttnForwardMethod",
    "TokenToKVPoolAllocator": "sglang.srt.mem_cache.allocator:TokenToKVPoolAllocator",
    # answers
    **{name: f"sglang.srt.managers.io_struct:{name}" for name in STOCK_UPDATES.values()},
    "GPU_MEMORY_TYPE_KV_CACHE": "sglang.srt.constants:GPU_MEMORY_TYPE_KV_CACHE",
    "GPU_MEMORY_ALL_TYPES": "sglang.srt.constants:GPU_MEMORY_ALL_TYPES",
    "ReleaseMemoryOccupationReqOutput": "sglang.srt.managers.io_struct"
    ":ReleaseMemoryOccupationReqOutput",
    "ResumeMemoryOccupationReqOutput": "sglang.srt.managers.io_struct"
    ":ResumeMemoryOccupationReqOutput",
}
