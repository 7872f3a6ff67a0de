"""Requests of SGLang itself: a server's warm-up and health checks, of one to a few tokens.

They come before any request of a user, so they must neither set the scales of an FP8 KV cache nor
leave entries in it that are read after the scales have changed.
"""

import uuid
from typing import Any

from sgl_fp8rl import compat

WARM_UP_PREFIX = "FP8RL_WARM_UP"
APART = "fp8rl probe"
"""Their own namespace of the prefix cache."""


def is_probe(rid: str) -> bool:
    """Whether a request of this id is one of SGLang's own."""
    return rid.startswith((compat.HEALTH_CHECK_RID_PREFIX, WARM_UP_PREFIX))


def set_apart(request: Any) -> None:
    """Keep what a probe stores out of every other request's prefix."""
    if is_probe(request.rid):
        request.extra_key = APART


def name_warm_up(original: Any, manager: Any, obj: Any, *args: Any, **kw: Any) -> Any:
    """AROUND ``TokenizerManager.generate_request``: what a server is asked before it has started is
    its warm-up (an ``Engine`` in a process has none)."""
    is_server = getattr(manager, "fp8rl_is_server", False)
    if is_server and obj.rid is None and manager.server_status.name == "Starting":
        obj.rid = f"{WARM_UP_PREFIX}_{uuid.uuid4().hex}"
    return original(manager, obj, *args, **kw)
