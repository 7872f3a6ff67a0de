"""Requests of SGLang itself: a server's warm-up and health checks, of one to a few tokens.

They come before any request of a user, so they must neither set the scales of an FP8 KV cache nor
leave entries in it that are read after the scales have changed.
"""

import math
import uuid
from typing import Any

from sgl_fp8rl import compat

WARM_UP_PREFIX = "FP8RL_WARM_UP"
WARM_UP_TOKENS = 8
"""What SGLang's warm-up asks for at most."""
PREFIX_NAMESPACE = "fp8rl probe"
"""Their own namespace of the prefix cache."""


def is_internal(rid: str) -> bool:
    """Whether a request of this id is one of SGLang's own."""
    return rid.startswith((compat.HEALTH_CHECK_RID_PREFIX, WARM_UP_PREFIX))


def isolate_prefix(request: Any) -> None:
    """Keep what a probe stores out of every other request's prefix."""
    if is_internal(request.rid) and hasattr(request, "extra_key"):  # embeddings have none
        request.extra_key = PREFIX_NAMESPACE


def tag_warm_up(original: Any, manager: Any, obj: Any, *args: Any, **kw: Any) -> Any:
    """AROUND ``TokenizerManager.generate_request``: the few tokens that a server is asked for
    before it has started are its warm-up (an ``Engine`` in a process has none)."""
    is_server = getattr(manager, "fp8rl_is_server", False)
    starting = is_server and manager.server_status.name == "Starting"
    if starting and obj.rid is None and _asks_for_few(obj):
        obj.rid = f"{WARM_UP_PREFIX}_{uuid.uuid4().hex}"
    return original(manager, obj, *args, **kw)


def _asks_for_few(obj: Any) -> bool:
    """As SGLang's warm-up does; a user who comes early asks for more."""
    params = getattr(obj, "sampling_params", None) or {}
    asked = params if isinstance(params, list) else [params]
    return all((p.get("max_new_tokens") or math.inf) <= WARM_UP_TOKENS for p in asked)
