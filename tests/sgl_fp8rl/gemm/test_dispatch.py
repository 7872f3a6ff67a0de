"""Which kernel a batch gets, and what it is given."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)
import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.gemm import candidates, dispatch
from sgl_fp8rl.engine.gemm.candidates import STOCK, Candidate
from sgl_fp8rl.engine.gemm.dispatch import Choices
from sgl_fp8rl.engine.gemm.table import Entry
from sgl_fp8rl.engine.layers.linear import FP8RLLinearMethod, FP8RLUE8M0LinearMethod
from sgl_fp8rl.engine.tuning.bench_inputs import difference
from sgl_fp8rl.formats.padding import Side
from sgl_fp8rl.ops import activation_triton
from sgl_fp8rl.ops.activation import Channels, attach, quantize_tokens
from sgl_fp8rl.ops.reference import fp8_linear, quantize_activation, quantize_weight
from tests.sgl_fp8rl.gemm import fakes

N, K = 256, 384
FLIPPED = 1e-3
"""Largest ``difference`` from the reference, whose division rounds a few codes of activations the
other way. Healthy: at most 1.1e-4; the product of another batch is near 1."""


class Ran(list[str]):
    """Names of the kernels that ran, and how often rows were quantized."""

    quantized = 0


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    ran = Ran()

    def kernel(name: str, *operands: torch.Tensor) -> torch.Tensor:
        ran.append(name)
        return fakes.exact(*operands)

    for name in (STOCK, "small", "large"):
        bind = functools.partial(lambda name, _: functools.partial(kernel, name), name)
        monkeypatch.setitem(candidates.CANDIDATES, name, Candidate(name, lambda *_: None, bind))

    def quantize(x_MK: torch.Tensor, **place: Any) -> Any:
        ran.quantized += 1
        return quantize_tokens(x_MK, **place)

    monkeypatch.setattr(activation_triton, "quantize_tokens", quantize)
    return ran


@pytest.fixture
def choices(ran: Ran) -> Choices:
    return Choices.of([Entry(8, "small", {}, 1.0, 2.0), Entry(64, "large", {}, 1.0, 2.0)])


@pytest.fixture(scope="module")
def layer() -> Any:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize_weight(weight)
    return SimpleNamespace(weight=codes, weight_scale_inv=scales)


def activation(*rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*rows, K, generator=generator).bfloat16()


@pytest.mark.parametrize(
    ("m", "name"),
    [(1, "small"), (8, "small"), (9, "large"), (64, "large"), (65, STOCK), (100, STOCK)],
)
def test_the_entry_is_that_of_the_batch(
    ran: Ran, choices: Choices, layer: Any, m: int, name: str
) -> None:
    y = dispatch.linear(choices, layer, activation(m))
    assert ran == [name]
    want = fp8_linear(activation(m), layer.weight, layer.weight_scale_inv)
    assert difference(y, want) < FLIPPED


def test_without_a_table_the_stock_choice_runs(ran: Ran, layer: Any) -> None:
    dispatch.linear(Choices.of([]), layer, activation(3))
    assert ran == [STOCK]


def test_what_a_producer_quantized_is_taken(ran: Ran, choices: Choices, layer: Any) -> None:
    """The same bytes as without, and no launch for them."""
    x = activation(5)
    plain = dispatch.linear(choices, layer, x)
    assert ran.quantized == 1
    attach(x, quantize_tokens(x))
    assert torch.equal(dispatch.linear(choices, layer, x), plain)
    assert ran.quantized == 1
    x.mul_(1.0)  # written to since
    assert torch.equal(dispatch.linear(choices, layer, x), plain)
    assert ran.quantized == 2


def test_scales_that_lie_otherwise_do_not_fit(ran: Ran, choices: Choices, layer: Any) -> None:
    x = activation(5)
    attach(x, quantize_tokens(x, by_row=True))
    dispatch.linear(choices, layer, x)
    assert ran.quantized == 1
    assert dispatch.quantized(x, x, by_row=True).is_by_row and ran.quantized == 1


def test_codes_are_taken_and_not_the_values(ran: Ran, choices: Choices, layer: Any) -> None:
    """The control: codes of something else give the product of something else."""
    x = activation(5)
    plain = dispatch.linear(choices, layer, x)
    attach(x, quantize_tokens(-x))
    assert torch.equal(dispatch.linear(choices, layer, x), -plain)


def test_codes_of_another_shape_do_not_fit(ran: Ran, choices: Choices, layer: Any) -> None:
    x = activation(5)
    plain = dispatch.linear(choices, layer, x)
    attach(x, quantize_tokens(activation(6)))
    assert torch.equal(dispatch.linear(choices, layer, x), plain)
    assert ran.quantized == 2


def test_bias_is_added(ran: Ran, choices: Choices, layer: Any) -> None:
    bias = torch.arange(N).bfloat16()
    plain = dispatch.linear(choices, layer, activation(5))
    assert torch.equal(dispatch.linear(choices, layer, activation(5), bias), plain + bias)


def test_columns_may_lie_among_zeros(ran: Ran, choices: Choices, layer: Any) -> None:
    """Whatever the weight holds there; and codes that lie elsewhere do not fit."""
    within, cols = Channels(64, K), Side(((64, K - 32),), K)
    x = activation(3, 5)[..., : K - 96].contiguous()
    y = dispatch.linear(choices, layer, x, None, within)
    assert torch.equal(y, dispatch.linear(choices, layer, cols.pad(x)))
    assert y.shape == (3, 5, N) and ran.quantized == 2
    assert not torch.equal(y, dispatch.linear(choices, layer, cols.pad(x.roll(1, -1))))
    for lead in (0, 64):
        elsewhere = Channels(lead, K)
        attach(x, quantize_tokens(x.view(15, -1), within=elsewhere), elsewhere)
        assert torch.equal(y, dispatch.linear(choices, layer, x, None, within))
    assert ran.quantized == 4, "one for the control, and one for what lies elsewhere"


def test_leading_dimensions_stay(ran: Ran, choices: Choices, layer: Any) -> None:
    y = dispatch.linear(choices, layer, activation(3, 5))
    assert y.shape == (3, 5, N)
    assert ran == ["large"]
    flat = dispatch.linear(choices, layer, activation(3, 5).view(15, K))
    assert torch.equal(y.view(15, N), flat)


def test_an_empty_batch_runs_nothing(ran: Ran, choices: Choices, layer: Any) -> None:
    y = dispatch.linear(choices, layer, activation(0))
    assert (y.shape, y.dtype) == ((0, N), torch.bfloat16)
    assert ran == []
    assert ran.quantized == 0


class OnGpu:
    """A weight that says it is on a GPU."""

    device = SimpleNamespace(type="cuda")


def test_the_linear_method_asks_its_choices(
    monkeypatch: pytest.MonkeyPatch, choices: Choices
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(dispatch, "linear", lambda *given, **_: calls.append(("ours", *given)))
    monkeypatch.setattr(
        compat.Fp8LinearMethod, "apply", lambda _self, *given: calls.append(("stock", *given))
    )
    method: Any = object.__new__(FP8RLLinearMethod)
    layer = SimpleNamespace(weight=OnGpu())
    x, bias = activation(1), torch.ones(N)
    method.apply(layer, x, bias)
    method.choices = choices
    method.apply(layer, x, bias)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    method.apply(layer, x, bias)
    assert calls == [
        ("stock", layer, x, bias),
        ("ours", choices, layer, x, bias, None),
        ("stock", layer, x, bias),
    ]


def test_scales_of_activations_may_be_powers_of_two(ran: Ran, choices: Choices, layer: Any) -> None:
    """The very codes of the CPU platform; the control is without."""
    y, plain = (
        dispatch.linear(choices, layer, activation(5), power_of_two=each) for each in (True, False)
    )
    codes, scales = quantize_activation(activation(5), power_of_two=True)
    assert torch.equal(y, fakes.exact(codes, scales, layer.weight, layer.weight_scale_inv))
    assert not torch.equal(y, plain)


def test_powers_of_two_are_never_left_to_sglangs_linear(
    monkeypatch: pytest.MonkeyPatch, choices: Choices
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        dispatch, "linear", lambda chosen, *_, power_of_two: calls.append((chosen, power_of_two))
    )
    method: Any = object.__new__(FP8RLUE8M0LinearMethod)
    layer, x = SimpleNamespace(weight=OnGpu()), activation(1)
    method.apply(layer, x)
    method.choices = choices
    method.apply(layer, x)
    assert calls == [(Choices.untuned(), True), (choices, True)]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match=r"block-fp8-ue8m0.*drop --enable-torch-compile"):
        method.apply(layer, x)
