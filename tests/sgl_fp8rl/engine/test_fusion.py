"""Which producers quantize, and that a linear finds codes of just the tensor it is given.

SGLang's own RMSNorm and SiluAndMul on the CPU: their CUDA forward is their native one here, and the
kernels are their references. Around them are layers of the form that SGLang's have.
"""

from typing import Any

import pytest
import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
from torch import nn

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.gemm import experts
from sgl_fp8rl.engine.gemm import linear as gemm
from sgl_fp8rl.engine.layers import fusion
from sgl_fp8rl.engine.layers.linear import FP8RLLinearMethod, FP8RLUE8M0LinearMethod
from sgl_fp8rl.formats.padding import Padding, Side
from sgl_fp8rl.ops import activation, activation_triton
from sgl_fp8rl.ops.activation import Channels, Quantized, attach, attached, quantize_tokens
from tests.activation_oracle import apart, rows
from tests.experts_fakes import Experts
from tests.sgl_fp8rl.conftest import Publish

Tensor = torch.Tensor
BF16 = torch.bfloat16
HIDDEN, INTER = 256, 384


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, publish: Publish) -> None:
    for owner in (RMSNorm, SiluAndMul):
        monkeypatch.setattr(owner, "forward_cuda", lambda self, *args: self.forward_native(*args))
    for name in ("rms_norm_quantize", "silu_mul_quantize"):
        monkeypatch.setattr(activation_triton, name, getattr(activation, name))


class Linear(nn.Module):
    """Keeps what it finds attached to its input."""

    def __init__(self, n: int, k: int, *, fp8: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows(n, k, seed=n, spread=0) / 16, requires_grad=False)
        self.quant_method: Any = object.__new__(FP8RLLinearMethod) if fp8 else object()
        if fp8:
            self.quant_method.kernel = gemm.deep_gemm
        self.x: Tensor | None = None
        self.found: Quantized | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        self.x, self.found = x.clone(), attached(x)
        return x @ self.weight.T, None


def on_cuda(op: Any) -> Any:
    """As SGLang dispatches where there is a GPU; newer versions do so at the first call."""
    op._forward_method = op.forward_cuda
    return op


def norm(**kwargs: Any) -> RMSNorm:
    made = on_cuda(RMSNorm(HIDDEN, **({"weight_dtype": BF16} | kwargs)))
    made.weight.data.copy_(rows(1, HIDDEN, seed=5, spread=1)[0])
    return made


class Mlp(nn.Module):
    def __init__(self, *, fp8: bool) -> None:
        super().__init__()
        self.gate_up_proj = Linear(2 * INTER, HIDDEN, fp8=fp8)
        self.act_fn = on_cuda(SiluAndMul())
        self.down_proj = Linear(HIDDEN, INTER, fp8=fp8)

    def forward(self, x: Tensor) -> Tensor:
        gate_up, _ = self.gate_up_proj(x)
        return self.down_proj(self.act_fn(gate_up))[0]


class Layer(nn.Module):
    def __init__(self, *, fp8: bool = True) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn = nn.Module()
        self.self_attn.qkv_proj = Linear(HIDDEN, HIDDEN, fp8=fp8)
        self.mlp: Any = Mlp(fp8=fp8)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual, None)
        x, _ = self.self_attn.qkv_proj(x)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual

    def linears(self) -> list[Linear]:
        return [self.self_attn.qkv_proj, self.mlp.gate_up_proj, self.mlp.down_proj]


