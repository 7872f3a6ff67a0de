"""``sglang.launch_server`` that a test controls by files in the folder named by ``CONTROL``.

Run as the main module: where SGLang's processes are spawned, as on a GPU, they import it too.
Without files nothing is changed.
"""

import os
import runpy
import time
from pathlib import Path
from typing import Any
from unittest import mock

import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)
import torch
from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.control import host

CONTROL = "FP8RL_TEST_CONTROL"
KEEP_CACHE = "keep_cache"
"""A fault: a retraction resets no cache."""
SLOW = "slow"
"""Each step takes longer by ``STEP_S``, up to the next retraction: a request of many tokens runs
when an update begins, however late the test's own process gets a core."""
STAY_SLOW = "stay_slow"
"""As ``SLOW``, through all retractions."""
STEP_S = 0.02
KEEP_EMBEDDINGS = "keep_embeddings"
"""A fault: an update forgets no embedding."""
EMBEDDING = "embedding"
"""The next step keeps the embedding of an image, as a model with a vision tower does."""
EMBEDDINGS = "embeddings"
"""How many embeddings the last step found."""
MODULE = "tests.engine.controlled_server"
_retract = host.retract
_forget_embeddings = host.forget_embeddings


def is_wanted(name: str) -> bool:
    return (Path(os.environ[CONTROL]) / name).exists()


def slow_step(original: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``Scheduler.run_batch``."""
    if is_wanted(SLOW) or is_wanted(STAY_SLOW):
        time.sleep(STEP_S)
    count_embeddings()
    return original(*args, **kwargs)


def count_embeddings() -> None:
    cache = compat.init_mm_embedding_cache.__globals__["embedding_cache"]
    folder = Path(os.environ[CONTROL])
    if is_wanted(EMBEDDING):
        cache.set(1, EmbeddingResult(embedding=torch.ones(1, 1)))
        (folder / EMBEDDING).unlink(missing_ok=True)  # another rank may have been first
    unread = folder / f"{EMBEDDINGS}.{os.getpid()}"
    unread.write_text(str(len(cache)))
    unread.replace(folder / EMBEDDINGS)


def retract(scheduler: Any) -> bool:
    (Path(os.environ[CONTROL]) / SLOW).unlink(missing_ok=True)
    if not is_wanted(KEEP_CACHE):
        return _retract(scheduler)
    with mock.patch.object(scheduler, "flush_cache", return_value=True):
        return _retract(scheduler)


def forget_embeddings() -> None:
    if not is_wanted(KEEP_EMBEDDINGS):
        _forget_embeddings()


if CONTROL in os.environ:  # and not where a test reads the names above
    host.retract = retract
    host.forget_embeddings = forget_embeddings
    compat.HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.run_batch", slow_step, compat.HookType.AROUND
    )

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
