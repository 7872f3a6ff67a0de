"""This process's options: the engine's only module that reads and sets the ``FP8RL_*`` variables.

SGLang's spawned processes inherit only the environment: flags and keywords become variables here
before that. ``current_options`` is called where a process enters our code with nothing of ours in
hand, and its result is handed on from there:

- ``activate.check_scheduler_args``, before a scheduler starts, for its check;
- ``FP8RLConfig.__init__``, which SGLang makes of the checkpoint, for the layers that stay BF16;
- ``loader.choose_loader``, for the loader, which keeps it in ``EngineWeights``, where the
  scheduler's hook finds it;
- verl's arguments, for the KV cache alone;
- ``kv_setup.with_token_scales``, where SGLang sizes the KV cache;
- ``Control.__init__``, in the main process, for the control channel.

A trainer has one variable, its key, which ``trainer_bridge.engines.engine_client`` reads.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from server_args import Fp8RLServerArgs, env_name


@cache
def current_options() -> Fp8RLServerArgs:
    """The options as of the first call, or of the last ``read_options``: one object until then.

    Raises:
        ValueError: a variable cannot be parsed or is out of range.
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
    """Pass the options of a command line to child processes."""
    os.environ.update(options.to_env())
    read_options()


_exported: dict[str, tuple[str | None, str | None]] = {}
"""Variables that the last engine's keywords set: our value, and the previous one; None: none."""


def export_keywords(keywords: Mapping[str, Any]) -> Fp8RLServerArgs:
    """Pass keywords to the processes that this engine spawns, but not to later engines, and return
    its options.

    Args:
        keywords: fields of ``Fp8RLServerArgs`` that override the environment; None removes one.

    Raises:
        ValueError: a value is out of range; nothing of this engine is exported then.
    """
    for variable, (ours, before) in _exported.items():
        if os.environ.get(variable) == ours:
            _set(variable, before)
    _exported.clear()
    values = replace(read_options(), **keywords).to_env()
    for variable in map(env_name, keywords):
        _exported[variable] = (values.get(variable), os.environ.get(variable))
        _set(variable, values.get(variable))
    return read_options()


def _set(variable: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value
