"""SGLang's own requests: a server's warm-up and health checks, of a few tokens each.

They run before user requests, so they must neither set the scales of an FP8 KV cache nor leave
entries in it that are read after the scales have changed.
"""

import math
import uuid
from typing import Any

from sgl_fp8rl.engine import compat

WARM_UP_PREFIX = "FP8RL_WARM_UP"
WARM_UP_TOKENS = 8
"""SGLang's warm-up generates at most this many tokens."""
PREFIX_NAMESPACE = "fp8rl probe"
"""Their namespace in the prefix cache."""


def is_internal(rid: str) -> bool:
    """Whether a request with this id is one of SGLang's own."""
    return rid.startswith((compat.HEALTH_CHECK_RID_PREFIX, WARM_UP_PREFIX))


def isolate_prefix(request: Any) -> None:
    """Keep the entries of SGLang's own requests out of other requests' prefixes."""
    if is_internal(request.rid) and hasattr(request, "extra_key"):  # embeddings have none
        request.extra_key = PREFIX_NAMESPACE


def tag_warm_up(original: Any, manager: Any, obj: Any, *args: Any, **kw: Any) -> Any:
    """On the way to ``TokenizerManager.generate_request``: a short request to a server that has not
    started yet is its warm-up (an in-process ``Engine`` has none)."""
    is_server = getattr(manager, "fp8rl_is_server", False)
    starting = is_server and manager.server_status.name == "Starting"
    if starting and obj.rid is None and _asks_for_few(obj):
        obj.rid = f"{WARM_UP_PREFIX}_{uuid.uuid4().hex}"
    return original(manager, obj, *args, **kw)


def _asks_for_few(obj: Any) -> bool:
    """Whether it looks like SGLang's warm-up; an early user request asks for more tokens."""
    params = getattr(obj, "sampling_params", None) or {}
    asked = params if isinstance(params, list) else [params]
    return all((p.get("max_new_tokens") or math.inf) <= WARM_UP_TOKENS for p in asked)
