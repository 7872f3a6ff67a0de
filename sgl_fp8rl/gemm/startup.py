"""At start, once weights are in place: give each FP8 linear layer its choice of kernels.

Rank 0 reads the user's table, then the one that comes with the package, and where neither has the
model's shapes it measures the decode batches and keeps the result: half a minute, in which a kernel
that compiles last is not counted, and a second or two for each shape of a table to be checked. All
ranks of the engine take its table, so that they compute alike. No KV cache is there yet: SGLang
sizes it after this, by the memory that is free, so what measuring takes (about 2 GB for the four
shapes of an 8B model) is given back before.
"""

import gc
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from server_args import Fp8RLServerArgs
from sgl_fp8rl import compat, fusion
from sgl_fp8rl.gemm import table, warmup
from sgl_fp8rl.gemm.bench_inputs import BenchInputs, cuda_graph_us
from sgl_fp8rl.gemm.broadcast import broadcast_from_rank0
from sgl_fp8rl.gemm.candidates import CANDIDATES, FLASHINFER, STOCK, flashinfer_is_built
from sgl_fp8rl.gemm.dispatch import Choices
from sgl_fp8rl.gemm.startup_experts import assign_tile_configs, compile_experts
from sgl_fp8rl.gemm.table import FILES, Entry, Shape, Table
from sgl_fp8rl.gemm.tune import (
    DECODE_ROWS,
    ERROR_BOUND,
    NOT_THE_KERNELS,
    Measurement,
    compiling_only_what_runs,
    faults,
    list_attempts,
    measure,
    pick,
    rows_of,
)
from sgl_fp8rl.gemm.tune_cache import Machine
from sgl_fp8rl.ops.activation import quantize_tokens

logger = logging.getLogger(__name__)

QUICK_S = 25.0
"""No measurement begins later; the last may compile its kernel, which takes seconds."""
QUICK_CONFIGS = 3
SWAPPED_ROWS, SWAPPED_STEP = 32, 8


def prepare(original: Any, runner: Any) -> None:
    """AROUND what SGLang calls once the weights of a ``ModelRunner`` are in place."""
    warmup.warm_up(original, runner)
    assign_tile_configs(runner.model, runner.gpu_id)
    layers = list(warmup.gemm_layers(runner.model))
    if not layers or (why := _why_stock(runner)):
        if layers:
            logger.info("FP8 linear layers run SGLang's own kernels: %s", why)
        return
    shapes = sorted({(n, k) for n, k in (layer.weight.shape for layer in layers)})
    chosen = broadcast_from_rank0(lambda: _here(shapes, runner.gpu_id))
    choices = {shape: Choices.of(chosen.get(shape, ())) for shape in shapes}
    for layer in layers:
        layer.quant_method.choices = choices[tuple(layer.weight.shape)]
    for layer in {tuple(layer.weight.shape): layer for layer in layers}.values():
        compile_choices(layer)
    logger.info("%d of %d FP8 weight shapes run measured kernels", len(chosen), len(shapes))
    compile_experts(runner.model)
    fusion.fuse(runner.model)


def compile_choices(layer: Any) -> None:
    """Run each kernel of the layer but the stock one, which SGLang compiles.

    None is to compile while requests wait, or at its first call inside the capture of a CUDA graph.
    Within ``ROW_STEP`` rows no library changes its tile, or within 8 of a batch below 32, where
    FlashInfer swaps the operands.
    """
    choices = layer.quant_method.choices
    k = layer.weight.shape[1]
    below = 0
    for bound, kernel in zip(choices.bounds, choices.kernels, strict=False):
        if kernel is not choices.kernels[-1]:
            step = warmup.ROW_STEP if below >= SWAPPED_ROWS else SWAPPED_STEP
            for m in (*range(below + step, bound, step), bound):
                x_MK = torch.zeros(m, k, dtype=torch.bfloat16, device=layer.weight.device)
                kernel(*quantize_tokens(x_MK), layer.weight, layer.weight_scale_inv)
        below = bound


