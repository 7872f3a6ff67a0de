"""The plugin's entry point, which SGLang calls once in each of its processes.

A process that has no engine of ours pays for three hooks and a name, and imports nothing of SGLang
for them. ``activate.py`` does all else, where arguments or what SGLang publishes name our
quantization.
"""

import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from server_args import Fp8RLServerArgs
from sgl_fp8rl.after_import import after_import
from sgl_fp8rl.constants import NAME
from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.compat.settings import is_fp8rl, launch_command, resolved
from sgl_fp8rl.engine.compat.wrapping import wrap
from sgl_fp8rl.engine.layers.quant_name import QuantizationName
from sgl_fp8rl.options import export_flags, export_keywords, read_options

logger = logging.getLogger(__name__)


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``."""
    for symbol, add in (
        ("ServerArgs", _add_arguments),
        ("QUANTIZATION_METHODS", _add_quantization),
        ("Engine", _add_keywords),
        ("publish", _add_watch),
    ):
        after_import(compat.SYMBOLS[symbol].partition(":")[0], partial(_or_log, add))


def _or_log(add: Callable[[], None]) -> None:
    try:
        add()
    except compat.IncompatibleSGLangError as error:
        # SGLang refuses this quantization, or its model does, and serves others as usual
        logger.error("sgl-fp8rl is not available: %s", error)


def _add_arguments() -> None:
    wrap({"ServerArgs.add_cli_args": add_flags, "ServerArgs.from_cli_args": from_flags})
    compat.add_quantization_method_choices([NAME])


def _add_quantization() -> None:
    compat.QUANTIZATION_METHODS.setdefault(NAME, QuantizationName)


def _add_keywords() -> None:
    compat.Engine.server_args_class = staticmethod(parse_engine_kwargs)


def _add_watch() -> None:
    wrap({"runtime_context.publish": see_engine})


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
    from sgl_fp8rl.engine.startup import activate, arguments

    try:
        activate.activate()
        options = Fp8RLServerArgs.from_namespace(given)
        given = Namespace(**vars(given) | arguments.before_resolution(vars(given), options))
    except (compat.IncompatibleSGLangError, ValueError) as error:
        sys.exit(f"sgl-fp8rl: {error}")
    export_flags(options)
    server_args = original(cls, given)
    resolved(server_args)  # what SGLang finds wrong, it says itself
    try:
        arguments.check_server_args(server_args, options)
    except ValueError as error:
        sys.exit(f"sgl-fp8rl: {error}")
    return server_args


def parse_engine_kwargs(**keywords: Any) -> Any:
    """Make the arguments of ``Engine(...)``: ``fp8rl_*`` keywords are ours.

    Raises:
        IncompatibleSGLangError: as ``activate``.
        ValueError: an option is wrong, or the layout cannot be updated in place yet.
    """
    ours = {name: keywords.pop(name) for name in list(keywords) if name.startswith(f"{NAME}_")}
    options = {name.removeprefix(f"{NAME}_"): value for name, value in ours.items()}
    unknown = options.keys() - {field.name for field in fields(Fp8RLServerArgs)}
    if unknown:
        raise ValueError(f"Engine got {NAME}_{min(unknown)}, which is not an option of sgl-fp8rl")
    if keywords.get("quantization") != NAME:
        return compat.ServerArgs(**keywords)
    from sgl_fp8rl.engine.startup import activate, arguments

    activate.activate()
    current = export_keywords(options)
    given = keywords | arguments.before_resolution(keywords, current)
    server_args = compat.ServerArgs(**given)
    arguments.check_server_args(server_args, current)
    return server_args


def see_engine(original: Any, record: Any, *args: Any, role: str, **keywords: Any) -> Any:
    """AROUND ``publish``, by which each process of an engine learns which one it is of, whoever
    made its arguments: before it has a scheduler, or takes a request.

    Raises:
        IncompatibleSGLangError: as ``activate``.
        ValueError: the same, or a variable of ours is wrong.
    """
    from sgl_fp8rl.engine.cpu import cpu_platform  # SGLang has resolved its platform

    is_ours = is_fp8rl(record) and role != "detokenizer"  # which has no hook
    if is_ours or (role == "scheduler" and cpu_platform.is_active()):
        from sgl_fp8rl.engine.startup.activate import activate

        activate()
    if is_ours:
        key, command = read_options().key, launch_command(record)
        if key and key in command:  # SGLang 0.5.23 tells it everyone
            record._launch_command = command.replace(key, "<redacted>")
    return original(record, *args, role=role, **keywords)
