"""Which decode batch sizes get no CUDA graph of their own, by the list that SGLang captures."""

from types import SimpleNamespace
from typing import Any

import pytest
import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)
from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture
from sglang.srt.runtime_context import get_parallel

from sgl_fp8rl.engine.gemm.table import SHIPPED, Entry, Table, shipped
from sgl_fp8rl.engine.gemm.tune_cache import Machine
from sgl_fp8rl.engine.startup.graph_sizes import fast_sizes, leave_out_slow_sizes
from tests.sgl_fp8rl.resolving import HOPPER, Start

SIZES = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), 512]
"""Of SGLang for at most 512 requests."""
SHAPE = (6144, 4096)
QWEN3_8B = {(6144, 4096): 36, (4096, 4096): 36, (24576, 4096): 36, (4096, 12288): 36}


def entries(**us_by_rows: float) -> Table:
    return {SHAPE: [Entry(int(m[1:]), "deep_gemm", {}, us, us) for m, us in us_by_rows.items()]}


SLOW_AT_320 = entries(m256=10, m320=20, m384=15, m512=20)


SHORTER_FOR_ONE = entries(m256=10, m512=20) | {(128, 128): entries(m256=10)[SHAPE]}


def captured(
    start: Start, table: Table, counts: dict[Any, int] | None = None, **fields: Any
) -> list[int]:
    """The sizes that SGLang captures in an engine of 512 requests, after ours are left out."""
    start.on(HOPPER)
    server_args = start.published(start.made(**{"cuda_graph_max_bs_decode": 512, **fields}))
    leave_out_slow_sizes(server_args, {SHAPE: 1} if counts is None else counts, table)
    runner: Any = SimpleNamespace(
        server_args=server_args, req_to_token_pool=SimpleNamespace(size=512)
    )
    with get_parallel().override(attn_tp_size=1, attn_cp_size=1):
        sizes, _ = get_batch_sizes_to_capture(runner)
    return list(sizes)


def test_sizes_whose_gemms_are_slower_than_those_of_the_next_one_go(start: Start) -> None:
    assert captured(start, {}) == SIZES
    assert captured(start, SLOW_AT_320) == [m for m in SIZES if not 256 < m <= 320]


ALL_STAY: dict[str, tuple[dict[str, Any], Table, dict[Any, int]]] = {
    "set by a flag": ({"cuda_graph_bs_decode": SIZES}, SLOW_AT_320, {SHAPE: 1}),
    "set in a dict": ({"cuda_graph_config": {"decode": {"bs": SIZES}}}, SLOW_AT_320, {SHAPE: 1}),
    "a shape unknown": ({}, SLOW_AT_320, {SHAPE: 1, (128, 128): 1}),
    "noise": ({}, entries(m256=10, m320=15.5, m384=15, m512=20), {SHAPE: 1}),
    "small": ({}, entries(m64=20, m128=10, m512=20), {SHAPE: 1}),
    "beyond the table": ({}, entries(m256=10, m320=20), {SHAPE: 1}),
    "one shape ends earlier": ({}, SHORTER_FOR_ONE, {SHAPE: 1, (128, 128): 9}),
}


@pytest.mark.parametrize("why", ALL_STAY)
def test_all_stay(start: Start, why: str) -> None:
    fields, table, counts = ALL_STAY[why]
    assert captured(start, table, counts, **fields) == SIZES


def test_without_padding_each_size_has_its_graph(start: Start) -> None:
    sizes = captured(start, SLOW_AT_320, disable_cuda_graph_padding=True)
    assert sizes == [*range(1, 513)]


def test_the_shipped_table_leaves_out_what_was_measured_slower(start: Start) -> None:
    machine = Machine("NVIDIA H200", 132, {})
    table, _ = shipped(machine, with_flashinfer=False, folder=SHIPPED)
    sizes = captured(start, table, QWEN3_8B)
    assert sorted(set(SIZES) - set(sizes)) == [272, 288, 304, 320, 400, 416, 432, 448]


def test_the_largest_size_stays() -> None:
    assert fast_sizes([256, 512], {256: 10.0, 512: 5.0}.__getitem__) == [512]
