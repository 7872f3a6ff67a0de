"""The SGLang plugin: together with ``hooks.py``, all that registers something with SGLang.

SGLang calls ``register`` once in each of its processes, before it parses arguments. It registers
all or nothing: if something is missing, the name ``fp8rl`` stays unknown, so a server that requests
it does not start, and any other server is not affected.
"""

import logging
import multiprocessing
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from server_args import Fp8RLServerArgs
from sgl_fp8rl import compat
from sgl_fp8rl.compat.settings import is_fp8rl, launch_command, resolved
from sgl_fp8rl.constants import NAME
from sgl_fp8rl.engine.arguments import check_server_args
from sgl_fp8rl.kv_cache import backends
from sgl_fp8rl.options import current_options, export_flags, export_keywords, read_options
from sgl_fp8rl.protocol.kv_schema import E4M3

logger = logging.getLogger(__name__)

BLACKWELL = 10
"""The major number of its compute capability in data centres."""
GEMM_BACKENDS = ("fp8_gemm_runner_backend", "moe_runner_backend")


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``."""
    try:
        _refuse_shadows()
        _leave_torchrun()
        _register()
    except (compat.IncompatibleSGLangError, ValueError) as error:
        # nothing is registered: SGLang refuses this quantization and serves others as usual
        logger.error("sgl-fp8rl is not available: %s", error)


def _register() -> None:
    missing = [path for path, found in compat.check_symbols() if not found]
    if missing:
        raise compat.IncompatibleSGLangError(
            f"SGLang {compat.sglang_version()} has no {missing[0]}; sgl-fp8rl is tested with "
            f"{' and '.join(compat.TESTED_VERSIONS)}"
        )
    read_options()  # a wrong FP8RL_* variable fails now, not at the first update

    from sgl_fp8rl.engine import (
        admission,
        control_in_process,
        control_route,
        cpu_platform,
        guards,
        hooks,
        kv_calibrate,
        kv_call,
        kv_setup,
        language_layers,
        linear,
        loader,
        lost_rows,
        memory_release,
        output_stream,
        quant_config,
        routed_experts,
        sampler,
        scheduler,
        start_log,
        startup,
    )

    if NAME in compat.QUANTIZATION_METHODS:
        return
    compat.add_quantization_method_choices([NAME])
    compat.QUANTIZATION_METHODS[NAME] = quant_config.FP8RLConfig
    compat.BASE_QUANTIZATION_METHODS[NAME] = quant_config.FP8RLConfig
    # SGLang matches linear methods by class name; otherwise loaders do not know block scales.
    compat.WEIGHT_LOADER_V2_SUPPORTED.extend(m.__name__ for m in linear.METHODS.values())
    compat.Engine.fp8rl_control = control_in_process.control_engine
    compat.Engine.fp8rl_run = control_in_process.run_on_engine
    compat.Engine.server_args_class = staticmethod(parse_engine_kwargs)

    around: dict[str, kv_call.Hook] = {
        "prepare_server_args": without_key,
        "add_cli_args": add_flags,
        "from_cli_args": from_flags,
        "verify_quantization": loader.verify_model,
        "get_model_architecture": loader.keep_mixtral,
        "get_model_loader": loader.choose_loader,
        "initialize_model": language_layers.keep_towers_bf16,
        "init_model_parallel_group": cpu_platform.without_pynccl,
        "pad_for_amx": loader.without_padding,
        "precompile_kernels": startup.prepare,
        "configure_kv_cache": cpu_platform.with_plain_pools,
        "load_kv_scales": start_log.attached_scales,
        "kv_memory": kv_setup.less_workspace,
        "token_bytes": kv_setup.with_token_scales,
        "init_attention_backends": kv_setup.check_kv_cache,
        "forward": kv_calibrate.watch_forward,
        "generate_request": admission.check_kinds,
        "create_request": admission.check_fields,
        "host_cache_of_experts": routed_experts.plain_host_memory,
        "capture_of_experts": routed_experts.clone_captured_topk,
        "sample": guards.stamp_policy,
        "draw": sampler.fast_sample,
        "take_up_prefill": lost_rows.fail_lost,
        "take_up_decode": lost_rows.fail_lost,
        "stream_output": output_stream.skip_empty,
        "handle_generate_request": guards.refuse_generation,
        "handle_embedding_request": guards.refuse_generation,
        "handle_rpc_request": scheduler.handle_rpc,
        "process_input_requests": guards.look_around,
        "continue_generation": memory_release.continue_served,
        "release_of_engine": control_in_process.release_of_engine,
        "shutdown": control_in_process.end_calls,
        "release_from_main": memory_release.release_when_idle,
        "resume_from_main": memory_release.resume_in_turn,
        "release_memory": memory_release.release,
        "unmap_memory": memory_release.unmap_unused,
        "resume_memory": memory_release.resume,
        "check_weights": guards.refuse_reset,
        "attach_kv_storage": guards.refuse_kv_storage,
        "start_scheduler": check_scheduler_args,
        "run_http_server": control_route.add_route,
    }
    for name, hook in around.items():
        hooks.register(compat.HOOK_TARGETS[name], hook)
    for target, output in compat.stock_updates().items():
        hooks.register(target, guards.refuse_stock_update(output))


def without_key(original: Any, argv: list[str]) -> Any:
    """AROUND ``prepare_server_args``: keep our key out of the command that 0.5.23 tells all."""
    record = original(argv)
    if is_fp8rl(record) and (key := current_options().key) and key in launch_command(record):
        record._launch_command = launch_command(record).replace(key, "<redacted>")
    return record


def add_flags(original: Any, parser: ArgumentParser) -> None:
    """AROUND ``ServerArgs.add_cli_args``: our flags are among SGLang's, also in a YAML file."""
    original(parser)
    Fp8RLServerArgs.add_arguments(parser)