def _why_stock(runner: Any) -> str | None:
    backend = compat.get_fp8_gemm_runner_backend()
    if not backend.is_auto():
        return f"--fp8-gemm-backend {backend.value} was asked for"
    if torch.cuda.get_device_capability(runner.gpu_id)[0] != 9:
        return "the table of kernels is for Hopper"
    if runner.model_config.dtype != torch.bfloat16:
        return f"the model computes in {runner.model_config.dtype}"
    deterministic = compat.get_exec().deterministic
    if deterministic.enable_deterministic_inference or deterministic.rl_on_policy_target:
        return "deterministic inference was asked for, and kernels that change with M are not"
    return None


def _here(shapes: Sequence[Shape], device: int) -> Table:
    folder = Fp8RLServerArgs.from_env().tune_cache
    may_measure = not compat.cuda_graph_fully_disabled()
    return find(shapes, Machine.here(device), folder, may_measure=may_measure)


def find(
    shapes: Sequence[Shape], machine: Machine, folder: str, *, may_measure: bool = True
) -> Table:
    """The entries of ``shapes``, from the tables there are or measured now.

    Args:
        folder: the tune cache.
        may_measure: False where launches cost more than kernels, without CUDA graphs.
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
        with compiling_only_what_runs():
            checked = {shape: accurate(shape, found[shape]) for shape in unchecked}
            tuned, finished = quick_tune(missing)
    except torch.OutOfMemoryError as error:
        logger.warning("Kernels are not measured, for want of memory: %s", error)
        return {shape: found[shape] for shape in found if shape not in unchecked}
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    logger.info(
        "Measured kernels of %d FP8 weight shapes in %.1f s%s; sgl-fp8rl tune measures more",
        len(unchecked) + len(missing),
        time.monotonic() - began,
        "" if finished else ", when time was up, so the next start does it again",
    )
    kept = checked | tuned if finished else checked
    if kept:
        try:
            # read again: another engine may have measured other shapes meanwhile
            path = FILES.path(machine, folder)
            FILES.save(path, machine, FILES.own(machine, folder) | kept)
        except OSError as error:
            logger.warning("The table of kernels cannot be kept: %s", error)
    return found | checked | tuned


def only_built(chosen: Table) -> Table:
    """The same table with the stock choice where a start would have to build FlashInfer's GEMM."""
    names = {entry.kernel for entries in chosen.values() for entry in entries}
    if FLASHINFER not in names or flashinfer_is_built():
        return chosen
    logger.warning(
        "The table of kernels has FlashInfer's block-FP8 GEMM, which is not built any more, so "
        "DeepGEMM runs in its place; run sgl-fp8rl tune again"
    )
    return {
        shape: [
            table.stock_entry(e.m, e.stock_us) if e.kernel == FLASHINFER else e for e in entries
        ]
        for shape, entries in chosen.items()
    }


def quick_tune(shapes: Sequence[Shape]) -> tuple[Table, bool]:
    """Measure decode batches, the largest first, until time is up; and whether all were measured.

    One candidate after the other, for all shapes: what a library needs seconds to compile must not
    keep the others from being measured. What was compiled is there at the next start.
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
            attempts = list_attempts(shape, rows, {name: candidate}, QUICK_CONFIGS)
            found[shape] += measure(inputs[shape], attempts, until)
    finished = time.monotonic() < until
    return {shape: pick(found[shape], DECODE_ROWS) for shape in shapes}, finished


def accurate(shape: Shape, entries: Sequence[Entry]) -> list[Entry]:
    """The entries, with the stock choice for each kernel that fails the accuracy check here."""
    inputs = BenchInputs(*shape, "cuda", cuda_graph_us)
    # Each at its own M: FlashInfer's GEMM is another kernel from 32 rows on.
    return [
        entry
        if entry.kernel == STOCK or _is_accurate(inputs, entry)
        else table.stock_entry(entry.m, entry.stock_us)
        for entry in entries
    ]


def _is_accurate(inputs: BenchInputs, entry: Entry) -> bool:
    try:
        kernel = CANDIDATES[entry.kernel].bind(entry.config)
        return inputs.error(kernel, entry.m) <= ERROR_BOUND
    except NOT_THE_KERNELS:
        raise
    except faults() as fault:
        logger.warning("The kernel %s does not run here: %s", entry.kernel, fault)
        return False
