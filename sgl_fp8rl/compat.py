"""Every symbol of SGLang that we touch, looked up here, and every attribute that we write.

``compat.Fp8Config`` and the like resolve lazily, so importing this module loads no SGLang. A
symbol that an SGLang version moved or dropped ends in one error that names both.
"""

import importlib
import inspect
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from typing import Any

TESTED_VERSIONS = ("0.5.17", "0.5.23")
"""Passed the tests that need no GPU."""
GPU_TESTED_VERSIONS = ("0.5.17",)
"""Passed ``tests/gpu``; the last one bounds the extra ``sglang`` in pyproject.toml."""
INSTALL = f"pip install sglang=={GPU_TESTED_VERSIONS[-1]}"
"""What to run where SGLang is missing."""

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
    "Fp8LinearMethod": "sglang.srt.layers.quantization.fp8:Fp8LinearMethod",
    "Fp8MoEMethod": "sglang.srt.layers.quantization.fp8:Fp8MoEMethod",
    "UnquantizedLinearMethod": "sglang.srt.layers.quantization.unquant:UnquantizedLinearMethod",
    "UnquantizedFusedMoEMethod": "sglang.srt.layers.quantization.unquant:UnquantizedFusedMoEMethod",
    "StandardCombineInput": "sglang.srt.layers.moe.token_dispatcher:StandardCombineInput",
    # compiling
    "deep_gemm_linear": "sglang.srt.layers.quantization.fp8_utils:"
    "deepgemm_w8a8_block_fp8_linear_with_fallback",
    "deep_gemm_warmup": "sglang.srt.layers.deep_gemm_wrapper:compile_utils",
    "get_schedule": "sglang.srt.runtime_context:get_schedule",
    # routed experts
    "get_global_experts_capturer": "sglang.srt.state_capturer.routed_experts"
    ":get_global_experts_capturer",
    # embeddings of images
    "init_mm_embedding_cache": "sglang.srt.managers.mm_utils:init_mm_embedding_cache",
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
    # loading
    "get_tp_group": "sglang.srt.distributed:get_tp_group",
    "AttentionArch": "sglang.srt.configs.model_config:AttentionArch",
    "LoadFormat": "sglang.srt.configs.load_config:LoadFormat",
    "DefaultModelLoader": "sglang.srt.model_loader.loader:DefaultModelLoader",
    "DummyModelLoader": "sglang.srt.model_loader.loader:DummyModelLoader",
    # serving
    "ServerArgs": "sglang.srt.server_args:ServerArgs",
    "Engine": "sglang.srt.entrypoints.engine:Engine",
    "http_app": "sglang.srt.entrypoints.http_server:app",
    "AttachHiCacheStorageReqOutput": "sglang.srt.managers.io_struct:AttachHiCacheStorageReqOutput",
    "CheckWeightsReqOutput": "sglang.srt.managers.io_struct:CheckWeightsReqOutput",
    "auth_level": "sglang.srt.utils.auth:auth_level",
    "AuthLevel": "sglang.srt.utils.auth:AuthLevel",
    "AbortReq": "sglang.srt.managers.io_struct:AbortReq",
    "PauseGenerationReqInput": "sglang.srt.managers.io_struct:PauseGenerationReqInput",
    "ContinueGenerationReqInput": "sglang.srt.managers.io_struct:ContinueGenerationReqInput",
    "CLIP_MAX_NEW_TOKENS": "sglang.srt.managers.schedule_policy:CLIP_MAX_NEW_TOKENS",
    "RpcReqInput": "sglang.srt.managers.io_struct:RpcReqInput",
    "RpcReqOutput": "sglang.srt.managers.io_struct:RpcReqOutput",
    "sock_send": "sglang.srt.managers.io_struct:sock_send",
    "sock_recv": "sglang.srt.managers.io_struct:sock_recv",
    "get_zmq_socket": "sglang.srt.utils.network:get_zmq_socket",
    "Sampler": "sglang.srt.layers.sampler:Sampler",
    "RETURN_ORIGINAL_LOGPROB": "sglang.srt.layers.sampler:SGLANG_RETURN_ORIGINAL_LOGPROB",
    # GEMMs and what feeds them
    "deep_gemm_nt": "sglang.srt.layers.deep_gemm_wrapper.entrypoint:gemm_nt_f8f8bf16",
    "triton_block_fp8_matmul": "sglang.srt.layers.quantization.fp8_utils"
    ":w8a8_block_fp8_matmul_triton",
    "get_fp8_gemm_runner_backend": "sglang.srt.layers.quantization.fp8_utils"
    ":get_fp8_gemm_runner_backend",
    "cuda_graph_fully_disabled": "sglang.srt.model_executor.cuda_graph_config"
    ":cuda_graph_fully_disabled",
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
    "TokenToKVPoolAllocator": "sglang.srt.mem_cache.allocator:TokenToKVPoolAllocator",
}

