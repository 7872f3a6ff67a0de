"""Which decode batch sizes get no CUDA graph of their own."""

from types import SimpleNamespace
from typing import Any

import pytest
import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)
from sglang.srt.model_executor.cuda_graph_config import default_cuda_graph_config

from sgl_fp8rl.engine.graph_sizes import fast_sizes, leave_out_slow_sizes
from sgl_fp8rl.gemm.table import SHIPPED, Entry, Table, shipped
from sgl_fp8rl.gemm.tune_cache import Machine

SIZES = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), 512]
"""Of SGLang for at most 512 requests."""
SHAPE = (6144, 4096)
QWEN3_8B = {(6144, 4096): 36, (4096, 4096): 36, (24576, 4096): 36, (4096, 12288): 36}


def entries(**us_by_rows: float) -> Table:
    return {SHAPE: [Entry(int(m[1:]), "deep_gemm", {}, us, us) for m, us in us_by_rows.items()]}


SLOW_AT_320 = entries(m256=10, m320=20, m384=15, m512=20)


SHORTER_FOR_ONE = entries(m256=10, m512=20) | {(128, 128): entries(m256=10)[SHAPE]}


def server_args(sizes: list[int], *, chosen: bool = False, padding: bool = True) -> Any:
    config = default_cuda_graph_config()
    config.decode.bs = list(sizes)
    return SimpleNamespace(
        cuda_graph_config=config,
        disable_cuda_graph_padding=not padding,
        _cuda_graph_config_locked={("decode", "bs")} if chosen else set(),
    )


def kept(args: Any, table: Table, counts: dict[Any, int] | None = None) -> list[int]:
    leave_out_slow_sizes(args, {SHAPE: 1} if counts is None else counts, table)
    sizes: list[int] = args.cuda_graph_config.decode.bs
    return sizes


def test_sizes_whose_gemms_are_slower_than_those_of_the_next_one_go() -> None:
    assert kept(server_args(SIZES), SLOW_AT_320) == [m for m in SIZES if not 256 < m <= 320]


@pytest.mark.parametrize(
    ("args", "table", "counts"),
    [
        (server_args(SIZES, chosen=True), SLOW_AT_320, {SHAPE: 1}),
        (server_args(SIZES, padding=False), SLOW_AT_320, {SHAPE: 1}),
        (server_args(SIZES), SLOW_AT_320, {SHAPE: 1, (128, 128): 1}),
        (server_args(SIZES), entries(m256=10, m320=15.5, m384=15, m512=20), {SHAPE: 1}),
        (server_args(SIZES), entries(m64=20, m128=10, m512=20), {SHAPE: 1}),
        (server_args(SIZES), entries(m256=10, m320=20), {SHAPE: 1}),
        (server_args(SIZES), SHORTER_FOR_ONE, {SHAPE: 1, (128, 128): 9}),
    ],
    ids=[
        "set by the user",
        "no padding",
        "a shape unknown",
        "noise",
        "small",
        "beyond the table",
        "one shape ends earlier",
    ],
)
def test_all_stay(args: Any, table: Table, counts: dict[Any, int]) -> None:
    assert kept(args, table, counts) == SIZES


def test_the_shipped_table_leaves_out_what_was_measured_slower() -> None:
    machine = Machine("NVIDIA H200", 132, {})
    table, _ = shipped(machine, with_flashinfer=False, folder=SHIPPED)
    sizes = kept(server_args(SIZES), table, QWEN3_8B)
    assert sorted(set(SIZES) - set(sizes)) == [272, 288, 304, 320, 400, 416, 432, 448]


def test_the_largest_size_stays() -> None:
    assert fast_sizes([256, 512], {256: 10.0, 512: 5.0}.__getitem__) == [512]
