"""Our experts against SGLang's own sequence of the same kernels, on the shapes of Qwen3-30B-A3B."""

import importlib
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.gemm import experts, grouped_experts
from sgl_fp8rl.formats import BLOCK_FP8, BLOCKS
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.ops import activation, activation_triton
from sgl_fp8rl.ops.activation import attach, attached
from sgl_fp8rl.ops.reference import FP8_DTYPE
from tests.activation_oracle import apart, rows
from tests.gpu.conftest import INTERPRETED

Tensor = torch.Tensor
E, T, H, I = 128, 8, 2048, 768  # noqa: E741
LEAST_EQUAL, MAX_SUM_ERROR = 0.99, 1e-3
"""Up to 32 tokens, which SGLang sums by another kernel; above, all bytes must be equal. Seen: all
equal at every size that was timed, 1 to 16384."""
ROWS = (1, 3, 16, 33, 64, 129, 2049)
MAX_ERROR = 0.01
"""Relative: by the order of a sum some codes between the products are the next ones. Seen: 0.0032
with DeepGEMM."""
MAX_COSINE_ERROR = 1e-3
"""1 - cosine from float64, which quantizes between the products as well: the bound of every product
in the table of linears. About 1e-5 is to be expected, by the error above."""
CHECKED = 4
"""Tokens that are computed in float64."""
_TRITON = "sglang.srt.layers.moe.moe_runner.triton_utils"

pytestmark = pytest.mark.skipif(
    INTERPRETED or find_spec("sglang") is None, reason="SGLang's kernels run on a GPU"
)


@pytest.fixture(autouse=True)
def _as_in_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang's experts ask of a running engine."""
    config = SimpleNamespace(
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
        moe=SimpleNamespace(enable_fused_moe_sum_all_reduce=False),
    )
    monkeypatch.setattr(compat.SYMBOLS["get_exec"].replace(":", "."), lambda: config)
    stock = importlib.import_module(f"{_TRITON}.fused_moe")
    configs = importlib.import_module(f"{_TRITON}.fused_moe_triton_config")
    for module in (stock, configs):
        monkeypatch.setattr(module, "get_exec", lambda: config)
    one = SimpleNamespace(tp_group=None)
    for name, value in {"get_tp_group": lambda: None, "get_parallel": lambda: one}.items():
        monkeypatch.setattr(stock, name, value, raising=False)  # versions have one or the other
    monkeypatch.setattr(stock, "is_allocation_symmetric", lambda: True)
    monkeypatch.setattr(stock, "use_symmetric_memory", lambda *args, **kwargs: nullcontext())


