"""``sgl-fp8rl tune``: measure all batch sizes of a model's FP8 layers on this GPU."""

import sys
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from sgl_fp8rl.engine.gemm import expert_tiles, table
from sgl_fp8rl.engine.gemm.candidates import Config
from sgl_fp8rl.engine.gemm.expert_tiles import ExpertShape, Pair
from sgl_fp8rl.engine.gemm.table import Entry, Shape, Table
from sgl_fp8rl.engine.gemm.tune_cache import Machine
from sgl_fp8rl.engine.tuning import expert_tune
from sgl_fp8rl.engine.tuning.bench_inputs import BenchInputs, cuda_graph_us
from sgl_fp8rl.engine.tuning.expert_bench_inputs import ExpertBenchInputs
from sgl_fp8rl.engine.tuning.tune import (
    DECODE_ROWS,
    PREFILL_ROWS,
    Measurement,
    list_attempts,
    measure,
    pick,
    rows_of,
)
from sgl_fp8rl.tables import align

BUCKETS = (*DECODE_ROWS, *PREFILL_ROWS)
COPIED_BYTES = 1 << 30


def run(shapes: Sequence[Shape], experts: Sequence[ExpertShape], folder: str) -> None:
    """Tune linear layers and experts, keep the result in the tune cache ``folder``, and print it.

    The caller keeps SGLang from compiling DeepGEMM's kernels for every M.

    Raises:
        OSError: a table cannot be written.
    """
    machine = Machine.here(0)
    faults = Counter[str]()
    paths = []
    if shapes:
        paths.append(table.FILES.path(machine, folder))
        tuned = tune_linears(shapes, machine, folder, faults)
        print(render(tuned, copy_bytes_per_us()))
    if experts:
        paths.append(expert_tiles.FILES.path(machine, folder))
        tiles = tune_experts(experts, machine, folder, faults)
        print(render_experts(tiles, copy_bytes_per_us()))
    for fault, times in faults.most_common():
        print(f"skipped {times} times: {fault}")
    print("\nkept in " + " and ".join(map(str, paths)))


def tune_linears(
    shapes: Sequence[Shape], machine: Machine, folder: str, faults: Counter[str]
) -> Table:
    """Measure and save one shape after the other; ``faults`` counts what was skipped."""
    files = table.FILES
    path = files.path(machine, folder)
    files.save(path, machine, files.own(machine, folder))  # fails now, not after measuring
    attempts_of = {shape: list_attempts(shape, rows_of(BUCKETS)) for shape in shapes}
    tuned: Table = {}
    with _bar(sum(map(len, attempts_of.values()))) as bar:
        for (n, k), attempts in attempts_of.items():
            bar.set_description(f"{n} x {k}")
            measured = measure(BenchInputs(n, k, "cuda", cuda_graph_us), attempts)
            tuned[n, k] = pick(_watched(measured, bar, faults), BUCKETS)
            files.save(path, machine, files.own(machine, folder) | tuned)
    return tuned


def tune_experts(
    shapes: Sequence[ExpertShape], machine: Machine, folder: str, faults: Counter[str]
) -> expert_tiles.Table:
    """Measure and save one M after the other; the rest keep what an engine uses now."""
    files = expert_tiles.FILES
    path = files.path(machine, folder)
    files.save(path, machine, files.own(machine, folder))
    known = expert_tiles.find(shapes, machine, folder)
    attempts_of = {
        shape: {m: expert_tune.list_attempts(shape, m) for m in expert_tune.tokens_of(shape)}
        for shape in shapes
    }
    tuned: expert_tiles.Table = {}
    total = sum(len(attempts) for by_m in attempts_of.values() for attempts in by_m.values())
    with _bar(total) as bar:
        for shape, by_m in attempts_of.items():
            bar.set_description(f"compiling tiles of {'x'.join(map(str, shape))}")
            expert_tune.compile_ahead(shape, [x for attempts in by_m.values() for x in attempts])
            inputs = ExpertBenchInputs(shape, "cuda", cuda_graph_us)
            pairs = {m: Pair(m, *expert_tiles.tiles(known.get(shape), shape, m)) for m in by_m}
            for m, attempts in by_m.items():
                bar.set_description(f"{'x'.join(map(str, shape))}, {m} tokens")
                measured = _watched(expert_tune.measure(inputs, attempts), bar, faults)
                pairs[m] = expert_tune.pick(measured, m, expert_tiles.stock(shape, m))
                tuned[shape] = list(pairs.values())
                files.save(path, machine, files.own(machine, folder) | tuned)
    return tuned


