"""A trainer that computes with codes: which layers, gradients, and when codes are made anew."""

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from sgl_fp8rl.formats import BLOCK_FP8, BLOCK_FP8_UE8M0
from sgl_fp8rl.ops.reference import dequantize_weight, fp8_linear, quantize_weight
from sgl_fp8rl.protocol.manifest import ManifestError
from tests import oracle
from tests.trainer_bridge import moe_models
from tests.trainer_bridge.fake_rank import LAYOUT
from trainer_bridge import fp8_forward
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.fp8 import fp8_weights
from trainer_bridge.fp8.engine_norms import convert_norms
from trainer_bridge.fp8.fp8_forward import FP8Forward, convert_layers
from trainer_bridge.fp8.fp8_layers import FP8Linear, convert
from trainer_bridge.kv.fp8_attention import fake_quantize_kv
from trainer_bridge.sources.parameters import named_tensors, sources

Tensor = torch.Tensor
BF16 = torch.bfloat16
GRADIENT_ERROR = 2.0**-6
"""Of a gradient against float64, as a part of its largest element; what is summed and the result
are BF16. Healthy: 0.0030; 0.025 with the weight that was not quantized."""
EXPERTS_ERROR = 2.0**-5
"""The same of experts, whose values between the products are BF16. Healthy: 0.0065, and 0.015 of
the gates."""
ROUNDED_ONCE, ROUNDED_TWICE = 2.0**-9, 2.0**-3
"""Part of a norm's values that are not those of float64, rounded: healthy 0, and 0.27."""
WHOLE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "moe_intermediate_size": 128}
"""Whole blocks in every layer of a tiny model."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def linear(rows: int = 384, cols: int = 256, bias: bool = True) -> nn.Linear:
    torch.manual_seed(rows)
    return nn.Linear(cols, rows, bias=bias, dtype=BF16)


def converted(module: nn.Module) -> Any:
    convert(module, "a.layer", BF16)
    return module


def tiny(family: str = "qwen3_moe", **changes: Any) -> Any:
    return moe_models.tiny(family, BF16, **{**WHOLE, **changes})


def fp8_names(model: nn.Module) -> set[str]:
    """HF names of the layers of which an engine of whole blocks would say that they are FP8."""
    family = model.config.model_type  # type: ignore[union-attr]
    named = named_tensors(model)
    cuts = (name for source in sources(named, family, BF16) for name, _ in source.cuts)
    return {name for name in cuts if "_proj" in name}


INT8_CACHE = {"layers": 2, "kv_heads": 2, "format": "int8"}


class FakeEngine:
    """Answers what ``fp8_forward`` asks."""

    def __init__(self, model: nn.Module, **layout: Any) -> None:
        self.sums: dict[str, list[int]] = {}
        self.kv: dict[str, Any] = {}
        formats = {"block-fp8": sorted(fp8_names(model))}
        self._layout = {**LAYOUT, "formats": formats, "kv_cache": None, **layout}

    def control(self, message: dict[str, Any], timeout_s: float = 0.0) -> dict[str, Any]:
        answers = {"layout": self._layout, "code_sums": {"sums": self.sums}, "kv": self.kv}
        return answers[message["op"]]


# ---- which layers


def test_the_layers_that_the_engine_keeps_in_fp8() -> None:
    model = tiny()
    before = dict(model.named_parameters())
    ignored = "model.layers.1.self_attn.o_proj.weight"
    names = fp8_names(model) - {ignored}
    fp8 = fp8_forward(model, FakeEngine(model, formats={"block-fp8": sorted(names)}))
    assert isinstance(fp8, FP8Forward) and set(fp8.names) == names and fp8.gathered_whole == []
    assert dict(model.named_parameters()).keys() == before.keys() == model.state_dict().keys()
    assert all(p is before[name] for name, p in model.named_parameters())
    computing = {name for name, m in model.named_modules() if hasattr(m, "fp8_parameters")}
    assert "model.layers.0.mlp.experts" in computing and "model.layers.0.mlp.gate" not in computing
    assert "lm_head" not in computing and "model.layers.1.self_attn.o_proj" not in computing
    assert len(computing) == 2 * 5 - 1


def computes(model: nn.Module) -> bool:
    """Whether a layer was converted."""
    return any(hasattr(module, "fp8_parameters") for module in model.modules())


MLA = {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}


def test_models_of_which_nothing_is_converted() -> None:
    """Not the engine's, one with half of a parameter in FP8, with MLA, with an unknown layer."""
    model, other = tiny("qwen3"), "model.layers.7.self_attn.o_proj.weight"
    with pytest.raises(ManifestError, match=r"layers\.7\.self_attn\.o_proj"):
        convert_layers(model, {*fp8_names(model), other}, BF16)
    moe, half = tiny(), "model.layers.0.mlp.experts.1.up_proj.weight"
    with pytest.raises(ManifestError, match=r"experts\.1\.up_proj.*one parameter"):
        convert_layers(moe, fp8_names(moe) - {half}, BF16)
    mla = tiny("deepseek_v2", q_lora_rank=None, first_k_dense_replace=2, **MLA)
    with pytest.raises(ValueError, match=r"kv_b_proj.*MLA"):
        convert_layers(mla, fp8_names(mla), BF16)
    model.model.layers[1].mlp.down_proj.__class__ = type("Scaled", (nn.Linear,), {})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj is a Scaled"):
        convert_layers(model, fp8_names(model), BF16)
    assert not any(map(computes, (model, moe, mla)))


