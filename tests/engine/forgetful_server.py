"""``sglang.launch_server`` that a test can tell to keep its KV cache through a retraction.

The control of ``test_in_flight``: started with ``python -m``, so that the processes which SGLang
spawns import this file too. While the file named by ``KEEP_CACHE`` is absent, nothing is changed.
"""

import os
import runpy
from pathlib import Path
from typing import Any
from unittest import mock

import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)

from sgl_fp8rl.weight_update import retraction

KEEP_CACHE = "FP8RL_TEST_KEEP_CACHE"
_retract = retraction.retract


def retract(scheduler: Any) -> bool:
    """Retract, but reset no cache while the test wants the fault."""
    if not Path(os.environ[KEEP_CACHE]).exists():
        return _retract(scheduler)
    with mock.patch.object(scheduler, "flush_cache", return_value=True):
        return _retract(scheduler)


if KEEP_CACHE in os.environ:  # and not where a test reads the name of the variable
    retraction.retract = retract

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
