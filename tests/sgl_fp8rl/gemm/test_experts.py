"""Experts with activations quantized by what makes them: values, codes, and what is left to SGLang.

SGLang's kernels are plain loops here; ``tests/gpu/test_experts.py`` runs the real ones.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.gemm import experts, grouped_experts
from sgl_fp8rl.engine.layers import fusion
from sgl_fp8rl.engine.layers.moe import FP8RLMoEMethod, experts_reference
from sgl_fp8rl.engine.startup import kernel_checks
from sgl_fp8rl.formats import BLOCK_FP8_UE8M0, BLOCKS
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.ops import activation, activation_triton, expert_rows, expert_rows_triton
from sgl_fp8rl.ops.activation import attach, attached, quantize_tokens
from tests import experts_fakes
from tests.activation_oracle import rows
from tests.experts_fakes import E, Experts, H, I, T, align, grouped, product, routes, total
from tests.sgl_fp8rl.conftest import Publish

Tensor = torch.Tensor
TILES = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_K": 128}
MAX_ERROR = 0.03
"""Relative: the reference rounds SiLU to BF16 before it multiplies, and so has some other codes.
Seen: 0.018; with one wrong expert in fifteen 0.64."""


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch, publish: Publish) -> dict[str, Any]:
    """SGLang's kernels in loops; what they were asked for."""
    seen: dict[str, Any] = {"configs": []}

    def aligned(topk_ids: Tensor, block: int, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        seen["align"] = (block, num_experts)
        return align(topk_ids, block, num_experts)

    def configs(*args: Any, **kwargs: Any) -> Any:
        seen["lookup"] = args
        return seen.get("up", TILES), (seen.get("down"), 64)

    def run(*args: Any, **kwargs: Any) -> None:
        seen["configs"].append((args[14], kwargs["b_use_tma"]))
        product(*args, **kwargs)

    for name, value in {
        "moe_align_block_size": aligned,
        "try_get_optimal_moe_config": configs,
        "invoke_fused_moe_kernel": run,
    }.items():
        monkeypatch.setattr(compat.SYMBOLS[name].replace(":", "."), value)
    sgl_kernel = ModuleType("sgl_kernel")
    sgl_kernel.moe_sum_reduce = total  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sgl_kernel", sgl_kernel)
    for name in ("quantize_tokens", "silu_mul_codes"):
        monkeypatch.setattr(activation_triton, name, getattr(activation, name))
    for name in ("sort_rows", "sum_rows"):
        monkeypatch.setattr(expert_rows_triton, name, getattr(expert_rows, name))
    deep_gemm = ModuleType("deep_gemm")
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous = (  # type: ignore[attr-defined]
        lambda a, b, out, experts: seen["grouped"].append(len(out)) or grouped(a, b, out, experts)
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm)
    seen["grouped"] = []
    return seen


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).double().norm() / want.double().norm())


# ---- values


@pytest.mark.parametrize("M", [1, 5, 40])
@pytest.mark.parametrize("factor", [None, 2.5])
@pytest.mark.parametrize("fmt", BLOCKS, ids=lambda fmt: fmt.name)
def test_values_are_the_references(M: int, factor: float | None, fmt: WeightFormat) -> None:
    layer = Experts(fmt=fmt, routed_scaling_factor=factor, inplace=False)
    x, power_of_two = rows(M, H, spread=1), fmt.power_of_two_scales
    want = experts_reference(layer, x, *routes(M), factor or 1.0, power_of_two=power_of_two)
    before = x.clone()
    got = experts.experts(layer, x, *routes(M))
    assert got.dtype == torch.bfloat16 and torch.equal(x, before)
    assert error(got, want) <= MAX_ERROR
    other = experts_reference(layer, x, *routes(M), factor or 1.0, power_of_two=not power_of_two)
    assert error(got, other) > MAX_ERROR  # the control


