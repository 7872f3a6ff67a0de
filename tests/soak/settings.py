"""What differs between a soak on a CPU and one on a GPU: the model, and how its engine starts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine.harness import BUCKET_BYTES, LAUNCH_SERVER, Server
from tests.gpu import engines, policies
from tests.gpu.policies import DENSE, Shape, Tensors

SHARPNESS = 6.0
"""Of the logits: so large that a token of one policy is improbable under another."""

SMALL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "16"}
"""oneDNN and torch's layer over it keep 1,024 kernels each, one for each number of tokens: memory
grows over more than 1,000 updates, by 65 KiB an update; with these by 0.7."""


@dataclass(frozen=True)
class Setting:
    """One device's model, engine and bounds."""

    device: str
    shape: Shape
    start: Callable[[Path, Path, dict[str, str], float], Server]
    """Log, checkpoint, environment, seconds of silence -> a server."""
    token_bound: float
    """Of |logprob of the engine - of the reference|, for one token. Measured on a CPU (on an H200,
    with more layers): at most 2.2 (2.8), 0.16 (0.29) on average; of the version before 18 (22)."""
    segment_bound: float
    """Of the mean over the tokens of one version in one sequence. Measured: 0.42 (0.72)."""
    policies: int = 4


def _start_on_cpu(log: Path, checkpoint: Path, environment: dict[str, str], silence: float) -> Any:
    flags = ("--fp8rl-session-timeout-s", str(silence))
    environment = environment | SMALL_CACHES | {"FP8RL_BUCKET_BYTES": str(BUCKET_BYTES)}
    return Server(log, LAUNCH_SERVER, checkpoint, *flags, environment=environment)


def _start_on_gpu(log: Path, checkpoint: Path, environment: dict[str, str], silence: float) -> Any:
    return engines.start_server(
        log,
        checkpoint,
        # without it SGLang 0.5.17 keeps the graphs' memory under its own tag in place
        environment | {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"},
        # prefixes are shared, so that a stale one would be read
        engines.FLAGS | {"disable_radix_cache": False},
        enable_memory_saver=True,
        fp8rl_session_timeout_s=silence,
    )


SETTINGS = {
    "cpu": Setting(
        "cpu",
        Shape("tiny", hidden=256, intermediate=512, kv_heads=2, heads=4, vocabulary=512),
        _start_on_cpu,
        token_bound=4.0,
        segment_bound=1.0,
    ),
    "cuda": Setting(
        "cuda",
        Shape(
            DENSE.name, DENSE.hidden, DENSE.intermediate, DENSE.kv_heads, layers=4, vocabulary=4096
        ),
        _start_on_gpu,
        token_bound=5.0,
        segment_bound=1.25,
    ),
}


def draw(shape: Shape, seed: int, device: str) -> Tensors:
    """A policy in BF16 by HF names; other seeds share nothing with it."""
    return policies.draw(shape, seed, device, SHARPNESS)