def test_a_layer_of_another_kind() -> None:
    with pytest.raises(ValueError, match=r"a\.layer .* already"):  # called twice
        converted(converted(linear()))
    experts = tiny().model.layers[0].mlp.experts
    experts.is_transposed = True
    with pytest.raises(ValueError, match=r"a\.layer stores its experts .* transposed"):
        converted(experts)


def test_experts_with_a_gate_of_their_own() -> None:
    """Such as one that clamps, which would be dropped."""
    clamped, other = (tiny().model.layers[0].mlp.experts for _ in range(2))
    gate = {"_apply_gate": lambda self, gate_up: gate_up.chunk(2, dim=-1)[0].clamp(max=1)}
    clamped.__class__ = type("ClampedExperts", (type(clamped),), gate)
    del other.act_fn
    for experts in (clamped, other):
        with pytest.raises(ValueError, match=r"a\.layer has a gate of its own"):
            converted(experts)


def test_a_layer_that_the_engine_pads() -> None:
    for ragged in (linear(192), linear(384, 192)):
        with pytest.raises(ValueError, match=r"192.* --fp8rl-ragged bf16"):
            converted(ragged)
    experts = tiny(moe_intermediate_size=64).model.layers[0].mlp.experts
    assert experts.gate_up_proj.shape[1] == 128, "whole blocks, in which gate and up share one"
    with pytest.raises(ValueError, match=r"64x256.* --fp8rl-ragged bf16"):
        converted(experts)


# ---- forward and gradients


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_a_linear(bias: bool) -> None:
    layer, x = converted(linear(bias=bias)), drawn(2, 40, 256).requires_grad_()
    y, dy = layer(x), drawn(2, 40, 384, seed=1)
    assert torch.equal(y, fp8_linear(x, *quantize_weight(layer.weight), layer.bias))
    y.backward(dy)
    rows, dy_rows = x.detach().double().view(80, 256), dy.double().view(80, 384)
    codes, scales = oracle.quantize_weight(layer.weight.detach().float().numpy())
    weight = torch.from_numpy(oracle.dequantize_weight(codes, scales))
    assert error(x.grad.view(80, 256), dy_rows @ weight) < GRADIENT_ERROR
    assert error(layer.weight.grad, dy_rows.T @ rows) < GRADIENT_ERROR
    if bias:
        assert error(layer.bias.grad, dy_rows.sum(0)) < GRADIENT_ERROR
    # controls: the BF16 weight, and the activations that the codes stand for
    assert error(x.grad.view(80, 256), dy_rows @ layer.weight.detach().double()) > GRADIENT_ERROR
    coarse = oracle.dequantize_activation(*oracle.quantize_activation(rows.float().numpy()))
    assert error(layer.weight.grad, dy_rows.T @ torch.from_numpy(coarse)) > GRADIENT_ERROR


