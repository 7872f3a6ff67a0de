"""Models and batches of the tests beside an oracle: on an H200, and in a rehearsal on the CPU.

With ``FP8RL_TEST_REHEARSAL=1`` ``test_in_flight.py`` and ``test_oracle.py`` run without a GPU, on
tiny models and small batches: that shows nothing of kernels, CUDA graphs and bounds, but that the
tests work.
"""

import os
from dataclasses import dataclass, replace
from typing import Any

from tests.gpu.engines import FLAGS
from tests.gpu.policies import DENSE, MOE, Shape

REHEARSAL = os.environ.get("FP8RL_TEST_REHEARSAL") == "1"
REHEARSED = ("test_in_flight.py", "test_oracle.py")


@dataclass(frozen=True)
class Sizes:
    """What one device can run."""

    device: str
    dense: Shape
    """Some layers."""
    whole: Shape
    """All layers and the vocabulary of a real model."""
    moe: Shape
    batches: tuple[int, ...]
    tokens: int
    """Of a response in which an update begins: so many that the update comes before its end."""
    flags: dict[str, Any]
    """Of every engine."""
    bf16_kv: dict[str, Any]
    """More flags of an engine whose KV cache is BF16."""
    has_graphs: bool = True


H200 = Sizes(
    "cuda",
    dense=replace(DENSE, layers=4),
    whole=replace(DENSE, layers=36, vocabulary=151936),
    moe=replace(MOE, layers=4),
    batches=(32, 128, 256),
    tokens=1024,
    flags={
        # the plugin chooses the attention backends of an FP8 KV cache
        **{name: value for name, value in FLAGS.items() if name != "attention_backend"},
        "cuda_graph_max_bs_decode": 256,
        "max_running_requests": 256,
        "chunked_prefill_size": 16384,
    },
    bf16_kv={"attention_backend": FLAGS["attention_backend"]},
)
_TINY = Shape("tiny", hidden=256, intermediate=512, kv_heads=2, heads=4, vocabulary=512)
CPU = Sizes(
    "cpu",
    dense=_TINY,
    whole=replace(_TINY, name="tiny-deep", layers=36),
    moe=replace(_TINY, name="tiny-moe", intermediate=256, experts=16, layers=4),
    batches=(2, 6),
    tokens=96,
    flags={"decode_log_interval": 1, "log_level": "info", "disable_radix_cache": True},
    bf16_kv={},
    has_graphs=False,
)
HERE = CPU if REHEARSAL else H200