def test_control_a_wrong_expert_shows() -> None:
    layer, x = Experts(inplace=False), rows(5, H, spread=1)
    weights, ids = routes(5)
    want = experts_reference(layer, x, weights, ids)
    ids[3, 0] = (ids[3, 0] + 1) % E
    assert error(experts.experts(layer, x, weights, ids), want) > 5 * MAX_ERROR


@torch.no_grad()
def test_in_place_it_is_x_and_its_codes_are_gone() -> None:
    layer, x = Experts(), rows(5, H, spread=1)
    want = experts_reference(layer, x, *routes(5))
    attach(x, quantize_tokens(x))
    got = experts.experts(layer, x, *routes(5))
    assert got is x and error(got, want) <= MAX_ERROR
    assert attached(x) is None


# ---- codes


@torch.no_grad()
def test_attached_codes_are_taken_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = Experts(inplace=False), rows(5, H, spread=1)
    want = experts.experts(layer, x, *routes(5))
    attach(x, quantize_tokens(x))  # their scales lie otherwise
    assert torch.equal(experts.experts(layer, x, *routes(5)), want)
    attach(x, quantize_tokens(x, by_row=True))

    def not_called(x: Tensor, **place: Any) -> Any:
        raise AssertionError("quantized again")

    monkeypatch.setattr(activation_triton, "quantize_tokens", not_called)
    view = x.view(-1, H)  # as SGLang's MoE blocks make it
    assert torch.equal(experts.experts(layer, view, *routes(5)), want)
    x += 1
    with pytest.raises(AssertionError, match="quantized again"):
        experts.experts(layer, view, *routes(5))


# ---- large batches


@pytest.mark.parametrize("factor", [None, 2.5])
@pytest.mark.parametrize("inplace", [False, True])
@torch.no_grad()
def test_large_batches_are_sorted_by_expert(
    factor: float | None, inplace: bool, monkeypatch: pytest.MonkeyPatch, kernels: dict[str, Any]
) -> None:
    monkeypatch.setattr(grouped_experts, "ROWS_OF_EXPERT", 20)
    layer = Experts(routed_scaling_factor=factor, inplace=inplace)
    layer.quant_method.is_compiled = True
    M = 20 * E // T
    x = rows(M, H, spread=1)
    want = experts_reference(layer, x, *routes(M), factor or 1.0)
    attach(x, quantize_tokens(x, by_row=True))
    got = experts.experts(layer, x, *routes(M))
    assert (got is x) == inplace and (attached(x) is None) == inplace
    assert error(got, want) <= MAX_ERROR and not kernels["configs"]
    room = (M * T + (E + 1) * 127) // 128 * 128
    assert kernels["grouped"] == [room, room]

    few = x[: M - 1].contiguous()
    experts.experts(layer, few, *routes(M - 1))
    assert len(kernels["configs"]) == 2, "one token fewer is for the other kernel"


