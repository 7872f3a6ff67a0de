"""What our hooks read, call and set on SGLang's own objects, so that ``doctor`` sees it go."""

from sgl_fp8rl.engine.compat.hook_targets import (
    ATTENTION_BACKENDS,
    FA3_METADATA,
    MLA_PLANNER,
    PLANNER,
)

_MANAGERS = "sglang.srt.managers"
_LAYERS = "sglang.srt.layers"
_CAPTURER = "sglang.srt.state_capturer.base"
_FORWARD = "sglang.srt.model_executor"
_MODELS = "sglang.srt.models"
_WARMUP = f"{_LAYERS}.deep_gemm_wrapper.compile_utils"

METHODS = (
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager._dispatch_to_scheduler",
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager._update_weight_version_if_provided",
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager.auto_create_handle_loop",
    f"{_MANAGERS}.scheduler.Scheduler.is_fully_idle",
    f"{_MANAGERS}.scheduler.Scheduler.flush_cache",
    f"{_MANAGERS}.scheduler.Scheduler.abort_request",
    f"{_MANAGERS}.scheduler.Scheduler.pause_generation",
    f"{_MANAGERS}.scheduler.Scheduler.continue_generation",
    "sglang.srt.plugins.hook_registry.HookRegistry._apply_target",
    "sglang.srt.model_loader.loader.DefaultModelLoader._prepare_weights",
    "sglang.srt.model_loader.loader.DefaultModelLoader.Source",
    f"{_LAYERS}.quantization.fp8.Fp8MoEMethod.is_deepgemm_moe_runner_backend_enabled",
    f"{_WARMUP}.ENABLE_JIT_DEEPGEMM",
    f"{_WARMUP}._BUILTIN_M_LIST",
    f"{_WARMUP}._ENABLE_JIT_DEEPGEMM_PRECOMPILE",
    f"{_WARMUP}._IN_PRECOMPILE_STAGE",
    f"{_WARMUP}._IS_FIRST_RANK_ON_NODE",
)
"""Called, read or set, not wrapped; the plugin does not register without them."""

