"""Attention to what a KV cache of 8 bits stores, against float64 and the oracles' codes."""

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sgl_fp8rl.ops.kv import STATS, Cache, store_kv
from sgl_fp8rl.ops.kv_int8 import rotate_queries
from sgl_fp8rl.ops.paged_decode import Pages, attend
from tests import kv_int8_oracle, oracle
from tests.trainer_bridge.test_attention_hooks import ATTENTIONS, LAYERS, padded, seen, tiny, tokens
from trainer_bridge.kv import attention_hooks
from trainer_bridge.kv.fp8_attention import FakeQuantizedKV, fake_quantize_kv

Tensor = torch.Tensor
BF16 = torch.bfloat16
NEAR = 4e-6
"""Of attention in FP32 against float64, as a part of the largest. Healthy: 4e-7; K and V that are
not rounded: 0.03 and more."""
DECODE_NEAR = {torch.float32: 1e-3, torch.float16: 2e-3, BF16: 1e-2}
"""The same to an engine whose queries are FP16. Healthy: 6e-4, 7e-4 and 5e-3; E4M3's replay: 0.06
and more."""
GRADIENTS_NEAR = 4e-6
"""The same of gradients. Healthy: 5e-7; through K and V that are not rounded: 0.02 and more."""
SCALES = [(0.11, 0.013), (0.07, 0.0031), (1.3, 0.02)]
"""No powers of two; K and V of some elements are clipped."""
OF_LAYERS: dict[str, list[Any]] = {"e4m3": SCALES, "int8": [None] * LAYERS}
REPLAYS = {"e4m3": FakeQuantizedKV(SCALES[0], BF16), "int8": FakeQuantizedKV(None, BF16)}


def stored(x: Tensor, scale: float) -> Tensor:
    """What an E4M3 cache holds, in float64."""
    scaled = (x.detach().float() / np.float32(scale)).clamp(-448, 448).numpy()
    return torch.from_numpy(oracle.decode(oracle.encode(scaled))) * float(np.float32(scale))


def stored_in_int8(x: Tensor, is_key: bool) -> Tensor:
    """What an INT8 cache holds, in float64, and of K rotated back."""
    found = []
    for head in x.detach().float().numpy().reshape(-1, x.shape[-1]):
        codes, scale = kv_int8_oracle.encode(kv_int8_oracle.rotated(head) if is_key else head)
        found.append(codes * float(scale))
    values = np.array(found).reshape(x.shape)
    return torch.from_numpy(values @ kv_int8_oracle.matrix(x.shape[-1]) if is_key else values)


def held(kind: str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What an engine's cache holds of K and V, rounded to its dtype before."""
    key, value = key.to(BF16), value.to(BF16)
    if kind == "int8":
        return stored_in_int8(key, True), stored_in_int8(value, False)
    return stored(key, SCALES[0][0]), stored(value, SCALES[0][1])


def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, **options: Any
) -> Any:
    """As transformers' functions are called."""
    given: Any = {"is_causal": is_causal, "scale": options["scaling"], "enable_gqa": True}
    return scaled_dot_product_attention(query, key, value, **given), None


def drawn(seed: int, heads: int, spread: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn((2, heads, 9, 16), generator=generator)


def far(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).detach().abs().max() / wanted.detach().abs().max())