@pytest.fixture(scope="module")
def layer() -> Any:
    random = torch.Generator("cuda").manual_seed(0)

    def codes(n: int, k: int) -> Tensor:
        out = torch.empty(E, n, k, dtype=FP8_DTYPE, device="cuda")
        for part in out:
            normal = torch.randn(n, k, generator=random, device="cuda")
            part.copy_((100 * normal).clamp_(-448, 448).to(FP8_DTYPE))
        return out

    def scales(n: int, k: int) -> Tensor:
        exponents = torch.rand(E, n // 128, k // 128, generator=random, device="cuda")
        return torch.exp2(2 * exponents - 1) / 100 / k**0.5

    config = SimpleNamespace(inplace=False, routed_scaling_factor=None)
    return SimpleNamespace(
        quant_method=method(),
        w13_weight=codes(2 * I, H),
        w2_weight=codes(H, I),
        w13_weight_scale_inv=scales(2 * I, H),
        w2_weight_scale_inv=scales(H, I),
        moe_runner_config=config,
    )


def method(is_compiled: bool = False, format: WeightFormat = BLOCK_FP8) -> Any:
    return SimpleNamespace(format=format, is_compiled=is_compiled)


def with_method(layer: Any, **given: Any) -> Any:
    """The same weights with another ``method``."""
    return SimpleNamespace(**(vars(layer) | {"quant_method": method(**given)}))


def routes(M: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator("cuda").manual_seed(M)
    chosen = torch.rand(M, E, generator=random, device="cuda").topk(T)
    return chosen.values / chosen.values.sum(-1, keepdim=True), chosen.indices.int()


def stock(layer: Any, x: Tensor, weights: Tensor, ids: Tensor, *, inplace: bool = False) -> Tensor:
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_experts
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    config = MoeRunnerConfig(num_experts=E, num_local_experts=E, inplace=inplace)
    config.routed_scaling_factor = layer.moe_runner_config.routed_scaling_factor
    got: Tensor = fused_experts(
        x,
        layer.w13_weight,
        layer.w2_weight,
        StandardTopKOutput(weights, ids, None),
        config,
        use_fp8_w8a8=True,
        w1_scale=layer.w13_weight_scale_inv,
        w2_scale=layer.w2_weight_scale_inv,
        block_shape=[128, 128],
    )
    return got


def off(got: Tensor, want: Tensor) -> float:
    """The relative difference."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def assert_same(got: Tensor, want: Tensor, M: int) -> None:
    _, equal = apart(got, want)
    if M > 32:
        assert equal == 1
    else:
        assert equal >= LEAST_EQUAL and off(got, want) <= MAX_SUM_ERROR, (equal, off(got, want))


@pytest.mark.parametrize("M", ROWS)
@torch.no_grad()
def test_values_are_sglangs(M: int, layer: Any) -> None:
    x, topk = rows(M, H, spread=1).cuda(), routes(M)
    want = stock(layer, x, *topk)
    assert bool(want.isfinite().all()) and float(want.float().abs().max()) > 0
    assert_same(experts.experts(layer, x, *topk), want, M)
    attach(x, activation_triton.quantize_tokens(x, by_row=True))
    assert_same(experts.experts(layer, x.view(-1, H), *topk), want, M)


@torch.no_grad()
def test_control_another_expert_shows(layer: Any) -> None:
    x, (weights, ids) = rows(64, H, spread=1).cuda(), routes(64)
    want = stock(layer, x, weights, ids)
    ids[5, 2] = next(e for e in range(E) if e not in ids[5].tolist())
    got = experts.experts(layer, x, weights, ids)
    changed = (got != want).any(-1).nonzero().flatten().tolist()
    assert changed == [5] and off(got[5], want[5]) > 100 * MAX_SUM_ERROR


@pytest.mark.parametrize("factor", [None, 2.5])
@torch.no_grad()
def test_in_place_and_scaled(factor: float | None, layer: Any) -> None:
    config = SimpleNamespace(inplace=True, routed_scaling_factor=factor)
    layer = SimpleNamespace(**(vars(layer) | {"moe_runner_config": config}))
    x, topk = rows(64, H, spread=1).cuda(), routes(64)
    want = stock(layer, x.clone(), *topk, inplace=True)
    attach(x, activation_triton.quantize_tokens(x, by_row=True))
    got = experts.experts(layer, x, *topk)
    assert got is x and attached(x) is None
    assert_same(got, want, 64)


@pytest.mark.parametrize("M", [4096, 4099, 9000])
@torch.no_grad()
def test_large_batches_by_deep_gemm_are_sglangs(M: int, layer: Any) -> None:
    x, topk = rows(M, H, spread=1).cuda(), routes(M)
    want = stock(layer, x, *topk)
    grouped_experts.compile_grouped(layer, T, M)
    large = with_method(layer, is_compiled=True)
    assert grouped_experts.is_grouped(large, M, T) and not grouped_experts.is_grouped(layer, M, T)
    got = experts.experts(large, x, *topk)
    assert off(got, want) <= MAX_ERROR
    ids = topk[1].clone()
    ids[M - 1, 0] = next(e for e in range(E) if e not in ids[M - 1].tolist())
    other = experts.experts(large, x, topk[0], ids)
    changed = (other != got).any(-1).nonzero().flatten().tolist()
    assert changed == [M - 1], "control: another expert shows, and in that token alone"
    ids = topk[1].clone()
    ids[7:9] = -1  # as SGLang marks padding
    padded = experts.experts(large, x, topk[0], ids)
    assert not padded[7:9].any()
    rest = torch.ones(M, dtype=torch.bool, device="cuda")
    rest[7:9] = False
    assert torch.equal(padded[rest], got[rest])


def exact(layer: Any, x_H: Tensor, weights_T: Tensor, ids_T: Tensor) -> Tensor:
    """One token's experts in float64 on the CPU, from the codes that are between the products."""

    def product(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
        of_rows = weight_scales.double().repeat_interleave(128, 0)
        w = weight.double() * of_rows.repeat_interleave(128, 1)
        return w @ (codes.double() * scales.double().repeat_interleave(128))

    total = torch.zeros(H, dtype=torch.float64)
    power_of_two = layer.quant_method.format.power_of_two_scales
    given = activation.quantize_tokens(x_H[None].cpu(), power_of_two=power_of_two)
    for weight, expert in zip(weights_T.tolist(), ids_T.tolist(), strict=True):
        w13, s13, w2, s2 = (
            getattr(layer, name)[expert].cpu()
            for name in ("w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv")
        )
        gate_up = product(given.codes_MK[0], given.scales_Mk[0], w13, s13)
        hidden = activation.silu_mul_codes(gate_up.bfloat16()[None], power_of_two=power_of_two)
        total += weight * product(hidden.codes_MK[0], hidden.scales_Mk[0], w2, s2)
    return total


@pytest.mark.parametrize("spread", [1, 6], ids=["normal", "outliers"])
@pytest.mark.parametrize("M", [64, 4096], ids=["triton", "deep_gemm"])
@pytest.mark.parametrize("fmt", BLOCKS, ids=lambda fmt: fmt.name)
@torch.no_grad()
def test_values_are_those_of_float64(M: int, spread: int, fmt: WeightFormat, layer: Any) -> None:
    x, (weights, ids) = rows(M, H, spread=spread).cuda(), routes(M)
    grouped_experts.compile_grouped(layer, T, M)
    large = with_method(layer, is_compiled=True, format=fmt)
    assert grouped_experts.is_grouped(large, M, T) == (M == 4096)
    got = experts.experts(large, x, weights, ids)[:CHECKED].double().cpu()
    want = torch.stack([exact(large, x[m], weights[m], ids[m]) for m in range(CHECKED)])
    assert float(want.abs().max()) > 0
    cosine = torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0)
    assert 1 - float(cosine) <= MAX_COSINE_ERROR
    other = torch.nn.functional.cosine_similarity(got.flatten(), want.roll(1, 0).flatten(), dim=0)
    assert 1 - float(other) > 100 * MAX_COSINE_ERROR, "control: another token shows"
