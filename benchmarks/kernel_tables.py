"""Blocks of docs/performance.md about single kernels: ours, and products of the shipped tables."""

import json
from typing import Any

Row = dict[str, Any]
Found = dict[tuple[str, str, str, str], Row]
"""Rows by kernel, size, arm and metric."""
STOCK = "deep_gemm"
"""What SGLang runs for block FP8 on Hopper."""


def kernels(text: str) -> str:
    """Each kernel at each size: us of SGLang's and of ours, the ratio, and our share of the floor.

    Sizes that are tokens make one table, those that are batch x context another.
    """
    content = json.loads(text)
    e, rows = content["environment"], content["rows"]
    found: Found = {(*_place(row), row["arm"], row["metric"]): row for row in rows}
    timed = [row for row in rows if row["metric"] == "kernel_us"]
    sizes = list(dict.fromkeys(_place(row)[1] for row in timed))
    parts = [
        _table(
            [head, *some],
            [
                [name, *(_cell(found, name, size) for size in some)]
                for name in dict.fromkeys(_place(row)[0] for row in timed)
                if any((name, size, "ours", "kernel_us") in found for size in some)
            ],
        )
        for head, some in (
            ("tokens", sorted((size for size in sizes if size.isdigit()), key=int)),
            ("batch x context", [size for size in sizes if not size.isdigit()]),
        )
    ]
    parts += [
        f"{row['case']} fails: {row['sentence']}" for row in rows if row["metric"] == "failure"
    ]
    spread = max(((row["max"] - row["min"]) / row["median"] for row in timed), default=0.0)
    parts.append(
        f"`{e['command']}`: layers of the Qwen3-8B shape on one {e['device']}, driver "
        f"{e['driver']}, SGLang {e['sglang']}, torch {e['torch']}, FlashInfer {e['flashinfer']}, "
        f"{e['date']}, commit {e['commit']}. Medians in us: SGLang's kernels / ours, how much "
        f"faster, and the part of our time in which the bytes that must move would be copied"
        + (f" ({e['copy_tb_s']:.2f} TB/s)" if "copy_tb_s" in e else "")
        + f". Least and most of a cell are at most {spread:.0%} of its median apart."
    )
    return "\n\n".join(part for part in parts if part)


def products(text: str) -> str:
    """A shipped table of products: the batches where another kernel than SGLang's is taken."""
    content = json.loads(text)
    versions, shapes = content["versions"], content["shapes"]
    entries = {(name, row["m"]): row for name, found in shapes.items() for row in found}
    batches = sorted({m for (_, m), row in entries.items() if row["kernel"] != STOCK})
    table = _table(
        ["rows", *(name.replace("x", " x ") for name in shapes)],
        [[str(m), *(_product(entries.get((name, m))) for name in shapes)] for m in batches],
    )
    largest = max((m for _, m in entries), default=0)
    facts = (
        f"N x K of a weight; us on one {content['card']}, and how much faster than the DeepGEMM "
        f"kernel that SGLang takes, where it is another. Measured at "
        f"{len({m for _, m in entries})} batches up to {largest} rows; at those that are not here "
        f"all are SGLang's. torch {versions['torch']}, SGLang {versions['sglang']}, DeepGEMM "
        f"{versions['sgl-deep-gemm']}, FlashInfer {versions['flashinfer-python']}."
    )
    return f"{table}\n\n{facts}" if table else facts


def _place(row: Row) -> tuple[str, str]:
    """Kernel and size."""
    kernel, _, size = row["case"].partition(": ")
    return kernel, size


def _cell(found: Found, kernel: str, size: str) -> str:
    ours = found.get((kernel, size, "ours", "kernel_us"))
    if ours is None:
        return ""
    stock = found[kernel, size, "stock", "kernel_us"]["median"]
    floor = found[kernel, size, "ours", "kernel_floor_us"]["median"]
    times = f"{_us(stock)} / {_us(ours['median'])}"
    return f"{times}, {stock / ours['median']:.2f}x, {floor / ours['median']:.0%}"


def _product(entry: Row | None) -> str:
    if entry is None:
        return ""
    faster = f", {entry['stock_us'] / entry['us']:.2f}x" if entry["kernel"] != STOCK else ""
    return f"{_us(entry['us'])}{faster}"


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _table(head: list[str], lines: list[list[str]]) -> str:
    """A table, or nothing where it has no lines."""
    if not lines:
        return ""
    made = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in made)
