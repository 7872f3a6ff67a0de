"""``sgl-fp8rl tune``: measure all batch sizes of a model's FP8 linear layers on this card."""

import sys
from collections import Counter
from collections.abc import Sequence

import torch
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from sgl_fp8rl.gemm.kept import Machine
from sgl_fp8rl.gemm.operands import Operands, cuda_graph_us
from sgl_fp8rl.gemm.table import FILES, Shape, Table
from sgl_fp8rl.gemm.tune import (
    DECODE_ROWS,
    PREFILL_ROWS,
    compiling_only_what_runs,
    measure,
    pick,
    plan,
    rows_of,
)

BUCKETS = (*DECODE_ROWS, *PREFILL_ROWS)
COPIED_BYTES = 1 << 30


def run(shapes: Sequence[Shape], folder: str) -> None:
    """Tune ``shapes``, keep the result in the tune cache ``folder``, and print it.

    Raises:
        OSError: the table cannot be written.
    """
    machine = Machine.here(0)
    path = FILES.path(machine, folder)
    FILES.save(path, machine, FILES.own(machine, folder))  # told now, not when all is measured
    plans = {shape: plan(shape, rows_of(BUCKETS)) for shape in shapes}
    tuned: Table = {}
    faults = Counter[str]()
    with (
        compiling_only_what_runs(),
        tqdm(total=sum(map(len, plans.values())), unit="kernel", file=sys.stderr) as bar,
    ):
        for (n, k), attempts in plans.items():
            bar.set_description(f"{n} x {k}")
            measurements = []
            for measurement in measure(Operands(n, k, "cuda", cuda_graph_us), attempts):
                measurements.append(measurement)
                if measurement.fault is not None:
                    faults[f"{measurement.kernel}: {measurement.fault}"] += 1
                bar.update()
            tuned[n, k] = pick(measurements, BUCKETS)
            FILES.save(path, machine, FILES.own(machine, folder) | tuned)
    print(render(tuned, copy_bytes_per_us()))
    for fault, times in faults.most_common():
        print(f"passed over {times} times: {fault}")
    print(f"\nkept in {path}")


def render(tuned: Table, bytes_per_us: float) -> str:
    """A plain text table, one line an entry; the floor is what must be read and written."""
    header = ("N x K", "M up to", "us", "DeepGEMM us", "ratio", "floor us", "kernel")
    rows = [header]
    for (n, k), entries in tuned.items():
        for entry in entries:
            floor = (n * k + entry.m * k + 2 * entry.m * n) / bytes_per_us
            config = " ".join(f"{name}={value}" for name, value in entry.config.items())
            ratio = entry.stock_us / entry.us if entry.us else 1.0
            rows.append(
                (
                    f"{n} x {k}",
                    str(entry.m),
                    f"{entry.us:.1f}",
                    f"{entry.stock_us:.1f}",
                    f"{ratio:.2f}",
                    f"{floor:.1f}",
                    f"{entry.kernel} {config}".strip(),
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header) - 1)]
    return "\n".join(
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    )


def copy_bytes_per_us() -> float:
    """Bytes that a kernel on this card reads and writes in a microsecond.

    No plain copy: inside a CUDA graph that ran at 2.8 of an H200's 4.2 TB/s.
    """
    source = torch.empty(COPIED_BYTES // 8, dtype=torch.int64, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / cuda_graph_us(lambda _: torch.bitwise_not(source, out=target), 1)
