"""The SGLang engine, on the GPU that the trainer uses, or on the CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KEYWORDS: dict[str, dict[str, Any]] = {
    "cpu": {"max_total_tokens": 8192, "sleep_on_idle": True},  # leave the core to the trainer
    # The cache holds a step's rollout and the evaluation; most of the GPU is the trainer's.
    "cuda": {
        "max_total_tokens": 32768,
        "mem_fraction_static": 0.2,
        "attention_backend": "flashinfer",
    },
}


@contextmanager
def running_engine(
    checkpoint: Path, ignored_layers: str, seed: int, keywords: dict[str, Any]
) -> Iterator[Any]:
    """An engine that is shut down at the end.

    Args:
        ignored_layers: which layers stay BF16, as FP8RL_IGNORED_LAYERS names them.
        keywords: more of ``sglang.Engine``.
    """
    import sglang

    os.environ["FP8RL_IGNORED_LAYERS"] = ignored_layers
    engine = sglang.Engine(
        model_path=str(checkpoint),
        quantization="fp8rl",
        skip_tokenizer_init=True,
        random_seed=seed,
        **{"log_level": "error", **keywords},
    )
    try:
        yield engine
    finally:
        engine.shutdown()
