"""SGLang's functions that our hooks wrap; its hook registry resolves these paths itself."""

_MANAGERS = "srt.managers"
_COMPONENTS = f"{_MANAGERS}.scheduler_components"
_UPDATER = f"{_COMPONENTS}.weight_updater.SchedulerWeightUpdaterManager"
_KV = "srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_BY_OWNER = {
    # in each process of SGLang
    "srt.server_args.ServerArgs": "add_cli_args from_cli_args",
    "srt.runtime_context": "publish",
    # the rest in those of an engine of ours: loading
    "srt.configs.model_config.ModelConfig": "_verify_quantization",
    "srt.configs.update_config": "adjust_config_with_unaligned_cpu_tp",
    "srt.distributed.parallel_state": "init_model_parallel_group",
    "srt.model_loader.loader": "_initialize_model get_model_loader",
    "srt.model_loader.utils": "get_model_architecture",
    # the model, its KV cache and the sampler
    "srt.model_executor.model_runner.ModelRunner": (
        "forward init_attention_backends maybe_precompile_model_kernels_after_loading sample"
    ),
    "srt.model_executor.pool_configurator.DefaultPoolConfigurator": "_compute_cell_size",
    _KV: "_profile_available_bytes configure",
    "srt.layers.sampler.Sampler": "forward",
    "srt.state_capturer.base.BaseHostCache": "__init__",
    "srt.state_capturer.base.BaseTopkCapturer": "on_forward_end",
    # the scheduler
    f"{_MANAGERS}.scheduler.Scheduler": (
        "__init__ attach_hicache_storage_wrapped continue_generation handle_embedding_request "
        "handle_generate_request handle_rpc_request process_input_requests"
    ),
    f"{_COMPONENTS}.batch_result_processor.SchedulerBatchResultProcessor": (
        "process_batch_result_decode process_batch_result_prefill"
    ),
    f"{_COMPONENTS}.output_streamer.SchedulerOutputStreamer": "stream_output",
    _UPDATER: "check_weights release_memory_occupation resume_memory_occupation",
    "srt.utils.torch_memory_saver_adapter._TorchMemorySaverAdapterReal": "pause",
    # the main process
    "srt.entrypoints.engine.Engine": "release_memory_occupation shutdown",
    "srt.entrypoints.http_server": "_setup_and_run_http_server",
    f"{_MANAGERS}.tokenizer_control_mixin.TokenizerControlMixin": (
        "release_memory_occupation resume_memory_occupation"
    ),
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager": "_create_tokenized_object generate_request",
}
"""Functions of each class or module of SGLang."""
HOOK_TARGETS = {
    f"{owner.rpartition('.')[2]}.{name}": f"sglang.{owner}.{name}"
    for owner, names in _BY_OWNER.items()
    for name in names.split()
}
"""Paths by their last two parts, such as ``Scheduler.handle_rpc_request``."""

# SGLang's own ways to change weights: on an fp8rl engine each would cast BF16 into FP8 storage.
UPDATER = f"sglang.{_UPDATER}"
STOCK_UPDATES = {
    f"{UPDATER}.update_weights_from_disk": "UpdateWeightFromDiskReqOutput",
    f"{UPDATER}.update_weights_from_distributed": "UpdateWeightsFromDistributedReqOutput",
    f"{UPDATER}.update_weights_from_tensor": "UpdateWeightsFromTensorReqOutput",
    f"{UPDATER}.update_weights_from_ipc": "UpdateWeightsFromIPCReqOutput",
}
"""Hook target and the class of its answer."""
NEWER_UPDATES = {
    f"{UPDATER}.begin_weight_update": "BeginWeightUpdateReqOutput",
    f"{UPDATER}.end_weight_update": "EndWeightUpdateReqOutput",
}
"""As ``STOCK_UPDATES``, of versions after 0.5.17."""
HARMLESS_UPDATES = (
    *("destroy_weights_update_group", "init_weights_update_group", "get_weights_by_name"),
    *("flush_cache_after_weight_update", "record_weight_version_after_update"),
    *("save_remote_model", "save_sharded_model"),
)
"""Methods of SGLang's weight updater that change no weights and are not wrapped."""
_KERNELS = "sglang.kernels.ops"
# Wrapped on the CPU platform.
SHARED_EXPERT_GATE = f"{_KERNELS}.elementwise.elementwise.fused_gate_sigmoid_mul_add"
LOGITS_CAP = f"{_KERNELS}.activation.softcap.softcap_inplace_logits"
TRITON_LAUNCH = "triton.runtime.jit.KernelInterface.__getitem__"
XGRAMMAR_MASK = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask"
"""Not wrapped: older versions have kernels for GPUs alone."""
_MODELS = "sglang.srt.models"
# Wrapped where the model at hand has them; subclasses have other ways.
DECODED_ATTENTION = (
    f"{_MODELS}.llama.LlamaAttention.forward",
    f"{_MODELS}.qwen2.Qwen2Attention.forward",
    f"{_MODELS}.qwen3.Qwen3Attention.forward",
    f"{_MODELS}.qwen3_moe.Qwen3MoeAttention.forward",
)
"""Attention modules that project, norm, rotate and attend, and do nothing else in a decode step."""
_ATTENTION = "sglang.srt.layers.attention"
# Wrapped where they serve an FP8 KV cache: importing FlashInfer takes seconds.
ATTENTION_BACKENDS = {
    "torch_native": f"{_ATTENTION}.torch_native_backend.TorchNativeAttnBackend",
    "flashinfer": f"{_ATTENTION}.flashinfer_backend.FlashInferAttnBackend",
    "fa3": f"{_ATTENTION}.flashattention_backend.FlashAttentionBackend",
    "trtllm_mha": f"{_ATTENTION}.trtllm_mha_backend.TRTLLMHAAttnBackend",
}
"""Class by SGLang's name of the backend."""
FA3_METADATA = f"{_ATTENTION}.flashattention_backend.FlashAttentionMetadata"
FROM_SOURCE = frozenset({ATTENTION_BACKENDS["fa3"], FA3_METADATA})
"""Classes that cannot be imported without a GPU: ``check_attributes`` reads their source."""
PLANNER = f"{_ATTENTION}.flashinfer_backend.FlashInferIndicesUpdaterDecode"
MLA_PLANNER = f"{_ATTENTION}.flashinfer_mla_backend.FlashInferMLAIndicesUpdaterDecode"
FLASHINFER_PLANS = (f"{PLANNER}.call_begin_forward", f"{MLA_PLANNER}.call_begin_forward")
"""Wrapped where FlashInfer decodes."""