# Functions that the plugin wraps; the hook registry resolves these paths itself.
HOOK_TARGETS = {
    "parse_server_args": "sglang.srt.server_args.prepare_server_args",
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
    "stream_output": "sglang.srt.managers.scheduler_components.output_streamer"
    ".SchedulerOutputStreamer.stream_output",
    "handle_generate_request": "sglang.srt.managers.scheduler.Scheduler.handle_generate_request",
    "handle_embedding_request": "sglang.srt.managers.scheduler.Scheduler.handle_embedding_request",
    "handle_rpc_request": "sglang.srt.managers.scheduler.Scheduler.handle_rpc_request",
    "process_input_requests": "sglang.srt.managers.scheduler.Scheduler.process_input_requests",
    "run_http_server": "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
}
# SGLang's own ways to change weights: on an fp8rl engine each would cast BF16 into FP8 storage.
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
STOCK_UPDATES = {
    f"{_UPDATER}.update_weights_from_disk": "UpdateWeightFromDiskReqOutput",
    f"{_UPDATER}.update_weights_from_distributed": "UpdateWeightsFromDistributedReqOutput",
    f"{_UPDATER}.update_weights_from_tensor": "UpdateWeightsFromTensorReqOutput",
    f"{_UPDATER}.update_weights_from_ipc": "UpdateWeightsFromIPCReqOutput",
}
"""Hook target and the class of its answer."""
NEWER_UPDATES = {
    f"{_UPDATER}.begin_weight_update": "BeginWeightUpdateReqOutput",
    f"{_UPDATER}.end_weight_update": "EndWeightUpdateReqOutput",
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
    "check_weights": f"{_UPDATER}.check_weights",
    "attach_kv_storage": "sglang.srt.managers.scheduler.Scheduler.attach_hicache_storage_wrapped",
    "start_scheduler": "sglang.srt.managers.scheduler.Scheduler.__init__",
    "continue_generation": "sglang.srt.managers.scheduler.Scheduler.continue_generation",
    "release_memory": f"{_UPDATER}.release_memory_occupation",
    "release_from_main": f"{_MAIN}.release_memory_occupation",
    "resume_from_main": f"{_MAIN}.resume_memory_occupation",
    "resume_memory": f"{_UPDATER}.resume_memory_occupation",
}
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
HOOK_TARGETS |= {
    "forward": f"{_RUNNER}.forward",
    "init_attention_backends": f"{_RUNNER}.init_attention_backends",
    "configure_kv_cache": "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
    ".configure",
    "generate_request": "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
    "host_cache_of_experts": "sglang.srt.state_capturer.base.BaseHostCache.__init__",
    "capture_of_experts": "sglang.srt.state_capturer.base.BaseTopkCapturer.on_forward_end",
}
_ATTENTION = "sglang.srt.layers.attention"
# Wrapped where they serve an FP8 KV cache: importing FlashInfer takes seconds.
ATTENTION_BACKENDS = {
    "torch_native": f"{_ATTENTION}.torch_native_backend.TorchNativeAttnBackend",
    "flashinfer": f"{_ATTENTION}.flashinfer_backend.FlashInferAttnBackend",
    "fa3": f"{_ATTENTION}.flashattention_backend.FlashAttentionBackend",
    "trtllm_mha": f"{_ATTENTION}.trtllm_mha_backend.TRTLLMHAAttnBackend",
}
"""Class by SGLang's name of the backend."""
FLASHINFER_PLAN = (
    f"{_ATTENTION}.flashinfer_backend.FlashInferIndicesUpdaterDecode.call_begin_forward"
)
"""Wrapped where FlashInfer decodes."""
_KERNELS = "sglang.kernels.ops"
# Wrapped on the CPU platform.
SHARED_EXPERT_GATE = f"{_KERNELS}.elementwise.elementwise.fused_gate_sigmoid_mul_add"
LOGITS_CAP = f"{_KERNELS}.activation.softcap.softcap_inplace_logits"
TRITON_LAUNCH = "triton.runtime.jit.KernelInterface.__getitem__"
_MODELS = "sglang.srt.models"
# Wrapped where the model at hand has them; subclasses have other ways.
DECODED_ATTENTION = (
    f"{_MODELS}.llama.LlamaAttention.forward",
    f"{_MODELS}.qwen2.Qwen2Attention.forward",
    f"{_MODELS}.qwen3.Qwen3Attention.forward",
    f"{_MODELS}.qwen3_moe.Qwen3MoeAttention.forward",
)
"""Attention modules that project, norm, rotate and attend, and do nothing else in a decode step."""
_WARMUP = "sglang.srt.layers.deep_gemm_wrapper.compile_utils"
# Called, read or set, not wrapped.
METHODS = (
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.auto_create_handle_loop",
    "sglang.srt.managers.scheduler.Scheduler.is_fully_idle",
    "sglang.srt.managers.scheduler.Scheduler.flush_cache",
    "sglang.srt.managers.scheduler.Scheduler.abort_request",
    "sglang.srt.managers.scheduler.Scheduler.pause_generation",
    "sglang.srt.managers.scheduler.Scheduler.continue_generation",
    "sglang.srt.model_loader.loader.DefaultModelLoader._prepare_weights",
    "sglang.srt.model_loader.loader.DefaultModelLoader.Source",
    "sglang.srt.layers.quantization.fp8.Fp8MoEMethod.is_deepgemm_moe_runner_backend_enabled",
    f"{_WARMUP}.ENABLE_JIT_DEEPGEMM",
    f"{_WARMUP}._BUILTIN_M_LIST",
    f"{_WARMUP}._ENABLE_JIT_DEEPGEMM_PRECOMPILE",
    f"{_WARMUP}._DO_COMPILE_ALL",
    f"{_WARMUP}._IN_PRECOMPILE_STAGE",
    f"{_WARMUP}._IS_FIRST_RANK_ON_NODE",
)
SYMBOLS |= {name: f"sglang.srt.managers.io_struct:{name}" for name in STOCK_UPDATES.values()}
SYMBOLS |= {
    "GPU_MEMORY_ALL_TYPES": "sglang.srt.constants:GPU_MEMORY_ALL_TYPES",
    "ReleaseMemoryOccupationReqOutput": "sglang.srt.managers.io_struct"
    ":ReleaseMemoryOccupationReqOutput",
    "ResumeMemoryOccupationReqOutput": "sglang.srt.managers.io_struct"
    ":ResumeMemoryOccupationReqOutput",
}
_MANAGERS = "sglang.srt.managers"
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    f"{_MANAGERS}.scheduler.Scheduler": (
        "waiting_queue",
        "grammar_manager",
        "max_queued_requests",
        "_engine_paused",
        "_pending_chunked_abort_req",
        "ipc_channels",
        "token_to_kv_pool_allocator",
        "tp_group",
        "tp_worker",
    ),
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager": (
        "is_pause",
        "is_pause_cond",
        "last_receive_tstamp",
        "server_status",
    ),
    "sglang.srt.constrained.grammar_manager.GrammarManager": ("grammar_queue",),
    "sglang.srt.layers.radix_attention.RadixAttention": ("k_scale", "v_scale"),
    f"{_MANAGERS}.io_struct.CheckWeightsReqInput": ("action",),
    f"{_MANAGERS}.io_struct.GenerateReqInput": ("rid",),
    f"{_MANAGERS}.io_struct.ReleaseMemoryOccupationReqInput": ("tags",),
    f"{_MANAGERS}.io_struct.ResumeMemoryOccupationReqInput": ("tags",),
    f"{_MANAGERS}.io_struct.TokenizedGenerateReqInput": ("extra_key",),
    "sglang.srt.entrypoints.engine.Engine": (
        "server_args_class",
        "tokenizer_manager",
        "send_to_rpc",
        "loop",
    ),
    "sglang.srt.server_args.ServerArgs": (
        "disable_cuda_graph",
        "device",
        "attention_backend",
        "sampling_backend",
    ),
    "sglang.srt.configs.load_config.LoadConfig": ("load_format",),
    "sglang.srt.configs.model_config.ModelConfig": ("quantization",),
    "sglang.srt.layers.linear.LinearBase": ("quant_method",),
    "sglang.srt.layers.layernorm.RMSNorm": ("_forward_method",),
    "sglang.srt.layers.activation.SiluAndMul": ("_forward_method",),
    "sglang.srt.layers.logits_processor.LogitsProcessorOutput": (
        "next_token_logprobs",
        "customized_info",
    ),
    "sglang.srt.layers.sampler.Sampler": ("_preprocess_logits", "_sync_token_ids_across_tp"),
    "sglang.srt.state_capturer.base.BaseHostCache": (
        "buffer",
        "num_tokens",
        "num_layers",
        "topk_size",
        "name",
        "_log_allocation",
    ),
    "sglang.srt.state_capturer.base.TopkCaptureOutput": ("topk",),
    f"{_ATTENTION}.trtllm_mha_backend.TRTLLMHAAttnBackend": (
        "_reshape_paged_kv_cache",
        "_get_layer_page_table",
        "forward_metadata",
        "is_xqa_impl",
        "workspace_buffer",
    ),
}
"""By class: attributes that our hooks set on the objects that they are given, and others that no
symbol above shows. Most come to be as SGLang runs, so ``check_attributes`` looks at its code."""


