"""Attention to what an FP8 KV cache stores, against float64 and the oracle's E4M3."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests import oracle
from tests.trainer_bridge.test_attention_hooks import ATTENTIONS, LAYERS, padded, seen, tiny, tokens
from trainer_bridge import attention_hooks
from trainer_bridge.fp8_attention import FakeQuantizedKV, fake_quantize_kv

Tensor = torch.Tensor
BF16 = torch.bfloat16
NEAR = 4e-6
"""Of attention in FP32 against float64, as a part of the largest. Healthy: 4e-7; K and V that are
not rounded: 0.03 and more."""
GRADIENTS_NEAR = 4e-6
"""The same of gradients. Healthy: 5e-7; through K and V that are not rounded: 0.02 and more."""
SCALES = [(0.11, 0.013), (0.07, 0.0031), (1.3, 0.02)]
"""No powers of two; K and V of some elements are clipped."""


def stored(x: Tensor, scale: float) -> Tensor:
    """What the cache holds, in float64."""
    scaled = (x.detach().float() / np.float32(scale)).clamp(-448, 448).numpy()
    return torch.from_numpy(oracle.decode(oracle.encode(scaled))) * float(np.float32(scale))


def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """As transformers' functions are called."""
    found = scaled_dot_product_attention(
        query, key, value, scale=options["scaling"], enable_gqa=True
    )
    return found, None


def drawn(seed: int, heads: int, spread: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn((2, heads, 9, 16), generator=generator)


def far(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).detach().abs().max() / wanted.detach().abs().max())


@pytest.mark.parametrize("scaling", [None, 0.25])
def test_attention_and_its_gradients(scaling: float | None) -> None:
    """``scaling`` is 1 / sqrt(16), given or not; a rounded element's gradient is that of its
    value."""
    k_scale, v_scale = SCALES[0]
    inputs = [drawn(0, 4, 1.0), drawn(1, 2, 12.0), drawn(2, 2, 1.5)]
    query, key, value = (x.requires_grad_() for x in inputs)
    found, _ = FakeQuantizedKV(k_scale, v_scale, torch.float32).attend(
        attention, torch.nn.Module(), query, key, value, scaling=scaling
    )
    rounded = [
        query.detach().double().requires_grad_(),
        stored(key, k_scale).requires_grad_(),
        stored(value, v_scale).requires_grad_(),
    ]
    wanted = by_hand(*rounded)
    assert far(found.double(), wanted) < NEAR
    control = by_hand(*(x.detach().double() for x in inputs))
    assert far(control, wanted) > 100 * NEAR
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
        given = _key_seen_by_attention(FakeQuantizedKV(scale, scale, BF16), key)
    finally:
        torch.set_default_dtype(before)
    assert given.dtype == torch.float32
    wanted = stored(key.to(BF16), scale) / float(np.float32(scale))
    assert torch.allclose(given.double(), wanted, rtol=1e-12)
    control = stored(key, scale) / float(np.float32(scale))
    assert not torch.allclose(control, wanted, rtol=1e-12)


def test_fp16_is_refused() -> None:
    with pytest.raises(ValueError, match="BF16 or FP32"):
        _key_seen_by_attention(FakeQuantizedKV(1.0, 1.0, torch.float16), drawn(0, 2, 1.0).half())


def test_clipped_elements_are_the_largest_code() -> None:
    key = torch.full((1, 1, 1, 16), 1e4)
    assert float(stored(key, 1.0).max()) == 448.0
    given = _key_seen_by_attention(FakeQuantizedKV(1.0, 1.0, BF16), key)
    assert float(given.max()) == 448.0


def _key_seen_by_attention(kv: FakeQuantizedKV, key: Tensor) -> Tensor:
    given: list[Tensor] = []

    def look(module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        given.append(key)
        return attention(module, query, key, value, **options)

    kv.attend(look, torch.nn.Module(), key, key, key)
    return given[0]


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_every_layer_of_a_model(kind: str) -> None:
    """Each under its own scales, and as it was once they are taken away; a calibrator sees K and V
    before they are rounded."""
    model, ids, mask = tiny(attention=kind), tokens(), padded(left=True)
    amax, plain = seen(model, ids, attention_mask=mask)
    fake_quantize_kv(model, SCALES, BF16)
    _, rounded = seen(model, ids, attention_mask=mask)
    alone = []
    for layer in range(LAYERS):
        fake_quantize_kv(model, SCALES, BF16)
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
        "each layer's scales count"
    )


def test_a_copy_reads_the_same() -> None:
    model, ids = tiny(), tokens()
    fake_quantize_kv(model, SCALES, BF16)
    wanted = model(ids).logits
    moved = copy.deepcopy(model)
    fake_quantize_kv(model, None, BF16)
    assert torch.equal(moved(ids).logits, wanted)
    assert not torch.equal(model(ids).logits, wanted)


def test_a_compiled_model_reads_the_same() -> None:
    """Also one that ran before there were scales, as behind ``fp8_forward``."""
    attention_hooks.install()
    model, ids = tiny(), tokens()
    plain = model(ids).logits
    compiled = torch.compile(model, backend="eager")
    assert torch.allclose(compiled(ids).logits, plain, atol=1e-5)
    fake_quantize_kv(model, SCALES, BF16)
    wanted = model(ids).logits
    assert not torch.allclose(wanted, plain, atol=1e-5)
    assert torch.allclose(compiled(ids).logits, wanted, atol=1e-5)
    fake_quantize_kv(model, [(4 * k, 4 * v) for k, v in SCALES], BF16)
    assert torch.allclose(compiled(ids).logits, model(ids).logits, atol=1e-5)
    assert not torch.allclose(model(ids).logits, wanted, atol=1e-5)
    torch._dynamo.reset()


def test_scales_of_another_model() -> None:
    with pytest.raises(ValueError, match=r"layers 0 to 1, .* layers \[0, 1, 2\]"):
        fake_quantize_kv(tiny(), SCALES[:2], BF16)
