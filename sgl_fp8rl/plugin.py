"""The SGLang plugin: the only place that writes into SGLang.

SGLang calls ``register`` once in each of its processes, before it parses arguments. SGLang logs
and forgets an exception raised here, so a failure ends the process instead: a server that was
asked for fp8rl must never come up as a silently stock one.
"""

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from server_args import Fp8RLServerArgs, parse
from sgl_fp8rl import compat


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``."""
    try:
        _refuse_shadows()
        _leave_torchrun()
        _register()
    except (compat.IncompatibleSGLangError, ValueError) as error:
        sys.exit(
            f"sgl-fp8rl cannot start: {error} (to run SGLang without it, list the other plugins in "
            f"SGLANG_PLUGINS or uninstall sgl-fp8rl)"
        )


def _register() -> None:
    missing = [path for path, found in compat.check_symbols() if not found]
    if missing:
        raise compat.IncompatibleSGLangError(
            f"SGLang {compat.sglang_version()} has no {missing[0]}; sgl-fp8rl is tested with "
            f"{' and '.join(compat.TESTED_VERSIONS)}"
        )
    Fp8RLServerArgs.from_env()  # a wrong FP8RL_* variable is told now, not at the first update

    from sgl_fp8rl import cpu_platform, loader, quant_config
    from sgl_fp8rl.weight_update import control, scheduler

    name = quant_config.NAME
    if name in compat.QUANTIZATION_METHODS:
        return
    compat.add_quantization_method_choices([name])
    compat.QUANTIZATION_METHODS[name] = quant_config.FP8RLConfig
    compat.BASE_QUANTIZATION_METHODS[name] = quant_config.FP8RLConfig
    # SGLang matches linear methods by class name; without this, loaders know no block scales.
    compat.WEIGHT_LOADER_V2_SUPPORTED.append("FP8RLLinearMethod")
    compat.Engine.fp8rl_control = control.control_engine

    hooks = {
        "parse_server_args": take_our_flags,
        "verify_quantization": loader.verify_model,
        "get_model_architecture": loader.keep_mixtral,
        "get_model_loader": loader.choose_loader,
        "init_model_parallel_group": cpu_platform.without_pynccl,
        "sample": scheduler.stamp_version,
        "handle_generate_request": scheduler.refuse_generation,
        "handle_rpc_request": scheduler.handle_rpc,
        "run_http_server": control.add_route,
    }
    around = compat.HookType.AROUND
    for target, hook in hooks.items():
        compat.HookRegistry.register(compat.HOOK_TARGETS[target], hook, around)
    for target, output in compat.STOCK_UPDATES.items():
        hook = scheduler.refuse_stock_update(output)
        compat.HookRegistry.register(target, hook, around)


def take_our_flags(original: Any, argv: list[str]) -> Any:
    """AROUND ``prepare_server_args``: our flags become variables that child processes inherit."""
    try:
        options, rest = parse(argv)
    except ValueError as error:
        sys.exit(f"sgl-fp8rl: {error}")
    os.environ.update(options.to_env())
    if _asks_for_dummy_weights(rest) and "--skip-server-warmup" not in rest:
        rest = [*rest, "--skip-server-warmup"]  # dummy weights are quarantined: none would answer
    return original(rest)


def _asks_for_dummy_weights(argv: list[str]) -> bool:
    line = " ".join(argv).replace("=", " ")
    return "--quantization fp8rl" in line and "--load-format dummy" in line


def _leave_torchrun() -> None:
    """Under torchrun, SGLang's spawned ranks would wait for ever at the launcher's own store."""
    if multiprocessing.parent_process() is not None:
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)


def _refuse_shadows() -> None:
    """Hold that the generic package names are ours.

    Raises:
        ValueError: another file of that name comes first on the import path.
    """
    import server_args
    import trainer_bridge

    home = Path(__file__).resolve().parent.parent
    for package in (server_args, trainer_bridge):
        found = Path(str(package.__file__)).resolve()
        if found.parent.parent != home:
            raise ValueError(
                f"{found} shadows the package {package.__name__} of sgl-fp8rl; rename that file"
            )
