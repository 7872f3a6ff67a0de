"""The table of kernels for one start: stored or shipped entries, else quick measurements.

The user's table takes precedence over the one that ships with the package. If neither has the
model's shapes, decode batches are measured and the result is stored: this takes half a minute plus
the last compilation, and checking a shape of a table a second or two. The memory for measuring
(about 2 GB for the four shapes of an 8B model) is freed.
"""

import gc
import logging
import time
from collections.abc import Sequence

import torch

from sgl_fp8rl.engine.gemm import table
from sgl_fp8rl.engine.gemm.candidates import CANDIDATES, FLASHINFER, STOCK, flashinfer_is_built
from sgl_fp8rl.engine.gemm.table import FILES, Entry, Shape, Table
from sgl_fp8rl.engine.gemm.tune_cache import Machine
from sgl_fp8rl.engine.tuning.bench_inputs import BenchInputs, cuda_graph_us
from sgl_fp8rl.engine.tuning.tune import (
    DECODE_ROWS,
    ERROR_BOUND,
    Measurement,
    list_attempts,
    measure,
    pick,
    rows_of,
    tried,
)

logger = logging.getLogger(__name__)

QUICK_S = 25.0
"""No measurement begins after this; the last may still compile its kernel for some seconds."""


def find(
    shapes: Sequence[Shape], machine: Machine, folder: str, *, may_measure: bool = True
) -> Table:
    """The entries of ``shapes``, from the existing tables or measured now.

    The caller keeps SGLang from compiling DeepGEMM's kernels for every M.

    Args:
        folder: the tune cache.
        may_measure: False without CUDA graphs, where launches cost more than kernels.
    """
    mine = only_built(FILES.own(machine, folder))
    theirs, same_versions = table.shipped(machine, flashinfer_is_built())
    found = {shape: (theirs | mine)[shape] for shape in shapes if shape in theirs | mine}
    unchecked = [] if same_versions else [shape for shape in found if shape not in mine]
    missing = [shape for shape in shapes if shape not in found] if may_measure else []
    if not (unchecked or missing):
        return found
    began = time.monotonic()
    try:
        checked = {shape: accurate(shape, found[shape]) for shape in unchecked}
        tuned, finished = quick_tune(missing)
    except torch.OutOfMemoryError as error:
        logger.warning(
            "Kernels are not measured, out of memory; run sgl-fp8rl tune alone: %s", error
        )
        return {shape: found[shape] for shape in found if shape not in unchecked}
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    logger.info(
        "Measured kernels of %d FP8 weight shapes in %.1f s%s; sgl-fp8rl tune measures more",
        len(unchecked) + len(missing),
        time.monotonic() - began,
        "" if finished else ", out of time, so the next start measures again",
    )
    kept = checked | tuned if finished else checked
    if kept:
        try:
            # read again: another engine may have measured other shapes in the meantime
            path = FILES.path(machine, folder)
            FILES.save(path, machine, FILES.own(machine, folder) | kept)
        except OSError as error:
            logger.warning(
                "The table of kernels cannot be saved, so each start measures again; set "
                "FP8RL_TUNE_CACHE to a folder that can be written: %s",
                error,
            )
    return found | checked | tuned


def only_built(chosen: Table) -> Table:
    """The same table with the stock choice if a start would have to build FlashInfer's GEMM."""
    names = {entry.kernel for entries in chosen.values() for entry in entries}
    if FLASHINFER not in names or flashinfer_is_built():
        return chosen
    logger.warning(
        "The table of kernels has FlashInfer's block-FP8 GEMM, which is no longer built, so "
        "DeepGEMM runs instead; run sgl-fp8rl tune again"
    )
    return {
        shape: [
            table.stock_entry(e.m, e.stock_us) if e.kernel == FLASHINFER else e for e in entries
        ]
        for shape, entries in chosen.items()
    }


def quick_tune(shapes: Sequence[Shape]) -> tuple[Table, bool]:
    """Measure decode batches, the largest first, until time is up; also return whether all were.

    Candidates come one by one, each for all shapes: a library that takes seconds to compile must
    not keep the others from being measured. The next start finds its kernels compiled.
    """
    candidates = dict(CANDIDATES)
    if not flashinfer_is_built():
        del candidates[FLASHINFER]  # building it alone takes longer
    until = time.monotonic() + QUICK_S
    rows = sorted(rows_of(DECODE_ROWS), reverse=True)
    inputs = {shape: BenchInputs(*shape, "cuda", cuda_graph_us) for shape in shapes}
    found: dict[Shape, list[Measurement]] = {shape: [] for shape in shapes}
    for name, candidate in candidates.items():
        for shape in shapes:
            attempts = list_attempts(shape, rows, {name: candidate})
            found[shape] += measure(inputs[shape], attempts, until)
    finished = time.monotonic() < until
    return {shape: pick(found[shape], DECODE_ROWS) for shape in shapes}, finished


def accurate(shape: Shape, entries: Sequence[Entry]) -> list[Entry]:
    """The entries, with the stock choice for each kernel that fails the accuracy check here."""
    inputs = BenchInputs(*shape, "cuda", cuda_graph_us)
    # Each at its own M: FlashInfer's GEMM is a different kernel from 32 rows on.
    return [
        entry
        if entry.kernel == STOCK or _is_accurate(inputs, entry)
        else table.stock_entry(entry.m, entry.stock_us)
        for entry in entries
    ]


def _is_accurate(inputs: BenchInputs, entry: Entry) -> bool:
    def error() -> float:
        return inputs.error(CANDIDATES[entry.kernel].bind(entry.config), entry.m)

    found, fault = tried(error)
    if found is None:
        logger.warning("The kernel %s does not run here: %s", entry.kernel, fault)
        return False
    return found <= ERROR_BOUND
