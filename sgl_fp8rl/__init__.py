"""FP8 rollouts for LLM reinforcement learning on SGLang.

The public calls are in ``trainer_bridge`` and ``server_args``; this package re-exports them under a
unique name. They are imported on first use, so that ``import sgl_fp8rl``, which SGLang runs in each
of its processes, loads neither torch nor sglang.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server_args import Fp8RLServerArgs
    from trainer_bridge import KVCalibrator, correct, rollout, update

    __version__: str

__all__ = ["Fp8RLServerArgs", "KVCalibrator", "__version__", "correct", "rollout", "update"]

_HOMES = {
    "Fp8RLServerArgs": "server_args",
    "KVCalibrator": "trainer_bridge",
    "correct": "trainer_bridge",
    "rollout": "trainer_bridge",
    "update": "trainer_bridge",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("sgl-fp8rl")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