def test_gradients_of_experts() -> None:
    experts = tiny().model.layers[0].mlp.experts
    ids = torch.tensor([[0, 1], [2, 1], [4, 0], [1, 5], [0, 2]])
    x, gates = drawn(5, 256).requires_grad_(), torch.rand(5, 2).requires_grad_()
    expected = by_straight_through(experts, x.detach(), ids, gates.detach())
    converted(experts)(x, ids, gates).backward(drawn(5, 256, seed=1))
    found = x.grad, gates.grad, experts.gate_up_proj.grad, experts.down_proj.grad
    for gradient, wanted in zip(found, expected, strict=True):
        assert error(gradient, wanted) < EXPERTS_ERROR
    assert not experts.gate_up_proj.grad[3].any()  # no token chose it
    # the control: the next expert's gradient
    assert error(experts.down_proj.grad.roll(1, 0), expected[3]) > EXPERTS_ERROR


def by_straight_through(experts: Any, x: Tensor, ids: Tensor, gates: Tensor) -> list[Tensor]:
    """Gradients of x, gates and both weights in float64, for ``drawn(5, 256, seed=1)``.

    Values of the forward are those of codes, of which torch is told that they are linear.
    """
    x, gates = x.double().requires_grad_(), gates.double().requires_grad_()
    weights = [w.detach().double().requires_grad_() for w in experts.parameters()]

    def multiply(rows: Tensor, weight: Tensor) -> Tensor:
        codes = quantize_weight(weight.detach().to(BF16))
        y = rows @ dequantize_weight(*codes).double().T
        y = y + rows.detach() @ (weight - weight.detach()).T
        value = fp8_linear(rows.detach().to(BF16), *codes).double()
        return y + (value - y).detach()

    out = torch.zeros_like(x)
    for token, row in enumerate(ids.tolist()):
        for slot, expert in enumerate(row):
            gate, up = multiply(x[None, token], weights[0][expert]).chunk(2, -1)
            down = multiply(nn.functional.silu(gate) * up, weights[1][expert])
            out = out.index_add(0, torch.tensor([token]), down * gates[token, slot])
    out.backward(drawn(5, 256, seed=1).double())
    return [t.grad for t in (x, gates, *weights)]  # type: ignore[misc]


def error(found: Any, exact: Any) -> float:
    wanted = np.asarray(exact, dtype=np.float64)
    return float(np.abs(found.double().numpy() - wanted).max() / np.abs(wanted).max())


def test_frozen_weights_and_inputs_without_gradients() -> None:
    layer = converted(linear())
    layer.weight.requires_grad_(False)
    x = drawn(3, 256).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None and layer.weight.grad is None and layer.bias.grad is not None
    layer = converted(linear())
    layer(drawn(3, 256)).sum().backward()
    assert layer.weight.grad is not None


def test_gradients_of_gradients_are_refused() -> None:
    """They would lack what passes through the weight."""
    experts, x = converted(tiny().model.layers[0].mlp.experts), drawn(3, 256).requires_grad_()
    for y in (converted(linear())(x), experts(x, torch.eye(3, 2).long(), torch.rand(3, 2))):
        (dx,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.square().sum().backward()


@pytest.mark.parametrize("shape", [(6, 256), (2, 3, 256), (256,)], ids=str)
def test_outputs_may_be_written_to(shape: tuple[int, ...]) -> None:
    def gradient(*, in_place: bool) -> Tensor:
        layer, x = converted(linear()), drawn(*shape).requires_grad_()
        y = layer(x)
        y = y.add_(1) if in_place else y + 1
        nn.ReLU(in_place)(y).square().sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(in_place=True), gradient(in_place=False))


@pytest.mark.parametrize("shape", [(0, 256), (2, 0, 256)], ids=str)
def test_no_tokens(shape: tuple[int, ...]) -> None:
    layer, x = converted(linear()), drawn(*shape).requires_grad_()
    y = layer(x)
    assert y.shape == (*shape[:-1], 384) and y.dtype == BF16
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == shape
    assert not layer.weight.grad.any() and not layer.bias.grad.any()