@pytest.mark.parametrize("scaling", [None, 0.25])
@pytest.mark.parametrize("kind", REPLAYS)
def test_attention_and_its_gradients(kind: str, scaling: float | None) -> None:
    """``scaling`` is 1 / sqrt(16), given or not; a rounded element's gradient is that of its
    value. The controls: K and V as they are, and the other format."""
    inputs = [drawn(0, 4, 1.0), drawn(1, 2, 12.0), drawn(2, 2, 1.5)]
    query, key, value = (x.requires_grad_() for x in inputs)
    given = torch.nn.Module(), query, key, value
    found, _ = REPLAYS[kind].attend(attention, *given, scaling=scaling or 0.25)
    rounded = [x.requires_grad_() for x in (query.detach().double(), *held(kind, key, value))]
    wanted = by_hand(*rounded)
    assert far(found.double(), wanted) < NEAR
    control = by_hand(*(x.detach().double() for x in inputs))
    assert far(control, wanted) > 100 * NEAR
    (other,) = REPLAYS.keys() - {kind}
    control, _ = REPLAYS[other].attend(attention, *given, scaling=0.25)
    assert far(control.double(), wanted) > 100 * NEAR
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    for mine, theirs in zip(inputs, rounded, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert far(mine.grad.double(), theirs.grad) < GRADIENTS_NEAR


@pytest.mark.parametrize("default", [torch.float32, BF16])
def test_codes_are_those_of_the_engine(default: torch.dtype) -> None:
    """It quantizes what it has rounded to its dtype, by FP32 scales. FP32 weights under autocast
    make K in FP32; the control takes its codes unrounded."""
    key, scale = drawn(4, 2, 1.0), 0.1234
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        _, given, _ = _seen_by_attention(FakeQuantizedKV((scale, scale), BF16), key)
    finally:
        torch.set_default_dtype(before)
    assert given.dtype == torch.float32
    wanted = stored(key.to(BF16), scale) / float(np.float32(scale))
    assert torch.allclose(given.double(), wanted, rtol=1e-12)
    control = stored(key, scale) / float(np.float32(scale))
    assert not torch.allclose(control, wanted, rtol=1e-12)


@pytest.mark.parametrize("is_key", [True, False])
@pytest.mark.parametrize("dim", [16, 64, 96, 128])
def test_values_are_those_of_the_engine(dim: int, is_key: bool) -> None:
    """Of INT8, likewise; outliers are spread over their block of K, and scales are of tokens."""
    made = torch.Generator().manual_seed(dim)
    x = torch.randn((2, 2, 9, dim), generator=made) * torch.logspace(-2, 2, 9)[:, None]
    x[..., dim // 2] *= 30
    x[0, 0, 0] = 0
    query, key, value = _seen_by_attention(FakeQuantizedKV(None, BF16), x)
    assert torch.equal(query, x) and key.dtype == torch.float32
    found, wanted = (key if is_key else value).double(), stored_in_int8(x.to(BF16), is_key)
    assert far(found, wanted) < NEAR
    of_tokens = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-9)
    assert float(of_tokens.max()) < NEAR
    assert far(stored_in_int8(x, is_key), wanted) > 100 * NEAR
    assert far(stored_in_int8(x.to(BF16), not is_key), wanted) > 100 * NEAR


@pytest.mark.parametrize("dim", [64, 96])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_attention_is_that_of_the_engines_decode(dim: int, dtype: torch.dtype) -> None:
    """Over what the engine's store writes, with queries that it has rotated and rounded to FP16."""
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((1, n, 33, dim), generator=made).to(BF16) for n in (4, 2, 2))
    k[..., 3] *= 20
    of_token = [x[0].transpose(0, 1) for x in (q, k, v)]
    caches = [torch.zeros((64, 2, dim), dtype=torch.int8) for _ in range(2)]
    scales = torch.zeros((2, 64), dtype=torch.int32)
    slots = torch.randperm(63, generator=made)[:33] + 1
    counts = torch.zeros(STATS, dtype=torch.int64)
    codes = Cache(*caches, token_scales_HS=scales, stats_C=counts)
    store_kv(*of_token[1:], slots, codes, read_back=False)
    pages = Pages(slots[None].int(), 1, torch.tensor([33], dtype=torch.int32))
    scaling = dim**-0.5
    wanted = attend(rotate_queries(of_token[0]), codes, pages, scaling).transpose(0, 1)[None]

    def replayed(kind: str) -> Tensor:
        given = torch.nn.Module(), *(x.to(dtype) for x in (q, k, v))
        causal = partial(attention, is_causal=True)
        found, _ = REPLAYS[kind].attend(causal, *given, scaling=scaling)
        return found.float()

    assert far(replayed("int8"), wanted) < DECODE_NEAR[dtype]
    if dtype != torch.float16:  # which E4M3's refuses
        assert far(replayed("e4m3"), wanted) > 5 * DECODE_NEAR[dtype]


