"""Each block-FP8 product on a GPU: its error on odd batches, its time, and what a start makes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.gemm import dispatch
from sgl_fp8rl.engine.gemm.candidates import CANDIDATES, STOCK
from sgl_fp8rl.engine.gemm.dispatch import Choices
from sgl_fp8rl.engine.gemm.table import Entry
from sgl_fp8rl.engine.gemm.tune_cache import Machine
from sgl_fp8rl.engine.layers.linear import METHODS
from sgl_fp8rl.engine.startup.deep_gemm import compiling_only_what_runs
from sgl_fp8rl.engine.tuning import bench_inputs, quick_tune, tune
from sgl_fp8rl.engine.tuning.bench_inputs import BenchInputs, cuda_graph_us
from sgl_fp8rl.engine.tuning.quick_tune import find
from sgl_fp8rl.formats import BLOCK_FP8, BLOCKS
from sgl_fp8rl.formats.padding import Shard, fit
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.ops.reference import fp8_linear
from tests.gpu.conftest import Record

SHAPES = [(2048, 1024), (2176, 384), (24576, 4096)]
"""N = 17 blocks is cut into unequal parts."""
ODD_ROWS = (1, 3, 17, 31, 33, 63, 65, 127, 129, 255)

pytest.importorskip("deep_gemm")


@pytest.fixture(scope="module", autouse=True)
def _hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("DeepGEMM and FlashInfer have these products for Hopper")


@pytest.fixture(autouse=True)
def _no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_inputs, "ROTATED_BYTES", 0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CANDIDATES)
def test_products_are_right_on_odd_batches(
    name: str, shape: tuple[int, int], record_property: Record
) -> None:
    """On normal activations and on such with outliers."""
    made = BenchInputs(*shape, "cuda", cuda_graph_us)
    worst = 0.0
    with compiling_only_what_runs():
        for attempt in tune.list_attempts(shape, ODD_ROWS, {name: CANDIDATES[name]}):
            kernel = attempt.candidate.bind(attempt.config)
            error = made.error(kernel, attempt.m)
            assert error <= tune.ERROR_BOUND, (attempt.m, attempt.config)
            worst = max(worst, error)
    record_property("largest difference", worst)


def test_the_stock_choice_is_what_sglang_runs() -> None:
    made = BenchInputs(2048, 1024, "cuda", cuda_graph_us)
    weight, scales = made.weights[0]
    x = torch.randn(65, 1024, device="cuda", dtype=torch.bfloat16)
    with compiling_only_what_runs():
        want = compat.deep_gemm_linear(x, weight, [128, 128], scales)
        layer = torch.nn.Module()
        layer.weight, layer.weight_scale_inv = weight, scales
        assert torch.equal(dispatch.linear(Choices.of([]), layer, x), want)


def test_a_start_without_a_table_makes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_tune, "QUICK_S", 200.0)  # everything may have to be compiled
    properties = torch.cuda.get_device_properties(0)
    machine = Machine.of(f"{properties.name} unheard of", properties.multi_processor_count)
    before = torch.cuda.memory_reserved()
    with compiling_only_what_runs():
        tuned = find([(2048, 1024)], machine, str(tmp_path))[2048, 1024]
    assert torch.cuda.memory_reserved() <= before
    assert [entry.m for entry in tuned] == list(tune.DECODE_ROWS)
    assert all(0 < entry.us <= entry.stock_us for entry in tuned if entry.kernel != STOCK)
    assert find([(2048, 1024)], machine, str(tmp_path))[2048, 1024] == tuned


PADDED = {  # rows of each part, columns; rank and ranks of rows, of columns
    "SmolLM2 qkv": ([576, 192, 192], 576, (0, 1), (0, 1)),
    "SmolLM2 o": ([576], 576, (0, 1), (0, 1)),
    "SmolLM2 gate_up": ([1536, 1536], 576, (0, 1), (0, 1)),
    "Qwen2.5-0.5B qkv": ([448, 64, 64], 896, (1, 2), (0, 1)),
    "Qwen2.5-0.5B o": ([896], 448, (0, 1), (1, 2)),
}
NEAR = 0.02
"""Of the largest result: activations' codes may be a step apart where reciprocals are."""


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kernel", [None, STOCK, "flashinfer_sm90", "triton"])
@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("fmt", BLOCKS, ids=lambda fmt: fmt.name)
def test_padded_layers(
    name: str,
    kernel: str | None,
    biased: bool,
    fmt: WeightFormat,
    record_property: Record,
) -> None:
    """By SGLang's own method, or ours where scales are powers of two, and by each kernel; eager,
    and in a graph."""
    rows, cols, at_rows, at_cols = PADDED[name]
    padding, _ = fit(BLOCK_FP8, [Shard(n, *at_rows) for n in rows], Shard(cols, *at_cols))
    assert padding is not None
    n, k = padding.shape
    if kernel is not None and (reason := CANDIDATES[kernel].why_not(n, k, 8)):
        pytest.skip(reason)
    random = torch.Generator().manual_seed(0)
    weight = torch.zeros(padding.shape)
    for span in padding.rows.spans:
        box = weight[slice(*span), slice(*padding.cols.spans[0])]
        box.copy_(torch.randn(box.shape, generator=random) * cols**-0.5)
    layer = torch.nn.Module()
    codes, scales = fmt.encode(weight).values()
    layer.weight, layer.weight_scale_inv = codes.cuda(), scales.cuda()
    method: Any = object.__new__(METHODS[fmt.name])
    # what SGLang's own ``apply`` reads
    vars(method).update(use_marlin=False, use_mxfp8=False, block_quant=True)
    method.block_fp8_as_mxfp8 = False  # 0.5.23
    vars(method).update(weight_block_size=[128, 128], w8a8_block_fp8_linear=compat.deep_gemm_linear)
    method.padding = padding
    if kernel is not None:
        method.choices = Choices.of([Entry(4096, kernel, {}, 1.0, 2.0)])
    bias = torch.randn(sum(rows), generator=random).bfloat16() if biased else None
    for m in (1, 3, 65, 200):
        x = torch.randn(m, cols, generator=random).bfloat16()
        given = x.cuda(), None if bias is None else bias.cuda()
        with compiling_only_what_runs():
            y = method.apply(layer, *given)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = method.apply(layer, *given)
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, y) and y.is_contiguous()
        power_of_two = fmt.power_of_two_scales
        wanted = fp8_linear(padding.cols.pad(x), codes, scales, power_of_two=power_of_two)
        wanted = padding.rows.cut(wanted).float()
        wanted = wanted if bias is None else wanted + bias.float()
        error = float((y.cpu().float() - wanted).abs().max() / wanted.abs().max())
        record_property(f"largest difference, {m} rows", error)
        assert error < NEAR
        # the control: each result one channel further on
        assert (y.cpu().float().roll(1, -1) - wanted).abs().max() > 10 * NEAR * wanted.abs().max()
