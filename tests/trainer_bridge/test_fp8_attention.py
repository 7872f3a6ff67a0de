"""Attention to what an FP8 KV cache stores, against float64 and the oracle's E4M3."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests import oracle
from tests.trainer_bridge.test_attention_hooks import ATTENTIONS, LAYERS, padded, seen, tiny, tokens
from trainer_bridge import attention_hooks
from trainer_bridge.fp8_attention import StoredKV, read_as_stored

Tensor = torch.Tensor
NEAR = 4e-6
"""Of attention in FP32 against float64, as a part of the largest. Healthy: 4e-7; K and V that are
not rounded: 0.03 and more."""
GRADIENTS_NEAR = 4e-6
"""The same of gradients. Healthy: 5e-7; through K and V that are not rounded: 0.02 and more."""
SCALES = [(0.11, 0.013), (0.07, 0.0031), (1.3, 0.02)]
"""No powers of two; K and V of some elements are clipped."""


def uninstall() -> None:
    """Leave transformers as it was."""
    if attention_hooks.keep_installed.cache_info().currsize:
        attention_hooks.keep_installed.cache_clear()
        attention_hooks.uninstall()


@pytest.fixture(autouse=True)
def leave_transformers_alone() -> Iterator[None]:
    yield
    uninstall()


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
    found, _ = StoredKV(k_scale, v_scale).attend(
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


def test_clipped_elements_are_the_largest_code() -> None:
    key = torch.full((1, 1, 1, 16), 1e4)
    assert float(stored(key, 1.0).max()) == 448.0
    _, given = _seen_by_attention(StoredKV(1.0, 1.0), key)
    assert float(given.max()) == 448.0


def _seen_by_attention(kv: StoredKV, key: Tensor) -> tuple[Tensor, Tensor]:
    """The output of attention, and the key that it was given."""
    given: list[Tensor] = []

    def look(module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        given.append(key)
        return attention(module, query, key, value, **options)

    output, _ = kv.attend(look, torch.nn.Module(), key, key, key)
    return output, given[0]


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_every_layer_of_a_model(kind: str) -> None:
    """Each under its own scales, and as it was once they are taken away; a calibrator sees K and V
    before they are rounded."""
    model, ids, mask = tiny(attention=kind), tokens(), padded(left=True)
    amax, plain = seen(model, ids, attention_mask=mask)
    read_as_stored(model, SCALES)
    _, rounded = seen(model, ids, attention_mask=mask)
    alone = []
    for layer in range(LAYERS):
        read_as_stored(model, None)
        read_as_stored(model, SCALES)
        for other in range(LAYERS):
            if other != layer:
                del model.model.layers[other].self_attn.stored_kv
        again, logits = seen(model, ids, attention_mask=mask)
        alone.append(logits)
        assert torch.equal(again[: layer + 1], amax[: layer + 1])
    read_as_stored(model, None)
    assert torch.equal(seen(model, ids, attention_mask=mask)[1], plain)
    different = [plain, rounded, *alone]
    assert all(not torch.equal(a, b) for n, a in enumerate(different) for b in different[:n]), (
        "each layer's scales count"
    )


def test_a_copy_reads_the_same() -> None:
    model, ids = tiny(), tokens()
    read_as_stored(model, SCALES)
    wanted = model(ids).logits
    moved = copy.deepcopy(model)
    read_as_stored(model, None)
    assert torch.equal(moved(ids).logits, wanted)
    assert not torch.equal(model(ids).logits, wanted)


def test_a_layer_that_comes_to_another_process_has_its_hook() -> None:
    packed = pickle.dumps(StoredKV(*SCALES[0]))
    uninstall()
    pickle.loads(packed)
    assert attention_hooks.keep_installed.cache_info().currsize


def test_a_compiled_model_reads_the_same() -> None:
    model, ids = tiny(), tokens()
    read_as_stored(model, SCALES)
    wanted = model(ids).logits
    compiled = torch.compile(model, backend="eager")
    assert torch.allclose(compiled(ids).logits, wanted, atol=1e-5)
    read_as_stored(model, [(4 * k, 4 * v) for k, v in SCALES])
    assert torch.allclose(compiled(ids).logits, model(ids).logits, atol=1e-5)
    assert not torch.allclose(model(ids).logits, wanted, atol=1e-5)
    torch._dynamo.reset()


def test_scales_of_another_model() -> None:
    with pytest.raises(ValueError, match="2 layers, and the model has attention in 3"):
        read_as_stored(tiny(), SCALES[:2])
