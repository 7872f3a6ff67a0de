"""A trainer that computes with codes: which layers, gradients, and when codes are made anew."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.func import functional_call

from sgl_fp8rl.formats import BLOCK_FP8, BLOCK_FP8_UE8M0
from sgl_fp8rl.ops.reference import dequantize_weight, fp8_linear, quantize_weight
from sgl_fp8rl.protocol.manifest import ManifestError
from tests import oracle
from tests.trainer_bridge import moe_models
from tests.trainer_bridge.fake_rank import LAYOUT
from trainer_bridge import Rollout, fp8_forward, response_logprobs
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.fp8.engine_norms import EngineNorm, convert_norms
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
    assert isinstance(model.model.layers[0].input_layernorm, EngineNorm)
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


def experts_of(**changes: Any) -> Any:
    return tiny(**changes).model.layers[0].mlp.experts


def clamped() -> Any:
    """Experts whose gate would be dropped."""
    gate = {"_apply_gate": lambda self, gate_up: gate_up.chunk(2, dim=-1)[0].clamp(max=1)}
    experts = experts_of()
    experts.__class__ = type("ClampedExperts", (type(experts),), gate)
    return experts


def changed(module: Any, **attributes: Any) -> Any:
    vars(module).update(attributes)
    return module


RAGGED = " --fp8rl-ragged bf16"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: converted(linear()), r"a\.layer .* already"),  # called twice
        (lambda: changed(experts_of(), is_transposed=True), r"a\.layer stores .* transposed"),
        (clamped, r"a\.layer has a gate of its own"),
        (lambda: changed(experts_of(), _modules={}), r"a\.layer has a gate of its own"),
        # what the engine pads; of the last, gate and up share a block
        (lambda: linear(192), f"192.*{RAGGED}"),
        (lambda: linear(384, 192), f"192.*{RAGGED}"),
        (lambda: experts_of(moe_intermediate_size=64), f"64x256.*{RAGGED}"),
    ],
)
def test_layers_that_are_refused(make: Callable[[], nn.Module], sentence: str) -> None:
    module = make()
    with pytest.raises(ValueError, match=sentence):
        converted(module)


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


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_weights_and_inputs_without_gradients(frozen: bool) -> None:
    layer, x = converted(linear()), drawn(3, 256).requires_grad_(frozen)
    layer.weight.requires_grad_(not frozen)
    layer(x).sum().backward()
    assert (x.grad is None, layer.weight.grad is None) == (not frozen, frozen)
    assert layer.bias.grad is not None


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
    "in place": torch.no_grad()(lambda layer: layer.weight.mul_(2)),
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
    assert not follows(past_torch(layer)), "the documented limit"


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
    CHANGES["in place"](other)
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
    check_same_bytes(dict(hf_tensors(model)), wanted)
    addresses = [t.data_ptr() for _, t in named_tensors(model)]
    torch.optim.SGD(model.parameters()).step()
    assert [t.data_ptr() for _, t in named_tensors(model)] == addresses  # engines read in place


def check_same_bytes(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        bits, expected = (t.contiguous().view(torch.uint8) for t in (found[name], tensor))
        assert torch.equal(bits, expected), name


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
    model, sums = tiny(family), sums_of(tiny(family))
    engine: Any = FakeEngine(model)
    fp8 = fp8_forward(model, engine)
    engine.sums = sums
    fp8.check(engine)
    name = fp8.names[3]
    code, scale = sums[name]
    for wrong, why in (  # another code or scale, a tensor too few, and none
        ({**sums, name: [code + 1, scale]}, f"1 of .* {name}"),
        ({**sums, name: [code, scale + 1]}, f"1 of .* {name}"),
        ({other: of for other, of in sums.items() if other != name}, name),
        (None, "install the same"),
    ):
        engine.sums = wrong
        with pytest.raises(EngineError, match=why):
            fp8.check(engine)
    engine.sums = sums
    torch.nn.init.normal_(next(p for n, p in model.named_parameters() if "o_proj" in n))
    with pytest.raises(EngineError, match=r"1 of .*self_attn\.o_proj"):
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
    """The check tells an engine of the other format."""
    names, model, plain = sorted(fp8_names(tiny(family))), tiny(family), tiny(family)
    engine = FakeEngine(model, formats={BLOCK_FP8_UE8M0.name: names})
    fp8 = fp8_forward(model, engine)
    scales = [t for name, t in named_tensors(model) if name.endswith("_scale_inv")]
    assert scales and all(bool((torch.frexp(t)[0] == 0.5).all()) for t in scales)
    fp8_forward(plain, FakeEngine(plain))
    found, control = (each(torch.arange(1, 33)[None]).logits for each in (model, plain))
    assert not torch.equal(found, control)
    other = FakeEngine(plain)
    other.sums = engine.sums = sums_of(tiny(family), power_of_two=True)
    fp8.check(engine)
    copy.deepcopy(fp8).check(engine)
    engine._layout["formats"] = {BLOCK_FP8.name: names}  # restarted, where it was
    for each in (other, engine):
        with pytest.raises(EngineError, match="in block-fp8 and this forward in block-fp8-ue"):
            fp8.check(each)


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
    """An INT8 cache is served by an engine that measured nothing, which is not asked for scales."""
    model, ids = tiny("qwen3"), torch.arange(1, 9)[None]
    in_bf16 = FakeEngine(model)
    e4m3: Any = FakeEngine(model, kv_cache={**INT8_CACHE, "format": "e4m3"})
    int8 = [FakeEngine(model, kv_cache=INT8_CACHE) for _ in range(2)]
    fp8 = fp8_forward(model, e4m3)
    with_codes = model(ids).logits
    e4m3.kv = {"pending": True, "scales": []}
    with pytest.raises(EngineError, match="after a rollout"):
        fp8.sync_kv_scales(e4m3)
    assert torch.equal(model(ids).logits, with_codes)
    rows = [[[0.3, 0.3], [0.2, 0.2]], [[0.1, 0.1], [0.5, 0.5]]]
    e4m3.kv = {"pending": False, "scales": rows}
    of_layers: list[Any] = [(0.3, 0.2), (0.1, 0.5)]
    for engines, kept in ((e4m3, of_layers), (int8, [None, None]), (e4m3, of_layers)):
        fp8.sync_kv_scales(engines)
        expected = copy.deepcopy(model)
        fake_quantize_kv(expected, kept, BF16)
        assert torch.equal(model(ids).logits, expected(ids).logits)
        assert not torch.equal(model(ids).logits, with_codes)
    for others in ([e4m3, int8[0]], [int8[0], in_bf16]):
        with pytest.raises(EngineError, match=r"engine 1 differs from engine 0; .*same KV"):
            fp8.sync_kv_scales(others)
    fp8.sync_kv_scales(in_bf16)
    assert torch.equal(model(ids).logits, with_codes)
    unknown = FakeEngine(model, kv_cache={**INT8_CACHE, "format": "int4"})
    with pytest.raises(EngineError, match="kv_cache"):
        fp8.sync_kv_scales(unknown)


def test_logprobs_attend_under_the_scales_of_their_rollout() -> None:
    """Also where backward computes checkpointed activations again."""
    model, plain = tiny("qwen3"), tiny("qwen3")
    convert_layers(model, fp8_names(model), BF16)
    first, second = ((0.3, 0.2), (0.1, 0.5)), ((0.2, 0.2), (0.1, 0.5))
    rows: dict[str, Any] = {"prompt_tokens": [[1, 2, 3], [4, 5]], "tokens": [[6, 7], [8, 9, 10]]}
    more = {name: [[0], [0]] for name in ("logprobs", "versions")}
    rollout = Rollout(**rows, **more, finish_reasons=["stop"] * 2, temperature=0.8)

    def gradients(of: Any, rollout: Any, *responses: Any) -> tuple[Tensor, Tensor]:
        of.zero_grad()
        logprobs_BT = response_logprobs(of, rollout, *responses)
        logprobs_BT.sum().backward()
        return logprobs_BT.detach(), of.model.layers[0].self_attn.k_proj.weight.grad.clone()

    stock = gradients(model, rollout)
    of_plain = gradients(plain, rollout)
    for scales in (first, second, first):
        expected = copy.deepcopy(model)
        fake_quantize_kv(expected, scales, BF16)
        wanted = gradients(expected, rows["prompt_tokens"], rows["tokens"], 0.8)
        for kind in ([scales, scales], [None, scales]):  # an engine that did not say
            under = replace(rollout, kv_scales=kind)
            assert all(map(torch.equal, gradients(model, under), wanted))
        kept = [layer.self_attn.fake_quantized_kv for layer in model.model.layers]
        checkpointed = copy.deepcopy(model).train()
        checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
        assert all(map(torch.equal, gradients(checkpointed, under), wanted))
        assert all(map(torch.equal, gradients(plain, under), of_plain)), "not of fp8_forward"
        for unknown in (None, [None, None]):
            under = replace(rollout, kv_scales=unknown)
            assert all(map(torch.equal, gradients(model, under), wanted))
        again = [layer.self_attn.fake_quantized_kv for layer in model.model.layers]
        assert all(a is b for a, b in zip(kept, again, strict=True)), "would be compiled anew"
        assert not any(map(torch.equal, wanted, stock))
    mixed = replace(rollout, kv_scales=[first, second])
    with pytest.raises(ValueError, match=r"2 sets of KV scales.*kv_scales to update"):
        response_logprobs(model, mixed)
    response_logprobs(model, mixed[1:])
    with pytest.raises(ValueError, match="layers 0 to 0"):
        response_logprobs(model, replace(rollout, kv_scales=[first[:1]] * 2))


# ---- norms


def test_norms_round_once_behind_the_weight() -> None:
    """Against float64; the control is transformers' own, which rounds twice. One in FP32, as under
    autocast, rounds as the engine does."""
    norm, high = (tiny("qwen3").model.layers[0].input_layernorm for _ in range(2))
    with torch.no_grad():
        norm.weight.copy_(1 + 0.3 * drawn(*norm.weight.shape, seed=1))
        high.float().weight.copy_(norm.weight.float() * (1 + 2.0**-10))  # rounds to the other's
    x = drawn(64, norm.weight.shape[0])
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = (exact * norm.weight.double()).to(BF16)
    assert norm.variance_epsilon == 1e-6
    assert (norm(x) != expected).float().mean() > ROUNDED_TWICE
    for each in (norm, high):
        assert convert_norms(each, BF16) == 1
    assert (norm(x) != expected).float().mean() < ROUNDED_ONCE
    assert high(x.float()).dtype == torch.float32
    assert torch.equal(high(x.float()), norm(x).float())
