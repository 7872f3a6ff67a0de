"""Engines on the GPU: how they are started there, and what they hold and answer."""

import math
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import trainer_bridge
from tests.engine.harness import LAUNCH_SERVER, EngineProcess, Server
from tests.engine.serving import version_of
from tests.gpu.policies import Tensors
from trainer_bridge.updates.update import UpdateResult

MAX_BATCH = 16
BUCKET_BYTES = 64 << 20
FLAGS: dict[str, Any] = {
    "attention_backend": "flashinfer",
    "grammar_backend": "none",
    "cuda_graph_backend_prefill": "disabled",
    "cuda_graph_max_bs_decode": MAX_BATCH,
    "max_running_requests": MAX_BATCH,
    # The KV cache is bounded by max_total_tokens; several engines share the device.
    "mem_fraction_static": 0.6,
    "skip_server_warmup": True,
    # Two projections of the dense shape do not fit, so that some are split.
    "fp8rl_bucket_bytes": BUCKET_BYTES,
    # A prompt that is asked twice is computed twice: SGLang's kernels round otherwise when a part
    # of it comes from the cache.
    "disable_radix_cache": True,
    # The log tells the size of each decode batch, and whether a CUDA graph ran it.
    "decode_log_interval": 1,
    "log_level": "info",
}
TP = 2
TP_FLAGS = {"disable_custom_all_reduce": True, "enforce_disable_flashinfer_allreduce_fusion": True}
"""All-reduces by NCCL alone: SGLang's own kernels may use NVLink multicast, which a host that is
shared with others may not allow."""
PADDED = (3, 7, 13)
"""Batch sizes that are not captured: they run in the next larger graph."""
PROMPT_TOKENS = 32
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
DERIVED = ".cos_sin_cache"
"""The only buffers: they depend on no weight."""

ON_ONE_GPU = [sys.executable, "-m", "tests.gpu.one_gpu"]

Digest = dict[str, dict[str, Any]]
"""``sha256``, ``address``, ``dtype`` and ``shape`` of each parameter and buffer."""


def start_server(
    log: Path,
    checkpoint: Path,
    environment: dict[str, str] | None = None,
    common: dict[str, Any] = FLAGS,
    **flags: Any,
) -> Server:
    """An SGLang server with the flags that the GPU needs, and ``flags``; False leaves one out.

    Its ranks share a GPU where there are fewer GPUs than ranks.
    """
    is_shared = 0 < torch.cuda.device_count() < flags.get("tp_size", 1)
    launch = ON_ONE_GPU if is_shared else LAUNCH_SERVER
    arguments: list[str] = []
    for name, value in (common | flags).items():
        if value is False:
            continue
        arguments.append(f"--{name.replace('_', '-')}")
        if value is not True:
            arguments.append(str(value))
    # /health answers without a request of its own, which would run beside those of a test
    quiet = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
    environment = quiet | (environment or {})
    return Server(log, launch, checkpoint, *arguments, environment=environment)


def start_engine(log: Path, checkpoint: Path, **options: Any) -> EngineProcess:
    """An ``sgl.Engine`` in a process of its own, with the same flags."""
    return EngineProcess(log, checkpoint, **(FLAGS | options))


@contextmanager
def together(*starts: Callable[[], AbstractContextManager[Any]]) -> Iterator[list[Any]]:
    """Start engines side by side; all of them are ended, also where one did not come up."""
    with ExitStack() as stack:
        with ThreadPoolExecutor() as pool:
            started = [pool.submit(start) for start in starts]
        for engine in started:
            if engine.exception() is None:
                stack.enter_context(engine.result())
        yield [engine.result() for engine in started]


def update(server: Server, tensors: Tensors) -> UpdateResult:
    """Bring the server to these tensors as its next version."""
    version = version_of(server) + 1
    result = trainer_bridge.update(tensors, server, version=version)
    assert result.version == version
    assert result.gpu_seconds is not None and result.gpu_seconds > 0
    return result


@dataclass(frozen=True)
class Answers:
    """What an engine answers at one version, greedily."""

    logprobs: dict[int, list[list[float]]]
    """By batch size: of each sampled token of each sequence."""
    versions: set[int]
    """Of all tokens."""

    @classmethod
    def of(cls, engine: EngineProcess | Server, sizes: list[int]) -> "Answers":
        """Ask for a batch of each size; its sequences are decoded together."""
        logprobs: dict[int, list[list[float]]] = {}
        versions: set[int] = set()
        for size in sizes:
            # token ids reach the scheduler in one message, so no step sees only some of them
            replies = engine.generate(
                {"input_ids": _prompts(size), "sampling_params": GREEDY, "return_logprob": True}
            )
            infos = [reply["meta_info"] for reply in replies]
            logprobs[size] = [[token[0] for token in i["output_token_logprobs"]] for i in infos]
            versions.update(version for info in infos for version in info["policy_version"])
            assert [len(row) for row in logprobs[size]] == [GREEDY["max_new_tokens"]] * size
        return cls(logprobs, versions)


def _prompts(size: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(size)
    # every model here has at least as many tokens
    return torch.randint(4096, (size, PROMPT_TOKENS), generator=random).tolist()


def digests_of(engine: EngineProcess | Server) -> list[Digest]:
    """Of each rank."""
    return engine.control({"op": "digest"})["ranks"]  # type: ignore[no-any-return]


def digest_of(engine: EngineProcess | Server) -> Digest:
    """Of the only rank."""
    (rank,) = digests_of(engine)
    return rank


def sha256(digest: Digest) -> dict[str, str]:
    """Of each parameter, by name."""
    return {n: held["sha256"] for n, held in digest.items() if not n.endswith(DERIVED)}


def storage(digest: Digest) -> dict[str, tuple[Any, ...]]:
    """Where everything lies and how it is laid out: what no update may change."""
    return {n: (held["address"], held["dtype"], held["shape"]) for n, held in digest.items()}


def nbytes_of(digest: Digest) -> int:
    """Bytes of all parameters and buffers."""
    dtypes = ((getattr(torch, h["dtype"].removeprefix("torch.")), h) for h in digest.values())
    return sum(dtype.itemsize * math.prod(held["shape"]) for dtype, held in dtypes)


def captured_sizes(log: Path) -> list[int]:
    """The batch sizes that SGLang captured decode graphs for."""
    found = re.findall(
        r"Capture target decode .*?bs=\[([\d, ]+)\]", log.read_text(errors="replace")
    )
    return [int(size) for size in found[-1].split(",")]


def decoded_sizes(log: Path) -> set[tuple[int, bool]]:
    """Each size of a decode batch so far, and whether a CUDA graph ran it."""
    found = re.findall(
        r"Decode batch.*?#running-req: (\d+),.*cuda graph: (\w+)", log.read_text(errors="replace")
    )
    return {(int(size), graph == "True") for size, graph in found}


def used_bytes() -> int:
    """Memory in use on the whole device, by all processes."""
    free, total = torch.cuda.mem_get_info()
    return total - free
