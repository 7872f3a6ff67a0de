"""Compile each DeepGEMM kernel that an engine can need, in parallel, before it serves.

SGLang's warm-up runs every M (rows of a batch) from 1 to 16384 and more, one after the other.
On Hopper DeepGEMM compiles neither M nor N nor K into a kernel, only the tile that it chose, and M
enters that choice (``SM90ArchSpec`` in its ``heuristics/sm90.hpp``) as the number of row blocks,
``ceil(M / b)`` for b = 64, 128, 256, and for b = 16 and 32 where one such block holds the batch.
So one M per range is enough, for the ranges 1..16, 17..32, 33..64, 65..128, 129..192, and so on: a
batch of any size in a range finds its kernel compiled.

Running a GEMM compiles its kernel, so a few processes first run shares of them into one cache
folder (a kernel appears there by a rename); SGLang's own pass then loads them.
"""

import hashlib
import json
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.ops.reference import BLOCK, FP8_DTYPE

logger = logging.getLogger(__name__)

ROW_STEP = 64
"""The smallest row block for batches of more than 32 rows."""
SMALL_BATCHES = (16, 32)
"""Row blocks that are used only for a batch that fits into one."""
MAX_RUNNING_REQUESTS = 4096
"""SGLang's default limit of running requests."""
LARGEST_SHARED = 4096
"""Above this M new tiles are rare: SGLang's own pass compiles those."""
MAX_PROCESSES = 16
PROCESS_BYTES = 1 << 30
"""A CUDA context and its libraries, about 0.6 GB, rounded up."""
TIMEOUT_S = 300.0

Shape = tuple[int, int]
"""N, K of a weight on this rank."""


def warm_up(shapes: list[Shape], runner: Any) -> list[int] | None:
    """Compile for GEMMs of these shapes, once ``runner`` has its weights.

    Returns:
        the batch sizes that suffice for SGLang's own pass, or None where it must keep its list.
    """
    stock = compat.deep_gemm_warmup
    if not stock.ENABLE_JIT_DEEPGEMM or left_to_user(stock):
        return None
    if torch.cuda.get_device_capability(runner.gpu_id)[0] != 9:
        return None  # other architectures select tiles by other rules
    if compat.Fp8MoEMethod.is_deepgemm_moe_runner_backend_enabled():
        return None  # grouped GEMMs have more rows than a batch, and need SGLang's own list
    if not shapes or runner.model_config.dtype != torch.bfloat16:
        return None  # another quantization, another GEMM backend, or FP16, which goes to Triton
    rows = batch_sizes(largest_batch(compat.get_schedule(), max(stock._BUILTIN_M_LIST)))
    if stock._IS_FIRST_RANK_ON_NODE:
        folder = Path(os.environ["DG_JIT_CACHE_DIR"])
        compile_ahead(shapes, rows, runner.gpu_id, folder)
    return rows


def left_to_user(stock: Any) -> bool:
    """Whether the user turned off SGLang's warm-up, or set the sizes that it runs."""
    return (
        not stock._ENABLE_JIT_DEEPGEMM_PRECOMPILE
        or stock._IN_PRECOMPILE_STAGE  # python -m sglang.compile_deep_gemm
        or "SGLANG_JIT_DEEPGEMM_FAST_WARMUP" in os.environ
    )


def largest_batch(schedule: Any, bound: int) -> int:
    """The most rows of one forward pass in SGLang, at most ``bound``, its own limit.

    Without chunked prefill a pass is as long as its prompts, and SGLang's limit applies.
    """
    chunk: int = schedule.chunked_prefill_size
    if chunk < 1:
        return bound
    running: int = schedule.max_running_requests or MAX_RUNNING_REQUESTS
    return min(bound, max(chunk, running))


