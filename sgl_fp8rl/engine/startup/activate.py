"""What a process does for an engine of ours: all hooks, and what SGLang looks up by its name."""

import multiprocessing
import os
from functools import cache
from pathlib import Path
from typing import Any

from sgl_fp8rl.constants import NAME
from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.compat import wrapping
from sgl_fp8rl.engine.compat.settings import is_fp8rl
from sgl_fp8rl.engine.control import (
    admission,
    control_in_process,
    control_route,
    guards,
    kv_calibrate,
    memory_release,
    retraction,
    scheduler,
)
from sgl_fp8rl.engine.cpu import cpu_platform
from sgl_fp8rl.engine.layers import (
    linear,
    lost_rows,
    quant_config,
    routed_experts,
    sampler,
)
from sgl_fp8rl.engine.startup import kv_setup, loader
from sgl_fp8rl.engine.startup import linear_kernels as startup
from sgl_fp8rl.engine.startup.arguments import check_server_args
from sgl_fp8rl.options import current_options


@cache
def activate() -> None:
    """Ready this process for engines of ours; others that it has are not affected.

    Raises:
        IncompatibleSGLangError: SGLang lacks something that an engine of ours stands on.
        ValueError: another file has the name of one of our packages.
    """
    _refuse_shadows()
    _leave_torchrun()
    missing = [path for path, found in compat.check_symbols() if not found]
    if missing:
        raise compat.IncompatibleSGLangError(
            f"SGLang {compat.sglang_version()} has no {missing[0]}; sgl-fp8rl is tested with "
            f"{' and '.join(compat.TESTED_VERSIONS)}"
        )
    hooks: dict[str, wrapping.Hook] = {
        "ModelConfig._verify_quantization": loader.verify_model,
        "utils.get_model_architecture": loader.keep_mixtral,
        "loader.get_model_loader": loader.choose_loader,
        "loader._initialize_model": quant_config.keep_towers_bf16,
        "parallel_state.init_model_parallel_group": cpu_platform.without_pynccl,
        "update_config.adjust_config_with_unaligned_cpu_tp": loader.without_padding,
        "ModelRunner.maybe_precompile_model_kernels_after_loading": startup.prepare,
        "KVCacheConfigurator.configure": cpu_platform.with_plain_pools,
        "KVCacheConfigurator._profile_available_bytes": kv_setup.less_workspace,
        "DefaultPoolConfigurator._compute_cell_size": kv_setup.with_token_scales,
        "ModelRunner.init_attention_backends": kv_setup.check_kv_cache,
        "ModelRunner.forward": kv_calibrate.watch_forward,
        "TokenizerManager.generate_request": admission.check_kinds,
        "TokenizerManager._create_tokenized_object": admission.check_fields,
        "BaseHostCache.__init__": routed_experts.plain_host_memory,
        "BaseTopkCapturer.on_forward_end": routed_experts.clone_captured_topk,
        "ModelRunner.sample": guards.stamp_policy,
        "Sampler.forward": sampler.fast_sample,
        "SchedulerBatchResultProcessor.process_batch_result_prefill": lost_rows.fail_lost,
        "SchedulerBatchResultProcessor.process_batch_result_decode": lost_rows.fail_lost,
        "SchedulerOutputStreamer.stream_output": retraction.skip_empty,
        "Scheduler.handle_generate_request": guards.refuse_generation,
        "Scheduler.handle_embedding_request": guards.refuse_generation,
        "Scheduler.handle_rpc_request": scheduler.handle_rpc,
        "Scheduler.process_input_requests": guards.on_scheduler_step,
        "Scheduler.continue_generation": memory_release.continue_served,
        "Engine.release_memory_occupation": control_in_process.release_of_engine,
        "Engine.shutdown": control_in_process.end_calls,
        "TokenizerControlMixin.release_memory_occupation": memory_release.release_when_idle,
        "TokenizerControlMixin.resume_memory_occupation": memory_release.resume_in_turn,
        "SchedulerWeightUpdaterManager.release_memory_occupation": memory_release.release,
        "_TorchMemorySaverAdapterReal.pause": memory_release.unmap_unused,
        "SchedulerWeightUpdaterManager.resume_memory_occupation": memory_release.resume,
        "SchedulerWeightUpdaterManager.check_weights": guards.refuse_reset,
        "Scheduler.attach_hicache_storage_wrapped": guards.refuse_kv_storage,
        "Scheduler.__init__": check_scheduler_args,
        "http_server._setup_and_run_http_server": control_route.add_route,
    }
    for target, output in compat.stock_updates().items():
        hooks[target] = guards.refuse_stock_update(output)
    wrapping.wrap(hooks)
    for methods in (compat.QUANTIZATION_METHODS, compat.BASE_QUANTIZATION_METHODS):
        methods[NAME] = quant_config.FP8RLConfig
    # SGLang matches linear methods by class name; otherwise loaders do not know block scales.
    compat.WEIGHT_LOADER_V2_SUPPORTED.extend(m.__name__ for m in linear.METHODS.values())
    compat.Engine.fp8rl_control = control_in_process.control_engine
    compat.Engine.fp8rl_run = control_in_process.run_on_engine


def check_scheduler_args(
    original: Any, scheduler: Any, server_args: Any, *args: Any, **keywords: Any
) -> None:
    """AROUND ``Scheduler.__init__``: check what SGLang resolved, whoever made its arguments, and
    its objects and the model once its graphs are captured.

    Raises:
        IncompatibleSGLangError: as ``compat.check_live``.
        ValueError: as ``check_server_args`` and ``guards.check_copies``; SGLang logs it and ends
            the engine.
    """
    if not is_fp8rl(server_args):
        original(scheduler, server_args, *args, **keywords)
        return
    check_server_args(server_args, current_options())
    original(scheduler, server_args, *args, **keywords)
    compat.check_live(scheduler, compat.IN_SCHEDULER)
    guards.check_copies(scheduler)


def _leave_torchrun() -> None:
    """Under torchrun, SGLang's spawned ranks would wait forever for the launcher's store."""
    if multiprocessing.parent_process() is not None:
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)


def _refuse_shadows() -> None:
    """Check that the generic package names are ours."""
    import server_args
    import trainer_bridge

    home = Path(__file__).resolve().parents[3]
    for package in (server_args, trainer_bridge):
        found = Path(str(package.__file__)).resolve()
        if found.parent.parent != home:
            raise ValueError(
                f"{found} shadows the package {package.__name__} of sgl-fp8rl; rename that file"
            )