@pytest.mark.parametrize("case", ["not compiled", "few"])
def test_others_are_not_sorted(case: str, kernels: dict[str, Any]) -> None:
    layer = Experts()
    layer.quant_method.is_compiled = case == "few"
    assert not grouped_experts.is_grouped(layer, 256 * E // T - (case == "few"), T)


@pytest.mark.parametrize("rounded", [1, 4], ids=["0.5.17", "0.5.23"])
def test_each_number_of_places_is_compiled(
    rounded: int, monkeypatch: pytest.MonkeyPatch, kernels: dict[str, Any]
) -> None:
    monkeypatch.setattr(experts_fakes, "ROUNDED", rounded)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(grouped_experts, "ROWS_OF_EXPERT", 20)
    layer, least = Experts(), 20 * E // T
    grouped_experts.compile_grouped(layer, T, least - 1)
    assert kernels["grouped"] == []
    grouped_experts.compile_grouped(layer, T, 200)
    compiled = list(kernels["grouped"])
    middle = compiled.index(max(compiled), 1)
    for part in (compiled[:middle], compiled[middle:]):
        assert part == sorted(part, reverse=True), "the allocator would keep each size otherwise"
    layer.quant_method.is_compiled = True
    for M in (least, least + 30, 200):
        kernels["grouped"].clear()
        experts.experts(layer, rows(M, H, spread=1), *routes(M))
        assert set(kernels["grouped"]) <= set(compiled)


# ---- the check at a start


@pytest.fixture
def both_kernels(monkeypatch: pytest.MonkeyPatch, publish: Publish) -> nn.Module:
    """A model whose experts run on the other kernel from 40 tokens on."""
    monkeypatch.setattr(grouped_experts, "ROWS_OF_EXPERT", 20)
    publish(chunked_prefill_size=512, max_running_requests=64)
    monkeypatch.setattr(compat.deep_gemm_warmup, "_BUILTIN_M_LIST", [2048])
    layer = Experts(routed_scaling_factor=2.5)
    layer.quant_method.is_compiled = True
    return nn.ModuleList([nn.Linear(1, 1), layer, Experts(activation="gelu")])


def test_right_experts_start(both_kernels: nn.Module, kernels: dict[str, Any]) -> None:
    kernel_checks.check_experts(both_kernels)
    assert len(kernels["configs"]) == len(kernels["grouped"]) == 2, "a product of each"


def _weighted_twice(*args: Any, **options: Any) -> None:
    product(*args[:12], True, *args[13:], **options)


def _of_other_experts(*args: Any, **options: Any) -> None:
    product(*args[:8], (args[8] + 1) % E, *args[9:], **options)


def _not_a_number(*args: Any, **options: Any) -> None:
    args[3].fill_(torch.nan)


def _renamed(*args: Any, experts: Any) -> None: ...


@pytest.mark.parametrize("wrong", [_weighted_twice, _of_other_experts, _not_a_number, _renamed])
def test_experts_that_compute_otherwise_end_the_start(
    wrong: Any, both_kernels: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat.SYMBOLS["invoke_fused_moe_kernel"].replace(":", "."), wrong)
    with pytest.raises(RuntimeError, match="--moe-runner-backend deep_gemm"):
        kernel_checks.check_experts(both_kernels)


def test_wrong_experts_of_a_prefill_end_the_start(
    both_kernels: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys.modules["deep_gemm"], "m_grouped_fp8_gemm_nt_contiguous", lambda a, b, y, _: y.zero_()
    )
    with pytest.raises(RuntimeError, match=f"{20 * E // T} tokens"):
        kernel_checks.check_experts(both_kernels)


# ---- tiles


def test_tiles_are_sglangs(kernels: dict[str, Any]) -> None:
    layer = Experts()
    kernels["up"] = up = {**TILES, "BLOCK_SIZE_M": 32}
    experts.experts(layer, rows(5, H), *routes(5))
    shapes = layer.w13_weight.shape, layer.w2_weight.shape
    assert kernels["lookup"] == (*shapes, T, "fp8_w8a8", 5)
    assert kernels["align"] == (32, E)
    assert kernels["configs"] == [(up, False), (up, False)]  # there is none for the second

    kernels["configs"].clear()
    kernels["down"] = down = {**TILES, "BLOCK_SIZE_N": 64, "USE_TMA": True}
    experts.experts(layer, rows(5, H), *routes(5))
    assert kernels["configs"] == [(up, False), ({**TILES, "BLOCK_SIZE_N": 64}, True)]
    assert down["USE_TMA"]  # SGLang's own dictionary is as it was


# ---- what runs here, and what is SGLang's


def as_on_a_gpu(layer: Experts) -> Experts:
    """Its weights claim to be there."""
    del layer.w13_weight
    layer.w13_weight = SimpleNamespace(device=torch.device("cuda"))  # type: ignore[assignment]
    return layer


def apply(layer: Experts, x: Tensor) -> str:
    """Whose method ran."""
    topk = (*routes(len(x)), None)
    dispatched = SimpleNamespace(hidden_states=x, topk_output=topk)
    return str(layer.quant_method.apply(layer, dispatched).hidden_states)


@pytest.fixture
def whose(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = SimpleNamespace(hidden_states="SGLang's")
    monkeypatch.setattr(compat.Fp8MoEMethod, "apply", lambda *args: stock)
    monkeypatch.setattr("sgl_fp8rl.engine.layers.moe.experts", lambda *args: "ours")
    monkeypatch.setattr(
        "sgl_fp8rl.engine.layers.moe.experts_reference", lambda *args, **_: "the CPU's"
    )


@pytest.mark.usefixtures("whose")
def test_plain_experts_run_here() -> None:
    """Those with powers of two are never left to SGLang's."""
    assert apply(Experts(), rows(4, H)) == "the CPU's"
    for fmt in BLOCKS:
        assert apply(as_on_a_gpu(Experts(fmt=fmt)), rows(4, H)) == "ours"
    layer = Experts(fmt=BLOCK_FP8_UE8M0, activation="gelu")
    with pytest.raises(RuntimeError, match=r"do not quantize activations as block-fp8-ue8m0"):
        apply(as_on_a_gpu(layer), rows(4, H))


_OTHERS: dict[str, dict[str, Any]] = {
    "gelu": {"activation": "gelu"},
    "experts of other ranks": {"num_local_experts": E // 2},
    "not gated": {"is_gated": False},
    "gpt-oss": {"gemm1_alpha": 1.7, "gemm1_clamp_limit": 7.0},
    "clamped": {"swiglu_limit": 10.0},
    "weights on the input": {"apply_router_weight_on_input": True},
    "not summed": {"no_combine": True},
    "two experts": {"top_k": 2},
    "a model that does not say": {"top_k": None},
    "fp32 between": {"silu_mul_keep_fp32": True},
}


@pytest.mark.usefixtures("whose")
@pytest.mark.parametrize("case", [*_OTHERS, "lora", "deep_gemm", "none", "bias", "sum", "memory"])
@torch.no_grad()
def test_other_experts_are_sglangs(case: str, publish: Publish) -> None:
    layer = Experts(**_OTHERS.get(case, {}))
    if case == "lora":
        layer.quant_method.runner.fused_func = None
    if case == "deep_gemm":
        layer.quant_method.runner.runner_backend.is_triton = lambda: False
    if case == "none":
        del layer.quant_method.runner
    if case == "bias":
        layer.w13_weight_bias = torch.zeros(1)
    if case == "sum":
        publish(enable_fused_moe_sum_all_reduce=True)
    if case == "memory":
        publish(enable_symm_mem=True)
    assert not experts.takes_codes(layer)
    x = rows(4, H)
    attach(x, quantize_tokens(x))
    assert apply(as_on_a_gpu(layer), x) == "SGLang's"
    assert attached(x) is None  # it may have written into x


@pytest.mark.usefixtures("whose")
@pytest.mark.parametrize("case", ["fp32", "strided", "empty"])
def test_other_batches_are_sglangs(case: str) -> None:
    layer = as_on_a_gpu(Experts())
    x = {"fp32": rows(4, H).float(), "strided": rows(4, 2 * H)[:, :H], "empty": rows(4, H)[:0]}
    assert apply(layer, x[case]) == "SGLang's"


def test_the_norm_before_experts_quantizes_for_them() -> None:
    layer = Experts()
    assert isinstance(layer.quant_method, FP8RLMoEMethod) and fusion._takes_codes(layer)
    assert not fusion._takes_codes(Experts(activation="gelu"))
    assert "mlp.experts" in fusion._FEEDS["post_attention_layernorm"]


def test_silu_without_y_has_the_same_codes() -> None:
    gate_up = rows(5, 2 * I)
    want = activation.silu_mul_quantize(gate_up)[1]
    for mine, other in zip(activation.silu_mul_codes(gate_up), want, strict=True):
        assert torch.equal(mine.float(), other.float()) and mine.stride() == other.stride()
