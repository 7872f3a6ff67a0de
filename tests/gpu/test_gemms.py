"""The block-FP8 GEMMs on a GPU: errors on odd batches and in padded layers, by float64."""

from typing import Any

import pytest
import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.gemm import linear as gemm
from sgl_fp8rl.engine.layers.linear import METHODS
from sgl_fp8rl.formats import BLOCK_FP8, BLOCKS
from sgl_fp8rl.formats.padding import Shard, fit
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.ops.activation import quantize_tokens
from sgl_fp8rl.ops.reference import (
    dequantize_activation,
    dequantize_weight,
    fp8_linear,
    quantize_weight,
)
from tests.gpu.conftest import Record

SHAPES = [(2048, 1024), (2176, 384), (24576, 4096)]
ODD_ROWS = (1, 3, 17, 31, 33, 63, 65, 127, 129, 255)
KERNELS: dict[str, gemm.Kernel] = {"deep_gemm": gemm.deep_gemm, "triton": gemm.triton}
ERROR_BOUND = 2.5e-5
"""Of 1 - cosine, of each block of 128 results. Healthy, with outliers too: 2e-6 of an FP32 GEMM
rounded to BF16, at most 2.7e-6 of both kernels on an H200."""
OUTLIER_CHANNELS, OUTLIER = 4, 100.0
HOT_TOKENS, HOT = 3, 30.0

pytest.importorskip("deep_gemm")


@pytest.fixture(scope="module", autouse=True)
def _hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("DeepGEMM has these products for Hopper")


@pytest.fixture(autouse=True)
def _compile_only_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not DeepGEMM's kernels for every M at a GEMM's first call, as SGLang does."""
    monkeypatch.setattr(compat.deep_gemm_warmup, "_DO_COMPILE_ALL", False)


def random_activations(m: int, k: int, generator: torch.Generator) -> list[torch.Tensor]:
    """BF16 ``[M, K]``: normal values; and a few channels and tokens of them much larger."""
    normal_MK = torch.randn(m, k, generator=generator, dtype=torch.bfloat16)
    outlier_MK = normal_MK.clone()
    outlier_MK[:, :: max(1, k // OUTLIER_CHANNELS)] *= OUTLIER
    outlier_MK[:: max(1, m // HOT_TOKENS)] *= HOT
    return [normal_MK, outlier_MK]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_products_are_right_on_odd_batches(
    name: str, shape: tuple[int, int], record_property: Record
) -> None:
    """On normal activations and on such with outliers."""
    n, k = shape
    random = torch.Generator().manual_seed(0)
    # each block has a scale of its own, so that a kernel that reads a wrong one is caught
    sizes = torch.exp2(2 * torch.rand(n // 128, k // 128, generator=random) - 1)
    weight = torch.randn(n, k, generator=random) * torch.kron(sizes, torch.ones(128, 128))
    codes, scales = (each.cuda() for each in quantize_weight(weight))
    exact = dequantize_weight(codes, scales, torch.float64)
    worst = 0.0
    for m in ODD_ROWS:
        for x in random_activations(m, k, random):
            tokens = quantize_tokens(x.cuda())
            want = dequantize_activation(*tokens, torch.float64) @ exact.T
            y = KERNELS[name](*tokens, codes, scales).double()
            error = difference(y, want)
            assert error <= ERROR_BOUND, m
            assert difference(y.roll(1, -1), want) > 100 * ERROR_BOUND  # the control
            worst = max(worst, error)
    record_property("largest difference", worst)


def difference(y_MN: torch.Tensor, want_MN: torch.Tensor) -> float:
    """The largest ``1 - 2 x.y / (x.x + y.y)`` over blocks of 128 columns of a row: 1 - cosine for
    vectors of equal length, larger otherwise."""
    y, want = (t.unflatten(-1, (-1, 128)) for t in (y_MN, want_MN))
    lengths = (y * y).sum(-1) + (want * want).sum(-1)
    return float((1 - 2 * (y * want).sum(-1) / lengths).amax())


def test_it_is_what_sglang_runs() -> None:
    codes, scales = (each.cuda() for each in quantize_weight(torch.randn(2048, 1024)))
    x = torch.randn(65, 1024, device="cuda", dtype=torch.bfloat16)
    want = compat.deep_gemm_linear(x, codes, [128, 128], scales)
    layer = torch.nn.Module()
    layer.weight, layer.weight_scale_inv = codes, scales
    assert torch.equal(gemm.linear(gemm.deep_gemm, layer, x), want)


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
@pytest.mark.parametrize("kernel", [None, *KERNELS])
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
        method.kernel = KERNELS[kernel]
    bias = torch.randn(sum(rows), generator=random).bfloat16() if biased else None
    for m in (1, 3, 65, 200):
        x = torch.randn(m, cols, generator=random).bfloat16()
        given = x.cuda(), None if bias is None else bias.cuda()
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
