"""SGLang's settings as SGLang resolved them: no other module reads its ``ServerArgs``, but the CPU
platform, which SGLang asks for defaults.

SGLang 0.5.17 resolves a record as it makes it. 0.5.23 keeps what the user gave and puts beside it
what resolution decided, once: in its launcher, or here where that has not run yet. A process that
runs a model publishes the same values (``compat.get_exec`` and the like).

What SGLang must be told before it resolves is in ``startup/arguments.py``, ``before_resolution``.
"""

from typing import Any

from sgl_fp8rl.constants import NAME
from sgl_fp8rl.engine import compat


def resolved(server_args: Any) -> Any:
    """A record's settings, as attributes; those of SGLang 0.5.23 are resolved now, if not before.

    Args:
        server_args: SGLang's ``ServerArgs``. Its ``cuda_graph_config`` is the object that the CUDA
            graph runners of this process read.
    """
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    return compat.resolved_view(server_args)


def is_fp8rl(server_args: Any) -> bool:
    """Whether a record is of an engine of ours, resolved or not: the quantization is the user's."""
    return bool(server_args.quantization == NAME)


def launch_command(server_args: Any) -> str:
    """The command of which SGLang 0.5.23 tells everyone who asks; empty where there is none."""
    return vars(server_args).get("_launch_command") or ""