def _bar(total: int) -> tqdm:
    return tqdm(total=total, unit="kernel", file=sys.stderr)


def _watched(
    measurements: Iterable[Measurement], bar: tqdm, faults: Counter[str]
) -> list[Measurement]:
    """Collect the measurements, and advance the progress bar with each."""
    seen = []
    for measurement in measurements:
        seen.append(measurement)
        if measurement.fault is not None:
            faults[f"{measurement.kernel}: {measurement.fault}"] += 1
        bar.update()
    return seen


def render(tuned: Table, bytes_per_us: float) -> str:
    """A plain text table, one line an entry; the floor is what must be read and written."""
    header = ("N x K", "M up to", "us", "DeepGEMM us", "ratio", "floor us", "kernel")
    rows: list[tuple[str, ...]] = [header]
    for (n, k), entries in tuned.items():
        for entry in entries:
            floor = (n * k + entry.m * k + 2 * entry.m * n) / bytes_per_us
            config = " ".join(f"{name}={value}" for name, value in entry.config.items())
            rows.append(_row(f"{n} x {k}", entry, floor, f"{entry.kernel} {config}".strip()))
    return align(rows, left=[len(header) - 1])


def render_experts(tuned: expert_tiles.Table, bytes_per_us: float) -> str:
    """The same for experts, one line for each M that was measured."""
    header = ("E x H x I, top k", "M", "us", "SGLang us", "ratio", "floor us", "gate_up; down")
    rows: list[tuple[str, ...]] = [header]
    for shape, pairs in tuned.items():
        E, H, I, T = shape  # noqa: E741
        for pair in pairs:
            floor = floor_bytes(shape, pair.m) / bytes_per_us
            tiles = f"{_tiles(pair.up)}; {_tiles(pair.down)}"
            rows.append(_row(f"{E} x {H} x {I}, {T}", pair, floor, tiles))
    return align(rows, left=[len(header) - 1])


def _row(shape: str, entry: Entry | Pair, floor_us: float, kernel: str) -> tuple[str, ...]:
    us, stock_us = entry.us or 0.0, entry.stock_us or 0.0
    ratio = stock_us / us if us and stock_us else 1.0
    times = (f"{us:.1f}", f"{stock_us:.1f}", f"{ratio:.2f}", f"{floor_us:.1f}")
    return (shape, str(entry.m), *times, kernel)


def floor_bytes(shape: ExpertShape, m: int) -> float:
    """Bytes that both GEMMs of M tokens must read and write, if all experts are equally likely."""
    E, H, I, T = shape  # noqa: E741
    experts = E * (1 - (1 - T / E) ** m)
    of_row = 2 * 2 * I + I + 2 * H  # gate_up in BF16, codes of its SiLU, down in BF16
    return experts * 3 * I * H + m * H + m * T * of_row


def _tiles(config: Config) -> str:
    """``MxNxK`` of the tile, then its other options."""
    block = "x".join(str(config[f"BLOCK_SIZE_{axis}"]) for axis in "MNK")
    rest = (f"{name}={int(value)}" for name, value in config.items() if "BLOCK" not in name)
    return " ".join([block, *rest])


def copy_bytes_per_us() -> float:
    """Bytes that a kernel on this GPU reads and writes per microsecond.

    A plain copy would not do: inside a CUDA graph it ran at 2.8 of an H200's 4.2 TB/s.
    """
    source = torch.empty(COPIED_BYTES // 8, dtype=torch.int64, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / cuda_graph_us(lambda _: torch.bitwise_not(source, out=target), 1)
