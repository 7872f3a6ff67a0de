"""SGLang's functions that our hooks wrap, but for attention backends; its hook registry resolves
these paths itself."""

_RESULTS = (
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
)
# In each process of SGLang.
HOOK_TARGETS = {
    "add_cli_args": "sglang.srt.server_args.ServerArgs.add_cli_args",
    "from_cli_args": "sglang.srt.server_args.ServerArgs.from_cli_args",
    "publish": "sglang.srt.runtime_context.publish",
}
# In those of an engine of ours.
HOOK_TARGETS |= {
    "verify_quantization": "sglang.srt.configs.model_config.ModelConfig._verify_quantization",
    "get_model_architecture": "sglang.srt.model_loader.utils.get_model_architecture",
    "get_model_loader": "sglang.srt.model_loader.loader.get_model_loader",
    "initialize_model": "sglang.srt.model_loader.loader._initialize_model",
    "init_model_parallel_group": "sglang.srt.distributed.parallel_state.init_model_parallel_group",
    "pad_for_amx": "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp",
    "precompile_kernels": "sglang.srt.model_executor.model_runner.ModelRunner"
    ".maybe_precompile_model_kernels_after_loading",
    "sample": "sglang.srt.model_executor.model_runner.ModelRunner.sample",
    "draw": "sglang.srt.layers.sampler.Sampler.forward",
    "take_up_prefill": f"{_RESULTS}.process_batch_result_prefill",
    "take_up_decode": f"{_RESULTS}.process_batch_result_decode",
    "stream_output": "sglang.srt.managers.scheduler_components.output_streamer"
    ".SchedulerOutputStreamer.stream_output",
    "handle_generate_request": "sglang.srt.managers.scheduler.Scheduler.handle_generate_request",
    "handle_embedding_request": "sglang.srt.managers.scheduler.Scheduler.handle_embedding_request",
    "handle_rpc_request": "sglang.srt.managers.scheduler.Scheduler.handle_rpc_request",
    "process_input_requests": "sglang.srt.managers.scheduler.Scheduler.process_input_requests",
    "run_http_server": "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
}
# SGLang's own ways to change weights: on an fp8rl engine each would cast BF16 into FP8 storage.
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
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
HARMLESS_UPDATES = frozenset(
    {
        "destroy_weights_update_group",
        "flush_cache_after_weight_update",
        "get_weights_by_name",
        "init_weights_update_group",
        "record_weight_version_after_update",
        "save_remote_model",
        "save_sharded_model",
    }
)
"""Methods of SGLang's weight updater that change no weights and are not wrapped."""
_MAIN = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
HOOK_TARGETS |= {
    "check_weights": f"{UPDATER}.check_weights",
    "attach_kv_storage": "sglang.srt.managers.scheduler.Scheduler.attach_hicache_storage_wrapped",
    "start_scheduler": "sglang.srt.managers.scheduler.Scheduler.__init__",
    "continue_generation": "sglang.srt.managers.scheduler.Scheduler.continue_generation",
    "release_memory": f"{UPDATER}.release_memory_occupation",
    "unmap_memory": "sglang.srt.utils.torch_memory_saver_adapter"
    "._TorchMemorySaverAdapterReal.pause",
    "release_of_engine": "sglang.srt.entrypoints.engine.Engine.release_memory_occupation",
    "shutdown": "sglang.srt.entrypoints.engine.Engine.shutdown",
    "release_from_main": f"{_MAIN}.release_memory_occupation",
    "resume_from_main": f"{_MAIN}.resume_memory_occupation",
    "resume_memory": f"{UPDATER}.resume_memory_occupation",
}
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
HOOK_TARGETS |= {
    "forward": f"{_RUNNER}.forward",
    "load_kv_scales": "sglang.srt.model_executor.model_runner_components.load_model_utils"
    ".load_kv_cache_scales",
    "init_attention_backends": f"{_RUNNER}.init_attention_backends",
    "configure_kv_cache": "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
    ".configure",
    "kv_memory": "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
    "._profile_available_bytes",
    "token_bytes": "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"
    "._compute_cell_size",
    "generate_request": "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
    "create_request": "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    "._create_tokenized_object",
    "host_cache_of_experts": "sglang.srt.state_capturer.base.BaseHostCache.__init__",
    "capture_of_experts": "sglang.srt.state_capturer.base.BaseTopkCapturer.on_forward_end",
}
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
