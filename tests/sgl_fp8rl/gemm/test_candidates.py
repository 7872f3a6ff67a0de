"""What each candidate runs, and how it hands its operands to the library that computes."""

import importlib
import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.gemm import candidates
from sgl_fp8rl.engine.gemm.candidates import CANDIDATES, MAX_ROWS, STOCK, split_bounds
from sgl_fp8rl.engine.tuning.bench_inputs import BenchInputs
from tests.sgl_fp8rl.gemm import fakes

N, K, M = 640, 256, 6
Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def operands() -> tuple[torch.Tensor, ...]:
    made = BenchInputs(N, K, "cpu", lambda *_: 0.0)
    return (*made.activations(M)[1], *made.weights[0])


class DeepGemm:
    """DeepGEMM's product with what it demands of its operands on Hopper."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.columns: list[int] = []
        patch.setattr(compat, "deep_gemm_nt", self, raising=False)
        patch.setitem(sys.modules, "deep_gemm", SimpleNamespace(fp8_gemm_nt=self))

    def __call__(self, lhs: Pair, rhs: Pair, out: torch.Tensor) -> None:
        (codes, scales), (weight, weight_scales) = lhs, rhs
        m, k = codes.shape
        assert codes.is_contiguous()
        assert weight.is_contiguous()
        assert scales.stride() == (1, -(-m // 4) * 4)
        assert weight_scales.shape == (len(weight) // 128, k // 128)
        assert out.shape == (m, len(weight))
        assert out.dtype == torch.bfloat16
        assert out.stride(-1) == 1  # N-major
        # what a TMA descriptor takes
        assert out.stride(-2) * 2 % 16 == 0
        for tensor in (codes, weight, out):
            assert tensor.data_ptr() % 16 == 0
        self.columns.append(len(weight))
        out.copy_(fakes.exact(codes, scales, weight, weight_scales))


def test_stock_is_one_call(
    operands: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    deep_gemm = DeepGemm(monkeypatch)
    assert torch.equal(CANDIDATES[STOCK].bind({})(*operands), fakes.exact(*operands))
    assert deep_gemm.columns == [N]


@pytest.mark.parametrize(
    ("splits", "columns"), [(2, [256, 384]), (3, [128, 256, 256]), (5, [128] * 5)]
)
def test_splits_write_into_one_result(
    operands: tuple[torch.Tensor, ...],
    monkeypatch: pytest.MonkeyPatch,
    splits: int,
    columns: list[int],
) -> None:
    deep_gemm = DeepGemm(monkeypatch)
    split = CANDIDATES["deep_gemm_split_n"].bind({"splits": splits})(*operands)
    assert split.is_contiguous()
    torch.testing.assert_close(split, fakes.exact(*operands))
    assert deep_gemm.columns == columns


@given(st.integers(1, 200), st.integers(2, 8))
def test_splits_are_whole_blocks_and_about_equal(blocks: int, splits: int) -> None:
    n = blocks * 128
    if splits > blocks:
        with pytest.raises(ValueError, match=rf"\b{n}\b.*\b{splits}\b"):
            split_bounds(n, splits)
        return
    bounds = split_bounds(n, splits)
    sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(sizes)) == (0, n, splits)
    assert all(size % 128 == 0 and size > 0 for size in sizes)
    assert max(sizes) - min(sizes) <= 128


@pytest.mark.parametrize(
    ("name", "n", "k", "m", "runs"),
    [
        (STOCK, 192, 128, 7, True),
        (STOCK, 96, 128, 7, False),
        (STOCK, 128, 192, 7, False),
        ("flashinfer_sm90", 192, 128, 1, True),
        ("flashinfer_sm90", 192, 128, 0, False),
        ("flashinfer_sm90", 192, 128, 256, True),
        ("flashinfer_sm90", 192, 128, 257, False),
        ("flashinfer_sm90", 96, 128, 1, False),
        ("deep_gemm_split_n", 4096, 128, MAX_ROWS, True),
        ("deep_gemm_split_n", 4096, 128, MAX_ROWS + 1, False),
        ("deep_gemm_split_n", 4096 + 64, 128, 7, False),
        ("deep_gemm_split_n", 1024, 128, 7, False),
        ("deep_gemm_split_n", 4096, 192, 7, False),
        ("triton", 4096, 128, MAX_ROWS, True),
        ("triton", 4096, 128, MAX_ROWS + 1, False),
        ("triton", 192, 128, 7, False),
    ],
)
def test_what_a_candidate_runs(name: str, n: int, k: int, m: int, runs: bool) -> None:
    assert (CANDIDATES[name].why_not(n, k, m) is None) is runs


def test_splits_are_not_tried_below_their_least_size() -> None:
    configs = CANDIDATES["deep_gemm_split_n"].configs
    assert configs(24576, 4096, 128) == [{"splits": 2}, {"splits": 3}, {"splits": 4}]
    assert configs(2048, 4096, 128) == [{"splits": 2}]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        (STOCK, {"splits": 2}),
        ("flashinfer_sm90", {"splits": 2}),
        ("deep_gemm_split_n", {"splits": 1}),
        ("deep_gemm_split_n", {"splits": 2, "stages": 3}),
    ],
)
def test_a_config_of_another_kernel_is_refused(name: str, config: dict[str, int]) -> None:
    with pytest.raises((ValueError, TypeError)):
        CANDIDATES[name].bind(config)


def test_flashinfer_is_given_codes_and_scales_as_they_are(
    operands: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_gemm(
        codes: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *scales: torch.Tensor
    ) -> None:
        assert out.is_contiguous()  # it takes N for the row's stride
        assert scales[0].stride() == (1, 8)
        out.copy_(fakes.exact(codes, scales[0], weight, scales[1]))

    runner = SimpleNamespace(run_gemm=run_gemm)
    monkeypatch.setattr(candidates, "_flashinfer_runner", lambda: (runner, None))
    assert torch.equal(CANDIDATES["flashinfer_sm90"].bind({})(*operands), fakes.exact(*operands))


def test_flashinfer_has_what_we_call() -> None:
    """Its runner is not part of what its documentation names."""
    gemm_base = pytest.importorskip("flashinfer.gemm.gemm_base")
    assert callable(gemm_base.get_fp8_blockscale_gemm_runner_sm90)
    assert isinstance(importlib.import_module("flashinfer.jit.core").JitSpec.is_compiled, property)
    assert callable(
        importlib.import_module("flashinfer.jit.gemm").gen_fp8_blockscale_gemm_sm90_module
    )


def test_triton_is_sglangs(
    operands: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def matmul(codes: Any, weight: Any, *rest: Any, **dtype: Any) -> Any:
        scales_Mk, scales_nk, block = rest
        assert (block, dtype) == ([128, 128], {"output_dtype": torch.bfloat16})
        return fakes.exact(codes, scales_Mk, weight, scales_nk)

    monkeypatch.setattr(compat, "triton_block_fp8_matmul", matmul, raising=False)
    assert torch.equal(CANDIDATES["triton"].bind({})(*operands), fakes.exact(*operands))