def batch_sizes(largest: int) -> list[int]:
    """One M for each range of batch sizes that share a kernel, up to ``largest``."""
    steps = -(-largest // ROW_STEP)
    return [*SMALL_BATCHES, *range(ROW_STEP, steps * ROW_STEP + 1, ROW_STEP)]


def compile_ahead(shapes: list[Shape], rows: list[int], device: int, folder: Path) -> None:
    """Fill DeepGEMM's cache ``folder`` from several processes, unless that was done before.

    A process that fails costs only time: SGLang's own pass compiles the missing kernels.
    """
    rows = [m for m in rows if m <= LARGEST_SHARED]
    processes = process_count(shapes, rows, device)
    done = folder / "cache" / f"fp8rl-{_key(shapes, rows, device)}"
    if processes < 2 or done.exists():
        return
    logger.info(
        "Compiling DeepGEMM kernels for %d weight shapes and %d batch sizes in %d processes",
        len(shapes),
        len(rows),
        processes,
    )
    began = time.perf_counter()
    failure = _run_shares(shapes, rows, device, processes)
    seconds = time.perf_counter() - began
    if failure is None:
        logger.info("Compiled DeepGEMM kernels in %.1f s", seconds)
        try:
            done.parent.mkdir(parents=True, exist_ok=True)
            done.touch()
        except OSError as error:
            logger.warning(
                "DeepGEMM's cache cannot be marked as complete, so each start looks through it; "
                "make its folder writable: %s",
                error,
            )
    else:
        logger.warning(
            "Compiling DeepGEMM kernels side by side failed after %.1f s, so they are compiled one "
            "after the other: %s",
            seconds,
            failure,
        )


def process_count(shapes: list[Shape], rows: list[int], device: int) -> int:
    """How many processes compile these GEMMs: one per core, within half of the device's free
    memory."""
    free, _ = torch.cuda.mem_get_info(device)
    bytes_each = PROCESS_BYTES + sum(_elements(shapes, rows))
    gemms, cores = len(shapes) * len(rows), len(os.sched_getaffinity(0))
    return min(MAX_PROCESSES, cores, gemms, free // 2 // bytes_each)


def _elements(shapes: list[Shape], rows: list[int]) -> tuple[int, int, int]:
    """Bytes of the largest operands: codes [M, K], codes [N, K], BF16 result [M, N]."""
    m = max(rows)
    return (
        m * max(k for _, k in shapes),
        max(n * k for n, k in shapes),
        m * max(n for n, _ in shapes) * 2,
    )


def _key(shapes: list[Shape], rows: list[int], device: int) -> str:
    try:
        compiler = version("sgl-deep-gemm")
    except PackageNotFoundError:
        compiler = ""
    properties = torch.cuda.get_device_properties(device)
    nvrtc = os.environ.get("DG_JIT_USE_NVRTC")
    what = [compiler, nvrtc, properties.name, properties.multi_processor_count, shapes, rows]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _run_shares(shapes: list[Shape], rows: list[int], device: int, processes: int) -> str | None:
    """Run all shares side by side; return the last line of a process that failed, or None."""
    # the children import from the same paths as this process
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    deadline = time.monotonic() + TIMEOUT_S
    children: list[subprocess.Popen[str]] = []
    failure = None
    try:
        for index in range(processes):
            share = json.dumps([index, processes, device, shapes, rows])
            children.append(
                subprocess.Popen(
                    [sys.executable, "-m", __name__, share],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        for child in children:
            said, _ = child.communicate(timeout=max(0.0, deadline - time.monotonic()))
            if child.returncode != 0:
                failure = said.strip().rpartition("\n")[2] or f"exit status {child.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.communicate()
    return failure


def share_of(
    index: int, processes: int, shapes: Sequence[Shape], rows: Sequence[int]
) -> list[tuple[int, int, int]]:
    """The (M, N, K) of process ``index``: neighbors may share a kernel and go to different ones."""
    gemms = [(m, n, k) for n, k in shapes for m in rows]
    random.Random(0).shuffle(gemms)
    return gemms[index::processes]


def compile_share(
    index: int, processes: int, device: int, shapes: list[Shape], rows: list[int]
) -> None:
    """Run the GEMMs of one process, which compiles the kernels that the cache lacks."""
    import deep_gemm  # type: ignore[import-untyped, import-not-found, unused-ignore]

    torch.cuda.set_device(device)
    left, right, result = _elements(shapes, rows)
    a = torch.zeros(left, dtype=torch.uint8, device="cuda").view(FP8_DTYPE)
    b = torch.zeros(right, dtype=torch.uint8, device="cuda").view(FP8_DTYPE)
    d = torch.empty(result // 2, dtype=torch.bfloat16, device="cuda")
    for m, n, k in share_of(index, processes, shapes, rows):
        a_scales = torch.ones(m, k // BLOCK, device="cuda")
        b_scales = torch.ones(-(-n // BLOCK), k // BLOCK, device="cuda")
        deep_gemm.fp8_gemm_nt(
            (a[: m * k].view(m, k), a_scales),
            (b[: n * k].view(n, k), b_scales),
            d[: m * n].view(m, n),
        )
    torch.cuda.synchronize()


if __name__ == "__main__":
    compile_share(*json.loads(sys.argv[1]))
