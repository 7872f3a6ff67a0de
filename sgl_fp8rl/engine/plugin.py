"""The SGLang plugin: together with ``hooks.py``, all that registers something with SGLang.

SGLang calls ``register`` once in each of its processes, before it parses arguments. It registers
all or nothing: if something is missing, the name ``fp8rl`` stays unknown, so a server that requests
it does not start, and any other server is not affected.
"""

import logging
import multiprocessing
import os
import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from server_args import Fp8RLServerArgs, parse
from sgl_fp8rl import compat
from sgl_fp8rl.constants import NAME
from sgl_fp8rl.engine.arguments import check_server_args
from sgl_fp8rl.kv_cache import backends
from sgl_fp8rl.options import current_options, export_flags, export_keywords, read_options
from sgl_fp8rl.protocol.kv_schema import E4M3

logger = logging.getLogger(__name__)


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

    around: dict[str, hooks.Hook] = {
        "parse_server_args": parse_cli_args,
        "verify_quantization": loader.verify_model,
        "get_model_architecture": loader.keep_mixtral,
        "get_model_loader": loader.choose_loader,
        "initialize_model": language_layers.keep_towers_bf16,
        "init_model_parallel_group": cpu_platform.without_pynccl,
        "pad_for_amx": loader.without_padding,
        "precompile_kernels": startup.prepare,
        "configure_kv_cache": cpu_platform.with_plain_pools,
        "load_kv_scales": start_log.attached_scales,
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


def parse_cli_args(original: Any, argv: list[str]) -> Any:
    """AROUND ``prepare_server_args``: our flags become variables that child processes inherit."""
    try:
        options, rest = parse(argv)
        given = _given(rest)
        for name, value in _for_8_bit_kv(given, options.kv_cache).items():
            rest += [f"--{name.replace('_', '-')}", str(value)]
    except ValueError as error:
        sys.exit(f"sgl-fp8rl: {error}")
    if given["quantization"] == NAME and given["load_format"] == "dummy":
        rest.append("--skip-server-warmup")  # quarantined: its warm-up request would fail
    server_args = original(rest)
    if server_args.quantization == NAME:
        export_flags(options)
        try:
            check_server_args(server_args, options)
        except ValueError as error:
            sys.exit(f"sgl-fp8rl: {error}")
    return server_args


_LOOKED_AT = ("quantization", "load_format", "kv_cache_dtype", *backends.ARGUMENTS)
"""SGLang's arguments that we read before it does."""


def _given(argv: list[str]) -> dict[str, Any]:
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for name in _LOOKED_AT:
        kind = int if name == "page_size" else str
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    return vars(parser.parse_known_args(argv)[0])


def _for_8_bit_kv(given: Mapping[str, Any], kv_cache: str | None) -> dict[str, str | int]:
    """The arguments that an 8-bit KV cache needs in addition to those given.

    Args:
        kv_cache: the option.

    Raises:
        ValueError: the user's choice cannot apply KV scales here.
    """
    if given.get("quantization") != NAME:
        return {}
    asked = given.get("kv_cache_dtype")
    if not backends.check_dtype(backends.dtype_of(kv_cache, asked)):
        return {}
    chosen = backends.choose(given, backends.capability(), kv_cache or E4M3)
    return chosen if asked == backends.FP8_KV else {"kv_cache_dtype": backends.FP8_KV, **chosen}


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
    more = _for_8_bit_kv(keywords, current.kv_cache)
    server_args = compat.ServerArgs(**{**keywords, **more})
    if server_args.quantization == NAME:
        check_server_args(server_args, current)
    return server_args


def check_scheduler_args(
    original: Any, scheduler: Any, server_args: Any, *args: Any, **keywords: Any
) -> None:
    """AROUND ``Scheduler.__init__``: check arguments that a framework made without our parsers.

    Raises:
        ValueError: as ``check_server_args``; SGLang logs it and ends the engine.
    """
    if server_args.quantization == NAME:
        check_server_args(server_args, current_options())
    original(scheduler, server_args, *args, **keywords)


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