def test_fp32_weights_under_autocast() -> None:
    """As a layer that holds the same in BF16; nothing but the codes is of lower precision."""
    low = converted(linear())
    high = converted(linear().float())
    with torch.no_grad():  # which rounds to the other's
        high.bias.mul_(1 + 2.0**-12)
        high.weight.mul_(1 + 2.0**-12)
    x = drawn(6, 256)
    low(x).sum().backward()
    with torch.autocast("cpu", BF16):
        y = high(x.float())
        y.sum().backward()
    assert torch.equal(y, low(x))
    assert high.weight.grad.dtype == torch.float32
    assert torch.equal(high.weight.grad, low.weight.grad.float())
    x = x.float()  # without autocast weights are rounded to the engine's dtype all the same
    assert torch.equal(high(x), fp8_linear(x, *quantize_weight(low.weight), low.bias))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    def gradients(run: Callable[..., Tensor]) -> list[Tensor]:
        layers = nn.Sequential(converted(linear()), nn.GELU(), converted(linear(256, 384)))
        x = drawn(9, 256).requires_grad_()
        run(layers, x).sum().backward()
        return [x.grad, *(p.grad for p in layers.parameters())]  # type: ignore[list-item]

    plain = gradients(lambda layers, x: layers(x))
    again = gradients(lambda layers, x: checkpoint(layers, x, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_a_compiled_model_runs_these_layers_uncompiled() -> None:
    torch._dynamo.reset()
    layers = nn.Sequential(converted(linear()), nn.GELU(), converted(linear(256, 384)))
    x, compiled = drawn(9, 256), torch.compile(layers, backend="eager")
    assert torch.equal(compiled(x), layers(x))
    with torch.no_grad():
        layers[0].weight.mul_(2)  # its codes are no constants of a graph
    assert torch.equal(compiled(x), layers(x))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_cannot_be_quantized_is_refused_by_layer(bad: float) -> None:
    layer, experts, x = converted(linear()), tiny().model.layers[0].mlp.experts, drawn(3, 256)
    x[1, 2] = bad
    with pytest.raises(ValueError, match=r"a\.layer\.weight.*forward.*NaN or Inf"):
        layer(x)
    with pytest.raises(ValueError, match=r"a\.layer\.gate_up_proj.*forward.*NaN or Inf"):
        converted(experts)(x, torch.eye(3, 2).long(), torch.rand(3, 2))
    with torch.no_grad():
        layer.weight[3, 4] = torch.nan
    for read in (lambda: layer(drawn(1, 256)), lambda: named_tensors(layer)):
        with pytest.raises(ManifestError, match=r"a\.layer\.weight holds NaN"):
            read()


# ---- when codes are made


class UncountedSGD(torch.optim.Optimizer):
    """Writes where torch does not count versions, as kernels outside of torch do."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(1.0)


def in_place(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(2)


def by_optimizer(layer: nn.Linear) -> None:
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.SGD([layer.weight], lr=1.0).step()


def past_torch(layer: nn.Linear) -> nn.Linear:
    """Written to where torch does not see it."""
    layer.weight.data.mul_(2)
    return layer


def doubled(layer: nn.Linear) -> dict[str, Tensor]:
    return {name: 2 * tensor for name, tensor in layer.state_dict().items()}


CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "in place": in_place,
    "by an optimizer": by_optimizer,
    "uncounted": lambda layer: UncountedSGD([layer.weight]).step(),
    "past torch, then sent": lambda layer: named_tensors(past_torch(layer)),
    "past torch, then told": lambda layer: increment_version(past_torch(layer).parameters()),
    "loaded": lambda layer: layer.load_state_dict(doubled(layer)),
    "assigned": lambda layer: layer.load_state_dict(doubled(layer), assign=True),
    "moved": lambda layer: setattr(layer.weight, "data", 2 * layer.weight.data),
    "replaced": lambda layer: setattr(layer, "weight", nn.Parameter(2 * layer.weight.detach())),
}


def follows(layer: nn.Linear) -> bool:
    x = drawn(4, 256)
    return torch.equal(layer(x), fp8_linear(x, *quantize_weight(layer.weight)))


@pytest.mark.parametrize("change", CHANGES)
def test_codes_follow_the_weight(change: str) -> None:
    layer, x = converted(linear(bias=False)), drawn(4, 256)
    before = layer(x)
    CHANGES[change](layer)
    assert follows(layer) and not torch.equal(layer(x), before)


def test_a_write_past_torch_is_not_seen() -> None:
    """The documented limit."""
    layer = converted(linear(bias=False))
    assert follows(layer) and not follows(past_torch(layer))


def test_codes_follow_weights_that_last_for_one_forward() -> None:
    """The memory of one is that of the next, whose version is the same."""
    layer, x = converted(linear(bias=False)), drawn(4, 256)
    memory = bytearray(layer.weight.nbytes)
    for factor in (1.0, 2.0):
        weight = torch.frombuffer(memory, dtype=BF16).view_as(layer.weight)
        weight.copy_(layer.weight.detach() * factor)
        with torch.no_grad():
            y = functional_call(layer, {"weight": weight}, x)
        assert torch.equal(y, fp8_linear(x, *quantize_weight(weight)))


@torch.inference_mode()
def test_codes_follow_weights_of_inference_mode() -> None:
    """Whose versions torch does not count."""
    layer = converted(linear(bias=False))
    assert layer.weight.is_inference() and follows(layer)
    layer.weight.mul_(2)
    assert follows(layer)


def test_codes_are_made_once_a_step() -> None:
    model = tiny("qwen3")
    convert_layers(model, fp8_names(model), BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    matrices = sum("_proj" in name for name, _ in model.named_parameters())
    model.gradient_checkpointing_enable()
    for _ in range(2):
        with patch.object(BLOCK_FP8, "encode", wraps=BLOCK_FP8.encode) as encode:
            named_tensors(model)  # an update
            with torch.inference_mode():
                model(torch.arange(8)[None])
            for _ in range(2):  # micro-batches
                model.train()(torch.arange(8)[None]).logits.float().square().mean().backward()
        assert encode.call_count == matrices
        optimizer.step()
        optimizer.zero_grad()


def test_a_copy_has_codes_of_its_own() -> None:
    layer = converted(linear(bias=False))
    assert follows(layer)
    other = copy.deepcopy(layer)
    assert isinstance(other, FP8Linear)
    in_place(other)
    assert follows(other) and follows(layer)


# ---- updates and checks


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_an_update_sends_the_codes(family: str) -> None:
    plain, model = tiny(family), tiny(family)
    convert_layers(model, fp8_names(model), BF16)
    wanted: dict[str, Tensor] = {}
    for name, tensor in hf_tensors(plain):
        if name in fp8_names(plain):
            wanted[name], wanted[f"{name}_scale_inv"] = quantize_weight(tensor)
        else:
            wanted[name] = tensor
    found = dict(hf_tensors(model))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensor.dtype == found[name].dtype
        assert torch.equal(tensor.view(torch.uint8), found[name].contiguous().view(torch.uint8))
    addresses = [t.data_ptr() for _, t in named_tensors(model)]
    torch.optim.SGD(model.parameters()).step()
    assert [t.data_ptr() for _, t in named_tensors(model)] == addresses  # engines read in place


def hf_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    named = named_tensors(model)
    for (_, tensor), source in zip(
        named, sources(named, model.config.model_type, BF16), strict=True
    ):
        for name, cut in source.cuts:
            yield name, cut(source.read(tensor))


def sums_of(model: Any, *, power_of_two: bool = False) -> dict[str, list[int]]:
    """What an engine that quantized these weights would answer, in NumPy."""
    sums: dict[str, list[int]] = {}
    for name, tensor in hf_tensors(model):
        if "_proj" in name:
            weight = tensor.detach().float().numpy()
            codes, scales = oracle.quantize_weight(weight, power_of_two=power_of_two)
            words = codes.reshape(-1).view(np.uint64), scales.reshape(-1).view(np.int32)
            sums[name] = [sum(map(int, each)) % (1 << 64) for each in words]
    return sums


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_check_compares_codes(family: str) -> None:
    model, plain = tiny(family), tiny(family)
    engine = FakeEngine(model)
    fp8 = fp8_forward(model, engine)
    engine.sums = sums_of(plain)
    fp8.check(engine)

    name = fp8.names[3]
    for place in (0, 1):  # controls: another code or scale, and a tensor too few
        engine.sums = sums_of(plain)
        engine.sums[name][place] += 1
        with pytest.raises(EngineError, match=f"1 of .* {name}"):
            fp8.check(engine)
    del engine.sums[name]
    with pytest.raises(EngineError, match=name):
        fp8.check(engine)
    engine.sums = sums_of(plain)
    torch.nn.init.normal_(next(p for n, p in model.named_parameters() if "o_proj" in n))
    with pytest.raises(EngineError, match=r"1 of .*self_attn\.o_proj"):
        fp8.check(engine)
    engine.sums = None  # type: ignore[assignment]
    with pytest.raises(EngineError, match="install the same"):
        fp8.check(engine)


def test_a_list_of_engines_is_checked_whole() -> None:
    model, plain = tiny("qwen3"), tiny("qwen3")
    cache = {"layers": 2, "kv_heads": 1}
    engines = [FakeEngine(model, kv_cache=cache) for _ in range(3)]
    *same, other = engines
    fp8 = fp8_forward(model, same)
    assert fp8.names == fp8_forward(tiny("qwen3"), same[0]).names
    for each in engines:
        each.sums = sums_of(plain)
        each.kv = {"pending": False, "scales": [[[0.3], [0.2]], [[0.1], [0.5]]]}
    fp8.check(engines)
    fp8.sync_kv_scales(engines)
    name = fp8.names[3]
    other.sums = {**other.sums, name: [0, 0]}
    other.kv = {"pending": False, "scales": [[[0.3], [0.2]], [[0.1], [0.4]]]}
    with pytest.raises(EngineError, match=f"engine 2, {name}"):
        fp8.check(engines)
    with pytest.raises(EngineError, match=r"engine 2 differs from engine 0.*kv_scales"):
        fp8.sync_kv_scales(engines)
    for odd in ({"dtype": "float16"}, {"formats": {"block-fp8": [*fp8.names[1:]]}}):
        fresh = tiny("qwen3")
        with pytest.raises(EngineError, match=r"engine 1 differs from engine 0.*options"):
            fp8_forward(fresh, [same[0], FakeEngine(fresh, **odd)])
        assert not computes(fresh)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_scales_of_an_engine_that_are_powers_of_two(family: str) -> None:
    """Of weights and activations; the check tells an engine of the other format."""
    ids, names = torch.arange(1, 33)[None], sorted(fp8_names(tiny(family)))
    model, plain, at_powers = tiny(family), tiny(family), tiny(family)
    engine = FakeEngine(model, formats={BLOCK_FP8_UE8M0.name: names})
    fp8 = fp8_forward(model, engine)
    named = dict(named_tensors(model))
    scales = [t for name, t in named.items() if name.endswith("_scale_inv")]
    assert scales and all(bool((torch.frexp(t)[0] == 0.5).all()) for t in scales)
    fp8_forward(plain, FakeEngine(plain))
    with torch.no_grad():
        for name, parameter in at_powers.named_parameters():
            if (codes := named.get(name)) is not None and codes.dtype == torch.float8_e4m3fn:
                parameter.copy_(dequantize_weight(codes, named[f"{name}_scale_inv"]))
    fp8_forward(at_powers, FakeEngine(at_powers))  # the same weights, and plain activations
    logits = [each(ids).logits for each in (model, plain, at_powers)]
    assert not torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    other: Any = FakeEngine(plain)
    other.sums = engine.sums = sums_of(tiny(family), power_of_two=True)
    fp8.check(engine)
    with pytest.raises(EngineError, match="computes in block-fp8 and this forward in block-fp8-ue"):
        fp8.check(other)
    copy.deepcopy(fp8).check(engine)
    engine._layout["formats"] = {BLOCK_FP8.name: names}  # restarted, where it was
    with pytest.raises(EngineError, match="computes in block-fp8 and this forward in block-fp8-ue"):
        fp8.check(engine)


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_rounds_the_scales_of_its_activations_up(bias: bool) -> None:
    layer: Any = nn.Linear(256, 128, bias=bias, dtype=BF16)
    weight = layer.weight.detach().clone()
    convert(layer, "layer", BF16, BLOCK_FP8_UE8M0)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).to(BF16)
    codes, scales = oracle.quantize_weight(weight.float().numpy(), power_of_two=True)
    added = layer.bias.detach().float().numpy() if bias else None

    def exact(power_of_two: bool) -> Tensor:
        tokens = x.float().numpy()
        found = oracle.linear(tokens, codes, scales, added, power_of_two=power_of_two)
        return torch.from_numpy(found)

    found = layer(x).double()
    assert float((found - exact(True)).abs().max()) < 2**-7 * float(found.abs().max())
    assert float((exact(False) - exact(True)).abs().max()) > 2**-7 * float(found.abs().max())


def test_attention_reads_what_the_engines_cache_stores() -> None:
    model, ids = tiny("qwen3"), torch.arange(1, 9)[None]
    plain = model(ids).logits
    in_bf16 = FakeEngine(model)
    engine: Any = FakeEngine(model, kv_cache={"layers": 2, "kv_heads": 2})
    fp8 = fp8_forward(model, engine)
    with_codes = model(ids).logits
    engine.kv = {"pending": True, "scales": []}
    with pytest.raises(EngineError, match="after a rollout"):
        fp8.sync_kv_scales(engine)
    assert torch.equal(model(ids).logits, with_codes)
    rows = [[[0.3, 0.3], [0.2, 0.2]], [[0.1, 0.1], [0.5, 0.5]]]
    engine.kv = {"pending": False, "scales": rows}
    fp8.sync_kv_scales(engine)
    expected = copy.deepcopy(model)
    fake_quantize_kv(expected, [(0.3, 0.2), (0.1, 0.5)], BF16)
    assert torch.equal(model(ids).logits, expected(ids).logits)
    assert not torch.equal(model(ids).logits, with_codes)
    fp8.sync_kv_scales(in_bf16)
    assert torch.equal(model(ids).logits, with_codes) and not torch.equal(with_codes, plain)


def test_attention_reads_what_int8_caches_store() -> None:
    """An engine that has not measured anything serves it, and is not asked for scales."""
    model, ids = tiny("qwen3"), torch.arange(1, 9)[None]
    engines: list[Any] = [FakeEngine(model, kv_cache=INT8_CACHE) for _ in range(2)]
    fp8 = fp8_forward(model, engines)
    with_codes = model(ids).logits
    fp8.sync_kv_scales(engines)
    expected = copy.deepcopy(model)
    fake_quantize_kv(expected, [None, None], BF16)
    assert torch.equal(model(ids).logits, expected(ids).logits)
    assert not torch.equal(model(ids).logits, with_codes)
    e4m3: Any = FakeEngine(model, kv_cache={**INT8_CACHE, "format": "e4m3"})
    e4m3.kv = {"pending": False, "scales": [[[0.3], [0.2]], [[0.1], [0.4]]]}
    for others in ([e4m3, engines[0]], [engines[0], FakeEngine(model)]):
        with pytest.raises(EngineError, match=r"engine 1 differs from engine 0; .*same KV"):
            fp8.sync_kv_scales(others)
    fp8.sync_kv_scales(e4m3)
    assert not torch.equal(model(ids).logits, expected(ids).logits)
    unknown = FakeEngine(model, kv_cache={**INT8_CACHE, "format": "int4"})
    with pytest.raises(EngineError, match="kv_cache"):
        fp8.sync_kv_scales(unknown)


def test_steps_are_counted_once() -> None:
    """However many parameters have codes."""
    converted(linear())
    converted(linear())
    before = fp8_weights._steps
    UncountedSGD([nn.Parameter(torch.zeros(1))]).step()
    assert fp8_weights._steps == before + 1


# ---- norms


def test_norms_round_once_behind_the_weight() -> None:
    """Against float64; the control is transformers' own, which rounds twice."""
    torch.manual_seed(0)
    model = tiny("qwen3")
    norm = model.model.layers[0].input_layernorm
    with torch.no_grad():
        norm.weight.copy_(1 + 0.3 * torch.randn(norm.weight.shape))
    x = drawn(64, norm.weight.shape[0])
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = (exact * norm.weight.double()).to(BF16)
    assert norm.variance_epsilon == 1e-6
    assert (norm(x) != expected).float().mean() > ROUNDED_TWICE
    fp8_forward(model, FakeEngine(model))
    assert (norm(x) != expected).float().mean() < ROUNDED_ONCE
    assert isinstance(norm, nn.Module) and "input_layernorm.weight" in dict(
        model.model.layers[0].named_parameters()
    )


def test_norms_of_fp32_round_as_the_engine_does() -> None:
    """As the parameters and residuals under autocast are."""
    norm, low = (tiny("qwen3").model.layers[0].input_layernorm for _ in range(2))
    x = drawn(64, norm.weight.shape[0])
    with torch.no_grad():
        low.weight.copy_(1 + 0.3 * drawn(*norm.weight.shape, seed=1))
        norm.float().weight.copy_(low.weight.float() * (1 + 2.0**-10))  # rounds to the other's
    for each in (norm, low):
        assert convert_norms(each, BF16) == 1
    assert norm(x.float()).dtype == torch.float32
    assert torch.equal(norm(x.float()), low(x).float())