class IncompatibleSGLangError(RuntimeError):
    """The installed SGLang lacks something that sgl-fp8rl stands on."""


def sglang_version() -> str:
    """The installed SGLang's version.

    Raises:
        IncompatibleSGLangError: SGLang is not installed.
    """
    try:
        return version("sglang")
    except PackageNotFoundError:
        raise IncompatibleSGLangError(f"SGLang is not installed; run {INSTALL}") from None


def _look_up(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise IncompatibleSGLangError(
            f"SGLang {sglang_version()} has no {path.replace(':', '.')} ({error}); "
            f"sgl-fp8rl is tested with {' and '.join(TESTED_VERSIONS)}: install one of these"
        ) from error


def __getattr__(name: str) -> Any:
    if name in NEWER_UPDATES.values():
        return _look_up(f"{_MANAGERS}.io_struct:{name}")
    if name not in SYMBOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _look_up(SYMBOLS[name])


def _target_path(target: str) -> str:
    """``package.module.Class.method`` or ``package.module.function`` as ``module:first name``."""
    parts = target.split(".")
    first_class = next((i for i, part in enumerate(parts) if part[0].isupper()), len(parts) - 1)
    return ".".join(parts[:first_class]) + ":" + parts[first_class]


def check_symbols() -> list[tuple[str, bool]]:
    """Look up each symbol and hook target: ``(path, found)`` pairs."""
    checked = []
    for path in SYMBOLS.values():
        checked.append((path.replace(":", "."), _found(path)))
    for target in (*HOOK_TARGETS.values(), *STOCK_UPDATES, *METHODS):
        checked.append((target, _has(target)))
    return checked


def stock_updates() -> dict[str, str]:
    """SGLang's own ways to change weights that this version has, as in ``STOCK_UPDATES``."""
    return STOCK_UPDATES | {target: out for target, out in NEWER_UPDATES.items() if _has(target)}


def unknown_updates() -> list[str]:
    """Methods of SGLang's weight updater that this package does not know: they may change weights.

    Raises:
        IncompatibleSGLangError: SGLang has no such class.
    """
    updater = _look_up(_target_path(_UPDATER))
    known = {*HOOK_TARGETS.values(), *STOCK_UPDATES, *NEWER_UPDATES}
    return sorted(
        name
        for name, _ in inspect.getmembers(updater, inspect.isfunction)
        if not name.startswith("_")
        and name not in HARMLESS_UPDATES
        and f"{_UPDATER}.{name}" not in known
    )


def _has(target: str) -> bool:
    owner_path = _target_path(target)
    if not _found(owner_path) or target.endswith(owner_path.partition(":")[2]):
        return _found(owner_path)
    return hasattr(_look_up(owner_path), target.rpartition(".")[2])


def check_attributes() -> list[tuple[str, bool]]:
    """Look for each attribute in its class: ``(path, found)`` pairs. FlashInfer is imported."""
    checked = []
    for owner, names in ATTRIBUTES.items():
        path = ":".join(owner.rsplit(".", 1))
        known = _names_in(_look_up(path)) if _found(path) else set()
        checked += [(f"{owner}.{name}", name in known) for name in names]
    return checked


def _names_in(owner: type) -> set[str]:
    """What a class has, declares, or names in the code of its methods."""
    known = set(dir(owner))
    for base in owner.__mro__:
        known |= inspect.get_annotations(base).keys()
        for function in filter(inspect.isfunction, vars(base).values()):
            known |= {*inspect.unwrap(function).__code__.co_names}
    return known


def check_hooks(targets: Collection[str] = ()) -> None:
    """Check that every hook is in place: SGLang logs and forgets one that it cannot apply.

    Args:
        targets: default all of the plugin.

    Raises:
        IncompatibleSGLangError: a hook is not.
    """
    applied = _look_up(SYMBOLS["HookRegistry"])._patched
    missing = sorted({*(targets or (*HOOK_TARGETS.values(), *stock_updates()))} - applied)
    if missing:
        raise IncompatibleSGLangError(
            f"SGLang {sglang_version()} did not let sgl-fp8rl wrap {missing[0]}; its log says why"
        )


def _found(path: str) -> bool:
    try:
        _look_up(path)
    except IncompatibleSGLangError:
        return False
    return True
