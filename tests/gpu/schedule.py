"""Run all that needs GPUs, as much at once as they allow: ``python -m tests.gpu.schedule FOLDER``.

First parts that share GPUs, those that need all before the others, then the soak and those marked
``alone``, one on each GPU. Names of files behind the folder run only these. ``FOLDER`` gets a
record, a log and measured values of each part (``record.py``).
"""

import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.gpu import record

SHARE = 5
"""Parts that run on one GPU at a time; engines of several fit into its memory."""
SOAK_UPDATES = 200
TOGETHER = (
    ("backends",),
    ("load",),
    ("updates",),
    ("oracle",),
    ("mla",),
    ("in_flight",),
    ("kv_cache",),
    ("gemms",),
    ("experts",),
    ("kv_triton", "qk_rope", "kv_int8_triton", "kv_pages_triton"),
    (
        "flashinfer_plans",
        "kv_attention",
        "paged_decode",
        "paged_prefill",
        "activation",
        "correction",
        "precision",
        "fp8_forward",
    ),
    (
        "delta",
        "delta_scatter",
        "expert_rows",
        "formats",
        "sample_triton",
        "weight_quant_triton",
    ),
)
"""Files of a part, the longest first."""
ALONE = (
    ("updates",),
    ("memory_saver", "cuda_memory"),
    ("host_fallback",),
    ("load",),
    ("kv_cache",),
)
ON_ALL_GPUS = (("shards",), ("two_ranks",), ("two_ranks_oracle",))
WORKERS = {"two_ranks": 4, "updates": 4, "shards": 3, "mla": 2}
"""Processes of a part whose fixture ``run`` has several engines, each of one process."""
ENVIRONMENT = {
    # other tests use one of the GPUs
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
}
Job = Callable[[str], int]
"""Takes the GPUs that it may see, and returns an exit status."""


def job(folder: Path, names: tuple[str, ...], alone: bool) -> tuple[str, Job]:
    """A part and its name."""
    name = "-".join([*names, *(["alone"] if alone else [])])
    files = [f"tests/gpu/test_{name}.py" for name in names]
    workers = 1 if alone else max(WORKERS.get(name, 1) for name in names)
    needed = ",".join(map(str, range(torch.cuda.device_count()))) if names in ON_ALL_GPUS else None

    def run(gpus: str) -> int:
        environment = os.environ | ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": needed or gpus}
        return record.run_part(folder / f"{name}.json", files, alone, workers, environment)

    return name, run


def soak(folder: Path) -> tuple[str, Job]:
    output = folder / "soak" / "cuda.json"

    def run(gpus: str) -> int:
        output.parent.mkdir(exist_ok=True)
        options = [f"--updates={SOAK_UPDATES}", f"--output={output}"]
        command = [sys.executable, "-m", "tests.soak", "--device=cuda", *options]
        with output.with_suffix(".out").open("w") as log:
            return subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus},
            ).returncode

    return "soak", run


def run_all(jobs: Iterable[tuple[str, Job]], share: int) -> int:
    """Run jobs, ``share`` at a time on each GPU; how many failed."""
    due: queue.SimpleQueue[tuple[str, Job]] = queue.SimpleQueue()
    for each in jobs:
        due.put(each)

    def work(gpu: str) -> int:
        failed = 0
        while True:
            try:
                name, run = due.get_nowait()
            except queue.Empty:
                return failed
            start = time.monotonic()
            status = run(gpu)
            failed += status != 0
            print(f"{name}: status {status}, {time.monotonic() - start:.0f} s", flush=True)

    gpus = [str(index) for index in range(torch.cuda.device_count())] * share
    with ThreadPoolExecutor(len(gpus)) as pool:
        return sum(pool.map(work, gpus))


def main() -> int:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    folder, wanted = Path(sys.argv[1]), set(sys.argv[2:])
    folder.mkdir(parents=True, exist_ok=True)

    def chosen(parts: tuple[tuple[str, ...], ...], alone: bool) -> list[tuple[str, Job]]:
        mine = [tuple(n for n in names if not wanted or n in wanted) for names in parts]
        return [job(folder, names, alone) for names in mine if names]

    failed = run_all(chosen(ON_ALL_GPUS + TOGETHER, alone=False), SHARE)
    soaks = [soak(folder)] if not wanted or "soak" in wanted else []
    failed += run_all(soaks + chosen(ALONE, alone=True), 1)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