def model(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


@torch.no_grad()  # what SGLang runs under
def run(layers: nn.Module) -> tuple[Tensor, Tensor]:
    x, residual = rows(5, HIDDEN, spread=1), None
    for layer in layers:
        x, residual = layer(x, residual)
    assert residual is not None
    return x, residual


def assert_found(linear: Linear, power_of_two: bool = False) -> None:
    assert linear.x is not None and linear.found is not None
    want = quantize_tokens(linear.x, power_of_two=power_of_two)
    for mine, other in zip(linear.found, want, strict=True):
        assert torch.equal(mine.float(), other.float()) and mine.stride() == other.stride()


@torch.no_grad()
def test_codes_lie_where_a_padded_layer_has_its_columns() -> None:
    layer, hidden, inter = nn.Module(), 200, 300
    layer.input_layernorm = on_cuda(RMSNorm(hidden, weight_dtype=BF16))
    layer.act_fn = on_cuda(SiluAndMul())
    layer.self_attn = nn.Module()
    layer.self_attn.qkv_proj, layer.down_proj = Linear(64, hidden), Linear(64, inter)
    for linear, lead, k in ((layer.self_attn.qkv_proj, 0, hidden), (layer.down_proj, 64, inter)):
        cols = Side(((lead, lead + k),), -(-(lead + k) // 128) * 128)
        linear.quant_method.padding = Padding(Side(((0, 64),), 64), cols)
    assert fusion.fuse(layer) == 2
    x = rows(5, hidden, spread=1)
    normed, added = layer.input_layernorm(x.clone()), layer.input_layernorm(x.clone(), x.clone())[0]
    product = layer.act_fn(rows(5, 2 * inter, spread=1))
    for y, within in (
        (normed, Channels(0, 256)),
        (added, Channels(0, 256)),
        (product, Channels(64, 384)),
    ):
        found = attached(y, within)
        assert found is not None
        for mine, other in zip(found, quantize_tokens(y, within=within), strict=True):
            assert torch.equal(mine.float(), other.float()) and mine.stride() == other.stride()
        assert attached(y) is None, "no layer without padding takes them"


@pytest.mark.parametrize("power_of_two", [False, True], ids=["", "power-of-two"])
def test_every_linear_finds_the_codes_of_its_input(power_of_two: bool) -> None:
    """Of scales that are rounded up where the layer wants powers of two."""
    layers = model(Layer(), Layer())
    linears = [linear for layer in layers for linear in layer.linears()]
    for linear in linears if power_of_two else ():
        linear.quant_method.__class__ = FP8RLUE8M0LinearMethod
    assert fusion.fuse(layers) == 6
    run(layers)
    for linear in linears:
        assert_found(linear, power_of_two)
        with pytest.raises(AssertionError):
            assert_found(linear, not power_of_two)


def test_values_are_as_they_were() -> None:
    layers = model(Layer(), Layer())
    want = run(layers)
    assert all(linear.found is None for layer in layers for linear in layer.linears())
    fusion.fuse(layers)
    for mine, other in zip(run(layers), want, strict=True):
        # SGLang's native SiLU rounds once more than its CUDA kernel, which the fused one equals
        assert float((mine - other).float().norm() / other.float().norm()) < 0.01
    got, same = layers[0].input_layernorm(rows(5, HIDDEN)), norm()(rows(5, HIDDEN))
    assert apart(got, same)[0] <= 1


def test_only_what_feeds_fp8_linears() -> None:
    assert fusion.fuse(model(Layer(fp8=False))) == 0
    layer = Layer()
    layer.self_attn.qkv_proj.quant_method = object()
    layer.mlp.down_proj.quant_method.kernel = None  # it runs SGLang's own product
    assert fusion.fuse(model(layer)) == 1
    run(model(layer))
    assert layer.self_attn.qkv_proj.found is None and layer.mlp.down_proj.found is None
    assert_found(layer.mlp.gate_up_proj)


@torch.no_grad()
def test_experts_find_the_codes_of_their_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    layer.mlp = nn.Module()
    layer.mlp.experts = Experts()
    monkeypatch.setattr(experts, "takes_codes", lambda layer: False)
    assert fusion.fuse(model(layer)) == 1  # of qkv: the norm before experts leaves them alone
    monkeypatch.setattr(experts, "takes_codes", lambda layer: True)
    assert fusion.fuse(model(layer)) == 1  # and now it does
    x = rows(4, HIDDEN).view(4, HIDDEN)  # a linear's result is a view
    y, _ = layer.post_attention_layernorm(x, rows(4, HIDDEN, seed=1))
    found = gemm.quantized(y.view(-1, HIDDEN), y, by_row=True)  # SGLang's blocks make another
    assert found is attached(y) is not None and found.is_by_row
    assert torch.equal(found.codes_MK.float(), quantize_tokens(y).codes_MK.float())

    other = Layer()  # experts of another method are left to themselves
    other.mlp = nn.Module()
    other.mlp.experts, other.mlp.shared_experts = nn.Module(), Mlp(fp8=True)
    # qkv, and down_proj of the shared expert; the norm feeds the router too
    assert fusion.fuse(model(other)) == 2
    norm = other.post_attention_layernorm
    assert norm._forward_method == norm.forward_cuda


def test_other_norms_and_native_forwards_are_left_alone() -> None:
    for kwargs in (
        {"cast_x_before_out_mul": True},
        {"fp32_residual": True},
        {"override_orig_dtype": torch.float32},
        {"var_hidden_size": 128},
        {"weight_dtype": torch.float32},
    ):
        layer = Layer()
        layer.input_layernorm = norm(**kwargs)
        assert fusion.fuse(model(layer)) == 2, kwargs
        assert layer.input_layernorm._forward_method == layer.input_layernorm.forward_cuda
    layer.input_layernorm = GemmaRMSNorm(HIDDEN)
    layer.post_attention_layernorm, layer.mlp.act_fn = norm(), on_cuda(SiluAndMul())
    layer.post_attention_layernorm._forward_method = layer.post_attention_layernorm.forward_native
    layer.mlp.act_fn._forward_method = layer.mlp.act_fn.forward_cpu
    assert fusion.fuse(model(layer)) == 0


def test_on_this_cpu_nothing_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    layer = Layer.__new__(Layer)
    nn.Module.__init__(layer)
    layer.input_layernorm = RMSNorm(HIDDEN, weight_dtype=BF16)
    layer.self_attn = nn.Module()
    layer.self_attn.qkv_proj = Linear(HIDDEN, HIDDEN)
    assert fusion.fuse(model(layer)) == 0


@pytest.mark.parametrize(
    "case",
    ["fp32", "residual", "3-d", "strided", "inference", "batch-invariant", "post", "no tokens"],
)
def test_calls_that_are_not_plain_go_to_the_original(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer()
    fused = layer.input_layernorm
    x, residual, extra = rows(4, HIDDEN), rows(4, HIDDEN, seed=1), ()
    if case == "residual":
        residual = residual.float()
    if case == "no tokens":
        x, residual = x[:0], residual[:0]
    if case == "fp32":
        x, residual = x.float(), residual.float()
    if case == "3-d":
        x, residual = x[None], residual[None]
    if case == "strided":
        x = rows(4, 2 * HIDDEN)[:, :HIDDEN]
    if case == "batch-invariant":
        symbol = compat.SYMBOLS["is_batch_invariant_mode_enabled"].replace(":", ".")
        monkeypatch.setattr(symbol, lambda: True)
    if case == "post":
        extra = (rows(4, HIDDEN, seed=2),)
    with torch.inference_mode(case == "inference"):
        want = fused(x.clone(), residual.clone(), *extra)
        fusion.fuse(model(layer))
        attach(x, quantize_tokens(rows(4, HIDDEN)))  # of what x was before the original ran
        got = fused(x, residual.clone(), *extra)
    for mine, other in zip(got, want, strict=True):
        assert torch.equal(mine, other)
    assert attached(got[0]) is None and attached(x) is None
    assert attached(layer.mlp.act_fn(rows(1, 2 * INTER)[:0])) is None
    assert attached(layer.mlp.act_fn(rows(2, 200))) is None  # no whole groups


def test_a_compiled_model_runs_the_original() -> None:
    layer = Layer()
    fusion.fuse(model(layer))
    seen = []

    def note(x: Tensor) -> Tensor:
        y = layer.input_layernorm(x)
        seen.append(attached(y) is not None)
        return y

    assert note(rows(2, HIDDEN)) is not None and seen == [True]

    def compiled(x: Tensor) -> Tensor:
        return layer.input_layernorm(x) * 1

    got = torch.compile(compiled, backend="eager", fullgraph=True)(rows(2, HIDDEN))
    assert apart(got, norm()(rows(2, HIDDEN)))[0] <= 1
    op = layer.input_layernorm
    op.enter_torch_compile(num_tokens=1)  # as SGLang does around its own compilation
    assert attached(op(rows(2, HIDDEN))) is None
    op.leave_torch_compile()
    assert attached(op(rows(2, HIDDEN))) is not None


@torch.no_grad()
def test_sglangs_communicator_hands_on_the_very_tensor() -> None:
    communicator = pytest.importorskip("sglang.srt.layers.communicator")
    layer = Layer()
    fusion.fuse(model(layer))
    y, _ = communicator.CommunicateWithAllReduceAndLayerNormFn._simple(
        rows(4, HIDDEN), rows(4, HIDDEN, seed=1), None, layer.post_attention_layernorm, None
    )
    assert attached(y) is not None
    assert communicator.CommunicateSimpleFn._trivial(y, None, None) is y