def from_flags(original: Any, cls: Any, given: Namespace) -> Any:
    """AROUND ``ServerArgs.from_cli_args``: our flags become variables that child processes inherit.

    Args:
        given: what SGLang's parser found on the command line and in a YAML file.
    """
    if getattr(given, "quantization", None) != NAME:
        return original(cls, given)
    try:
        options = Fp8RLServerArgs.from_namespace(given)
        given = Namespace(**vars(given) | before_resolution(vars(given), options))
    except ValueError as error:
        sys.exit(f"sgl-fp8rl: {error}")
    export_flags(options)
    server_args = original(cls, given)
    resolved(server_args)  # what SGLang finds wrong, it says itself
    try:
        check_server_args(server_args, options)
    except ValueError as error:
        sys.exit(f"sgl-fp8rl: {error}")
    return server_args


def before_resolution(given: Mapping[str, Any], options: Fp8RLServerArgs) -> dict[str, Any]:
    """What SGLang is told besides what the user gave an engine of ours.

    These alone are decided before SGLang resolves its arguments, whose defaults would not serve.
    All else is decided on what it resolved (``compat/settings.py``).

    Raises:
        ValueError: the user's choice cannot apply KV scales here.
    """
    told: dict[str, Any] = {}
    if given.get("load_format") == "dummy":
        told["skip_server_warmup"] = True  # quarantined: its warm-up request would fail
    capability = backends.capability()
    kv_cache_dtype = backends.dtype_of(options.kv_cache, given.get("kv_cache_dtype"))
    if backends.check_dtype(kv_cache_dtype):
        told["kv_cache_dtype"] = kv_cache_dtype
        told |= backends.choose(given, capability, options.kv_cache or E4M3)
    if capability is not None and capability[0] == BLACKWELL:
        # DeepGEMM would requantize weights there, to scales that are powers of two
        unset = [name for name in GEMM_BACKENDS if given.get(name) in (None, "auto")]
        told |= dict.fromkeys(unset, "triton")
    return told


def parse_engine_kwargs(**keywords: Any) -> Any:
    """Make the arguments of ``Engine(...)``: ``fp8rl_*`` keywords are ours.

    Raises:
        ValueError: an option is wrong, or the layout cannot be updated in place yet.
    """
    ours = {name: keywords.pop(name) for name in list(keywords) if name.startswith(f"{NAME}_")}
    options = {name.removeprefix(f"{NAME}_"): value for name, value in ours.items()}
    unknown = options.keys() - {field.name for field in fields(Fp8RLServerArgs)}
    if unknown:
        raise ValueError(f"Engine got {NAME}_{min(unknown)}, which is not an option of sgl-fp8rl")
    current = export_keywords(options)
    if keywords.get("quantization") == NAME:
        keywords |= before_resolution(keywords, current)
    server_args = compat.ServerArgs(**keywords)
    if is_fp8rl(server_args):
        check_server_args(server_args, current)
    return server_args


def check_scheduler_args(
    original: Any, scheduler: Any, server_args: Any, *args: Any, **keywords: Any
) -> None:
    """AROUND ``Scheduler.__init__``: check what SGLang resolved, whoever made its arguments, and
    the model once its graphs are captured.

    Raises:
        ValueError: as ``check_server_args`` and ``guards.check_copies``; SGLang logs it and ends
            the engine.
    """
    if not is_fp8rl(server_args):
        original(scheduler, server_args, *args, **keywords)
        return
    from sgl_fp8rl.engine import guards

    check_server_args(server_args, current_options())
    original(scheduler, server_args, *args, **keywords)
    guards.check_copies(scheduler)


def _leave_torchrun() -> None:
    """Under torchrun, SGLang's spawned ranks would wait forever for the launcher's store."""
    if multiprocessing.parent_process() is not None:
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)


def _refuse_shadows() -> None:
    """Check that the generic package names are ours.

    Raises:
        ValueError: another file of that name comes first on the import path.
    """
    import server_args
    import trainer_bridge

    home = Path(__file__).resolve().parents[2]
    for package in (server_args, trainer_bridge):
        found = Path(str(package.__file__)).resolve()
        if found.parent.parent != home:
            raise ValueError(
                f"{found} shadows the package {package.__name__} of sgl-fp8rl; rename that file"
            )