_DECODED = "attn head_dim num_heads num_kv_heads o_proj qkv_proj rotary_emb"
ATTRIBUTES: dict[str, str] = {
    # main process
    "sglang.srt.entrypoints.engine.Engine": (
        "async_generate loop send_to_rpc server_args server_args_class tokenizer_manager"
    ),
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager": (
        "event_loop is_pause is_pause_cond last_receive_tstamp server_args server_status "
        "signal_handler_class tokenizer"
    ),
    f"{_MANAGERS}.tokenizer_manager.ServerStatus": "Starting",
    f"{_MANAGERS}.tokenizer_manager.SignalHandler": "running_phase_sigquit_handler sigterm_handler",
    "sglang.srt.plugins.hook_registry.HookType": "AROUND",
    "sglang.srt.server_args.PortArgs": "rpc_ipc_name",
    "sglang.srt.server_args.ServerArgs": (
        "admin_api_key api_key attention_backend chunked_prefill_size "
        "cuda_graph_config "
        "decode_attention_backend device "
        "disable_cuda_graph enable_deterministic_inference "
        "enable_fused_moe_sum_all_reduce enable_hierarchical_cache enable_symm_mem "
        "grammar_backend kv_cache_dtype max_running_requests "
        "prefill_attention_backend quantization rl_on_policy_target sampling_backend"
    ),
    "sglang.srt.utils.auth.AuthLevel": "ADMIN_OPTIONAL",
    # requests and answers
    f"{_MANAGERS}.io_struct.AbortReq": "abort_all finished_reason rid",
    f"{_MANAGERS}.io_struct.CheckWeightsReqInput": "action",
    f"{_MANAGERS}.io_struct.ContinueGenerationReqInput": "torch_empty_cache",
    f"{_MANAGERS}.io_struct.GenerateReqInput": "rid sampling_params",
    f"{_MANAGERS}.io_struct.PauseGenerationReqInput": "mode",
    f"{_MANAGERS}.io_struct.ReleaseMemoryOccupationReqInput": "tags",
    f"{_MANAGERS}.io_struct.ResumeMemoryOccupationReqInput": "tags",
    f"{_MANAGERS}.io_struct.RpcReqInput": "method parameters",
    f"{_MANAGERS}.io_struct.RpcReqOutput": "message success",
    f"{_MANAGERS}.io_struct.TokenizedEmbeddingReqInput": "input_ids mm_inputs rid time_stats",
    f"{_MANAGERS}.io_struct.TokenizedGenerateReqInput": (
        "extra_key input_embeds input_ids mm_inputs rid time_stats"
    ),
    # scheduler
    f"{_MANAGERS}.scheduler.Scheduler": (
        "_engine_paused _pending_chunked_abort_req enable_hierarchical_cache grammar_manager "
        "ipc_channels max_queued_requests model_config page_size server_args "
        "token_to_kv_pool_allocator tp_group tp_worker waiting_queue"
    ),
    f"{_MANAGERS}.scheduler_components.ipc_channels.SchedulerIpcChannels": (
        "recv_from_rpc send_to_tokenizer"
    ),
    f"{_MANAGERS}.scheduler_components.output_sender.SenderWrapper": "send_output",
    f"{_MANAGERS}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager": (
        "offload_tags scheduler tp_worker"
    ),
    f"{_MANAGERS}.tp_worker.TpModelWorker": "model_runner",
    f"{_MANAGERS}.schedule_batch.Req": (
        "finished inflight_middle_chunks input_embeds is_retracted origin_input_ids output_ids rid "
        "sampling_params to_finish"
    ),
    f"{_MANAGERS}.schedule_batch.ScheduleBatch": "reqs",
    f"{_MANAGERS}.utils.GenerationBatchResult": "logits_output",
    f"{_MANAGERS}.mm_utils.init_mm_embedding_cache": "embedding_cache",
    "sglang.srt.constrained.grammar_manager.GrammarManager": "grammar_queue",
    "sglang.srt.distributed.parallel_state.GroupCoordinator": (
        "cpu_group device_group rank_in_group ranks world_size"
    ),
    "sglang.srt.mem_cache.allocator.TokenToKVPoolAllocator": "available_size",
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool": (
        "get_key_buffer get_kv_buffer kv_cache_layout memory_saver_adapter size start_layer"
    ),
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool": "req_to_token size",
    "sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter": "region",
    "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry": (
        "register"
    ),
    "sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods"
    ".AttnForwardMethod": "MLA",
    "sglang.srt.platforms.device_mixin.DeviceMixin": "_enum",
    "sglang.srt.platforms.device_mixin.PlatformEnum": "OOT",
    # loading
    "sglang.srt.configs.load_config.LoadConfig": "load_format",
    "sglang.srt.configs.load_config.LoadFormat": "AUTO DUMMY SAFETENSORS",
    "sglang.srt.configs.model_config.AttentionArch": "MLA",
    "sglang.srt.configs.model_config.ModelConfig": (
        "attention_arch dtype get_num_kv_heads get_total_num_kv_heads hf_config "
        "is_hybrid_swa quantization vocab_size"
    ),
    "sglang.srt.model_loader.loader.DefaultModelLoader": "load_model load_weights_and_postprocess",
    "sglang.srt.model_loader.loader.DefaultModelLoader.Source": "init_new model_or_path revision",
    # forward pass
    f"{_FORWARD}.cuda_graph_config.CudaGraphConfig": "prefill",
    f"{_FORWARD}.cuda_graph_config.PhaseConfig": "backend",
    f"{_FORWARD}.model_runner.ModelRunner": (
        "decode_attention_backend_str gpu_id model model_config page_size "
        "prefill_attention_backend_str req_to_token_pool server_args token_to_kv_pool"
    ),
    f"{_FORWARD}.forward_batch_info.ForwardBatch": (
        "extend_seq_lens_cpu forward_mode out_cache_loc req_pool_indices rids seq_lens seq_lens_cpu"
    ),
    f"{_FORWARD}.forward_batch_info.ForwardMode": "is_decode is_extend",
    # layers, and what computes in them
    f"{_LAYERS}.quantization.fp8.Fp8LinearMethod": (
        "process_weights_after_loading w8a8_block_fp8_linear weight_scale_inv"
    ),
    f"{_LAYERS}.quantization.fp8.Fp8MoEMethod": (
        "process_weights_after_loading runner w13_weight w13_weight_bias w13_weight_scale_inv "
        "w2_weight w2_weight_scale_inv"
    ),
    f"{_LAYERS}.quantization.unquant.UnquantizedLinearMethod": "create_weights",
    f"{_LAYERS}.linear.LinearBase": "params_dtype quant_method",
    f"{_LAYERS}.linear.ColumnParallelLinear": "weight_loader",
    f"{_LAYERS}.linear.QKVParallelLinear": "num_kv_head_replicas",
    f"{_LAYERS}.linear.RowParallelLinear": "weight_loader",
    f"{_LAYERS}.quantization.fp8.Fp8Config": "ignored_layers",
    f"{_LAYERS}.quantization.fp8_utils.Fp8GemmRunnerBackend": "is_auto",
    f"{_LAYERS}.layernorm.RMSNorm": (
        "_forward_method cast_x_before_out_mul forward_cuda fp32_residual override_orig_dtype "
        "variance_epsilon variance_size_override weight"
    ),
    f"{_LAYERS}.activation.SiluAndMul": "_forward_method forward_cuda",
    f"{_LAYERS}.rotary_embedding.RotaryEmbedding": (
        "cos_sin_cache forward forward_cuda head_size is_neox_style rotary_dim use_fallback_kernel"
    ),
    f"{_LAYERS}.vocab_parallel_embedding.VocabParallelEmbedding": (
        "embedding_dim org_vocab_size weight"
    ),
    # MLA
    f"{_MODELS}.deepseek_v2.DeepseekV2AttentionMLA": "w_kc w_vc",
    f"{_MODELS}.deepseek_v2.DeepseekV2ForCausalLM": "post_load_weights",
    f"{_MODELS}.deepseek_v2.DeepseekV2MoE": "alt_stream experts shared_experts",
    # experts
    f"{_LAYERS}.moe.fused_moe_triton.FusedMoE": (
        "hidden_size intermediate_size_per_partition layer_id moe_runner_config moe_tp_rank "
        "moe_tp_size num_experts num_fused_shared_experts quant_method use_flashinfer_trtllm_moe "
        "use_triton_kernels with_bias"
    ),
    f"{_LAYERS}.moe.moe_runner.base.MoeRunnerConfig": (
        "activation apply_router_weight_on_input gemm1_alpha gemm1_clamp_limit inplace "
        "intermediate_size_per_partition is_gated no_combine num_experts num_local_experts "
        "routed_scaling_factor swiglu_limit top_k"
    ),
    f"{_LAYERS}.moe.moe_runner.runner.MoeRunner": "fused_func runner_backend",
    f"{_LAYERS}.moe.utils.MoeRunnerBackend": "is_triton",
    f"{_LAYERS}.moe.token_dispatcher.standard.StandardDispatchOutput": "hidden_states topk_output",
    f"{_CAPTURER}.BaseDeviceCache": "buffer",
    f"{_CAPTURER}.BaseHostCache": "_log_allocation buffer name num_layers num_tokens topk_size",
    f"{_CAPTURER}.BaseTopkCapturer": "device_cache num_layers topk_size",
    f"{_CAPTURER}.TopkCaptureOutput": "topk",
    # sampling
    f"{_LAYERS}.logits_processor.LogitsProcessorOutput": (
        "customized_info next_token_logits next_token_logprobs"
    ),
    f"{_LAYERS}.sampler.Sampler": (
        "_preprocess_logits _sync_token_ids_across_tp enable_deterministic "
        "rl_on_policy_target use_ascend_backend"
    ),
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo": (
        "is_all_greedy need_min_p_sampling need_top_k_sampling need_top_p_sampling "
        "return_sampling_masks sampling_seed temperatures"
    ),
    "sglang.srt.sampling.sampling_params.SamplingParams": "max_new_tokens",
    # attention
    f"{_LAYERS}.radix_attention.AttentionType": "DECODER ENCODER_ONLY",
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
    f"{_LAYERS}.attention.flashinfer_backend.PrefillMetadata": "use_ragged",
    PLANNER: "call_begin_forward",
    MLA_PLANNER: "call_begin_forward",
    ATTENTION_BACKENDS["fa3"]: (
        "forward_extend forward_metadata num_splits page_size token_to_kv_pool"
    ),
    FA3_METADATA: "page_table",
    ATTENTION_BACKENDS["trtllm_mha"]: (
        "_get_layer_page_table forward_decode forward_metadata page_size token_to_kv_pool"
    ),
    f"{_LAYERS}.attention.trtllm_mha_backend.TRTLLMMHAMetadata": "cache_seqlens_int32",
    f"{_MODELS}.llama.LlamaAttention": _DECODED,
    f"{_MODELS}.qwen2.Qwen2Attention": _DECODED,
    f"{_MODELS}.qwen3.Qwen3Attention": f"{_DECODED} k_norm q_norm",
    f"{_MODELS}.qwen3_moe.Qwen3MoeAttention": f"{_DECODED} k_norm q_norm use_fused_qk_norm_rope",
}
"""By class, or function whose globals are meant: what we read and set on it, separated by spaces.
Most comes to be as SGLang runs, so ``check_attributes`` looks at its code."""