def test_fp16_is_refused_of_codes() -> None:
    """Whose products with Q may overflow; values are as large as K and V."""
    with pytest.raises(ValueError, match="BF16 or FP32"):
        _seen_by_attention(FakeQuantizedKV((1.0, 1.0), torch.float16), drawn(0, 2, 1.0).half())


def _seen_by_attention(kv: Any, x: Tensor) -> list[Tensor]:
    """Query, key and value, where each is x."""
    given: list[Tensor] = []

    def look(module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        given.extend((query, key, value))
        return query, None

    kv.attend(look, torch.nn.Module(), x, x, x)
    return given


@pytest.mark.parametrize("implementation", ATTENTIONS)
@pytest.mark.parametrize("kind", OF_LAYERS)
def test_every_layer_of_a_model(kind: str, implementation: str) -> None:
    """Each under its own scales, and as it was once they are taken away; a calibrator sees K and V
    before they are rounded."""
    model, ids, mask = tiny(attention=implementation), tokens(), padded(left=True)
    amax, plain = seen(model, ids, attention_mask=mask)
    fake_quantize_kv(model, OF_LAYERS[kind], BF16)
    _, rounded = seen(model, ids, attention_mask=mask)
    alone = []
    for layer in range(LAYERS):
        fake_quantize_kv(model, OF_LAYERS[kind], BF16)
        for other in range(LAYERS):
            if other != layer:
                del model.model.layers[other].self_attn.fake_quantized_kv
        again, logits = seen(model, ids, attention_mask=mask)
        alone.append(logits)
        assert torch.equal(again[: layer + 1], amax[: layer + 1])
    fake_quantize_kv(model, None, BF16)
    assert torch.equal(seen(model, ids, attention_mask=mask)[1], plain)
    different = [plain, rounded, *alone]
    assert all(not torch.equal(a, b) for n, a in enumerate(different) for b in different[:n]), (
        "each layer counts"
    )


@pytest.mark.parametrize("kind", OF_LAYERS)
def test_a_copy_reads_the_same(kind: str) -> None:
    model, ids = tiny(), tokens()
    fake_quantize_kv(model, OF_LAYERS[kind], BF16)
    wanted = model(ids).logits
    moved = copy.deepcopy(model)
    fake_quantize_kv(model, None, BF16)
    assert torch.equal(moved(ids).logits, wanted)
    assert not torch.equal(model(ids).logits, wanted)


@pytest.mark.parametrize("kind", OF_LAYERS)
def test_a_compiled_model_reads_the_same(kind: str) -> None:
    """Also one that ran before there were scales, as behind ``fp8_forward``."""
    attention_hooks.install()
    model, ids = tiny(), tokens()
    plain = model(ids).logits
    compiled = torch.compile(model, backend="eager")
    assert torch.allclose(compiled(ids).logits, plain, atol=1e-5)
    fake_quantize_kv(model, OF_LAYERS[kind], BF16)
    wanted = model(ids).logits
    assert not torch.allclose(wanted, plain, atol=1e-5)
    assert torch.allclose(compiled(ids).logits, wanted, atol=1e-5)
    fake_quantize_kv(model, [(4 * k, 4 * v) for k, v in SCALES], BF16)
    assert torch.allclose(compiled(ids).logits, model(ids).logits, atol=1e-5)
    assert not torch.allclose(model(ids).logits, wanted, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", OF_LAYERS)
def test_a_cache_of_another_model(kind: str) -> None:
    with pytest.raises(ValueError, match=r"layers 0 to 1, .* layers \[0, 1, 2\]"):
        fake_quantize_kv(tiny(), OF_LAYERS[kind][:2], BF16)
