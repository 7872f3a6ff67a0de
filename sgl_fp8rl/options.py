"""This process's options: the one place that reads the ``FP8RL_*`` variables, and that sets them.

SGLang spawns its processes, which inherit nothing but the environment: flags and keywords become
variables here before it does.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from server_args import Fp8RLServerArgs, env_name


@cache
def current_options() -> Fp8RLServerArgs:
    """The options as they were when they were first asked for, or last read.

    Raises:
        ValueError: a variable cannot be read or is out of its range.
    """
    return Fp8RLServerArgs.from_env()


def read_options() -> Fp8RLServerArgs:
    """Read the environment again.

    Raises:
        ValueError: as ``current_options``.
    """
    current_options.cache_clear()
    return current_options()


def export_flags(options: Fp8RLServerArgs) -> None:
    """Hand the options of a command line to the processes that it starts."""
    os.environ.update(options.to_env())
    read_options()


_exported: dict[str, tuple[str, str | None]] = {}
"""Variables that the last engine's keywords set: our value, and what was there before."""


def export_keywords(keywords: Mapping[str, Any]) -> Fp8RLServerArgs:
    """Hand keywords to the processes that this engine spawns, and to no later engine.

    Raises:
        ValueError: a value is out of its range.
    """
    values = replace(read_options(), **keywords).to_env()
    for variable, (ours, before) in _exported.items():
        if os.environ.get(variable) == ours:
            os.environ.pop(variable)
            if before is not None:
                os.environ[variable] = before
    _exported.clear()
    for variable in {env_name(name) for name in keywords} & values.keys():
        _exported[variable] = (values[variable], os.environ.get(variable))
        os.environ[variable] = values[variable]
    return read_options()