IN_SCHEDULER = {
    f"{_MANAGERS}.scheduler.Scheduler": "",
    f"{_MANAGERS}.scheduler_components.ipc_channels.SchedulerIpcChannels": "ipc_channels",
    f"{_MANAGERS}.tp_worker.TpModelWorker": "tp_worker",
    "sglang.srt.constrained.grammar_manager.GrammarManager": "grammar_manager",
    "sglang.srt.distributed.parallel_state.GroupCoordinator": "tp_group",
    "sglang.srt.mem_cache.allocator.TokenToKVPoolAllocator": "token_to_kv_pool_allocator",
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool": "tp_worker.model_runner.req_to_token_pool",
    f"{_FORWARD}.model_runner.ModelRunner": "tp_worker.model_runner",
    f"{_LAYERS}.sampler.Sampler": "tp_worker.model_runner.sampler",
    "sglang.srt.configs.model_config.ModelConfig": "model_config",
}
"""Owners of ``ATTRIBUTES`` whose objects an engine has, and where in its scheduler."""
IN_TOKENIZER_MANAGER = {f"{_MANAGERS}.tokenizer_manager.TokenizerManager": ""}

NEWER_ATTRIBUTES: dict[str, str] = {
    "sglang.srt.server_args.ServerArgs": "_launch_command",
    f"{_MANAGERS}.scheduler.Scheduler": "record_weight_version_change",
    f"{_LAYERS}.activation.SiluAndMul": "_resolve_forward_method",
    f"{_LAYERS}.layernorm.RMSNorm": "_resolve_forward_method",
    f"{_LAYERS}.moe.moe_runner.base.MoeRunnerConfig": "silu_mul_keep_fp32",
    f"{_MODELS}.qwen3.Qwen3Attention": "use_fused_qk_norm_rope",
}
"""As ``ATTRIBUTES``, from the newest tested version on; hooks do without them in others."""

SAMPLING_FIELDS = (
    "acc_additive_penalties acc_scaling_penalties bootstrap_room_ids_int "
    "custom_logit_processor custom_params device grammar_mask grammars "
    "has_custom_logit_processor has_watermark_candidates is_all_greedy is_any_greedy "
    "logit_bias max_top_k min_ps need_min_p_sampling need_top_k_sampling "
    "need_top_p_sampling npu_top_k_top_p_eligible penalizer_orchestrator "
    "return_sampling_masks return_sampling_support_logprobs rids_int "
    "sampling_mask_batch_indices sampling_mask_max_top_k sampling_mask_top_ks sampling_seed "
    "sampling_support_logprobs_capture_indices temperatures top_ks top_ps vocab_size "
    "watermark_candidates_host watermark_context_windows watermark_enabled watermark_keys"
)
"""Of ``SamplingBatchInfo`` in the tested versions: our sampler knows which of them shape a draw."""
