"""Measure the tables of GEMMs that the package ships: ``python -m benchmarks.kernels.gemm_tables``.

Every kernel that ``sgl-fp8rl tune`` tries is measured at all of its batches, for the linears of the
benchmarked models. Two tables are made of these times, one without FlashInfer's GEMM, which no
start builds. All GPUs of the host share the work. Several processes a GPU compile every kernel
before any is timed.
"""

import argparse
import multiprocessing
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from benchmarks.engines import models
from sgl_fp8rl.engine.gemm.candidates import FLASHINFER
from sgl_fp8rl.engine.gemm.table import FILES, SHIPPED, Shape
from sgl_fp8rl.engine.gemm.tune_cache import Machine
from sgl_fp8rl.engine.startup.deep_gemm import compiling_only_what_runs
from sgl_fp8rl.engine.tuning.bench_inputs import BenchInputs, cuda_graph_us
from sgl_fp8rl.engine.tuning.tune import Measurement, list_attempts, measure, pick, rows_of, tried
from sgl_fp8rl.tools.tune import BUCKETS

RANKS = {"qwen3-32b": 2}
"""Tensor parallel size of a model, where it is not 1."""
COMPILERS = 6
"""Processes of a GPU that compile."""
ROWS = rows_of(BUCKETS)


def shapes() -> list[Shape]:
    """N, K of the linears of the benchmarked models."""
    found = set()
    for name, shape in models.SHAPES.items():
        found |= set(linears(shape, RANKS.get(name, 1)))
    return sorted(found)


def linears(shape: models.Shape, tp: int) -> list[Shape]:
    """N, K of a layer's on a rank; experts are none of them."""
    queries, keys = shape.heads * shape.head_dim // tp, shape.kv_heads * shape.head_dim // tp
    found = [(queries + 2 * keys, shape.hidden), (shape.hidden, queries)]
    if not shape.experts:
        inner = shape.intermediate // tp
        found += [(2 * inner, shape.hidden), (shape.hidden, inner)]
    return found


def compile_share(gpu: int, shape: Shape, rows: Sequence[int]) -> None:
    """Run the kernels of one shape at these M, which compiles them."""
    torch.cuda.set_device(gpu)
    inputs = BenchInputs(*shape, "cuda", cuda_graph_us)
    with compiling_only_what_runs():
        for attempt in list_attempts(shape, rows):
            kernel = attempt.candidate.bind(attempt.config)
            codes, scales = inputs.activations(attempt.m)[0]
            tried(lambda: float(kernel(codes, scales, *inputs.weights[0])[0, 0]))  # noqa: B023


def measure_shapes(gpu: int, some: Sequence[Shape]) -> dict[Shape, list[Measurement]]:
    """All times of these shapes, alone on a GPU."""
    torch.cuda.set_device(gpu)
    found = {}
    with compiling_only_what_runs():
        for shape in some:
            inputs = BenchInputs(*shape, "cuda", cuda_graph_us)
            found[shape] = list(measure(inputs, list_attempts(shape, ROWS)))
    return found


def save(measured: dict[Shape, list[Measurement]], folder: Path) -> None:
    """Both tables of these times.

    Raises:
        RuntimeError: a kernel has none: it does not run here.
    """
    faults = Counter(x.fault for times in measured.values() for x in times if x.fault is not None)
    for fault, count in faults.most_common():
        print(f"skipped {count} times: {fault}")
    timed = {x.kernel for times in measured.values() for x in times if x.us is not None}
    if missing := {x.kernel for times in measured.values() for x in times} - timed:
        raise RuntimeError(f"no shape has a time of {', '.join(sorted(missing))}; see above")
    machine = Machine.here(0)
    for name, all_kernels in ((machine.slug, False), (f"{machine.slug}-flashinfer", True)):
        found = {
            shape: pick([x for x in times if all_kernels or x.kernel != FLASHINFER], BUCKETS)
            for shape, times in measured.items()
        }
        FILES.save(folder / f"{name}.json", machine, found)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.gemm_tables", description=__doc__
    )
    parser.add_argument("--output", type=Path, default=SHIPPED, help="folder of the tables")
    folder = parser.parse_args().output
    gpus = range(torch.cuda.device_count())
    if not gpus:
        parser.error("there is no GPU here")
    dealt = {gpu: shapes()[gpu :: len(gpus)] for gpu in gpus}
    shares = [
        (gpu, shape, ROWS[first::COMPILERS])
        for gpu, some in dealt.items()
        for shape in some
        for first in range(COMPILERS)
    ]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(COMPILERS * len(gpus), spawn) as pool:
        list(pool.map(compile_share, *zip(*shares, strict=True)))
    with ProcessPoolExecutor(len(gpus), spawn) as pool:
        found = list(pool.map(measure_shapes, dealt, dealt.values()))
    save({shape: times for each in found for shape, times in each.items()}, folder)


if __name__ == "__main__":
    main()
