"""The hooks on attention: what is stored, and that attention is that of the scaled values."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_fp8rl.engine.attention import kv_attention
from sgl_fp8rl.ops.kv import kv_codes
from sgl_fp8rl.receiver.kv.scales import KVScales
from tests.sgl_fp8rl.kv import fakes
from tests.sgl_fp8rl.kv.fakes import BF16, DIM, GROUP, HEADS, Backend, batch, qkv

TOKENS = 24
# heads' K and V scales
SCALES = torch.tensor([[[0.7, 0.175], [0.3, 0.6]]])
ERROR = 0.015
"""Of out, relative. Healthy: 0.005 (q, out and the fake's output are rounded to BF16); a V scale
that is wrong by a quarter makes 0.2."""


@pytest.fixture
def scaled() -> tuple[KVScales, Any]:
    scales, (layer,) = fakes.scaled()
    scales.write(SCALES)
    return scales, layer


def prefill(
    backend: Backend, layer: Any, tokens: int = TOKENS, first: int = 0, seed: int = 0
) -> Any:
    q, k, v = qkv(tokens, seed)
    return q, kv_attention.folded_extend(
        Backend.forward, backend, q, k, v, layer, batch(tokens, first)
    )


def test_folded_attention_is_that_of_the_scaled_values(scaled: tuple[KVScales, Any]) -> None:
    """Of a prefill, and of a decode step that reads what it stored."""
    scales, layer = scaled
    backend = Backend()
    mine = scales.scales[0]

    def off(q: torch.Tensor, out: torch.Tensor, step: Any, scale_2H: torch.Tensor) -> float:
        wanted = fakes.reference(q, backend, step.slots, scale_2H, layer.scaling)
        return fakes.relative_error(out, wanted)

    q, out = prefill(backend, layer)
    assert off(q, out, batch(TOKENS), mine) < ERROR
    assert off(q, out, batch(TOKENS), mine * torch.tensor([1.0, 1.25]).view(2, 1)) > ERROR
    q, k, v = qkv(1, seed=1)
    one = batch(1, first=TOKENS)
    out = kv_attention.folded_decode(Backend.forward, backend, q, k, v, layer, one)
    assert off(q, out, one, mine) < ERROR


def test_codes_are_stored_at_their_slots_and_the_backend_stores_nothing(
    scaled: tuple[KVScales, Any],
) -> None:
    scales, layer = scaled
    backend = Backend()
    prefill(backend, layer)
    _, k, v = qkv(TOKENS)
    slots = batch(TOKENS).out_cache_loc
    for cache, x, scale in zip((backend.k, backend.v), (k, v), scales.scales[0], strict=True):
        wanted = kv_codes(x, scale).view(torch.uint8)
        assert torch.equal(cache.view(torch.uint8)[slots], wanted)
        assert bool((cache.float()[TOKENS + 1 :] == 7.0).all())
    assert backend.saved == [False]
    assert int(scales.statistics[0, 0]) == TOKENS


def test_a_ragged_kernel_is_handed_what_decode_will_read(scaled: tuple[KVScales, Any]) -> None:
    _, layer = scaled
    backend = Backend()
    backend.forward_metadata = SimpleNamespace(use_ragged=True)
    prefill(backend, layer)
    for handed, cache in zip(backend.handed, (backend.k, backend.v), strict=True):
        assert handed.dtype == BF16
        assert torch.equal(handed.float(), cache[1 : TOKENS + 1].float())
    backend.forward_metadata = SimpleNamespace(use_ragged=False)
    prefill(backend, layer)
    assert not torch.equal(backend.handed[0].float(), backend.k[1 : TOKENS + 1].float())


@pytest.mark.parametrize("given", [True, False], ids=["told not to", "without K"])
@pytest.mark.parametrize("name", ["folded_decode", "folded_extend"])
def test_nothing_is_stored_where_there_is_nothing_to_store(
    scaled: tuple[KVScales, Any], name: str, given: bool
) -> None:
    """As of layers that read another one's cache. The backend itself is not looked at."""
    scales, layer = scaled
    q, k, v = qkv(TOKENS)
    handed: list[Any] = []

    def original(backend: Any, q: torch.Tensor, k: Any, v: Any, *_: Any, **more: Any) -> Any:
        handed.append((k, v, more))
        return torch.ones(TOKENS, q.shape[1], dtype=BF16)

    pair = (k, v) if given else (None, None)
    getattr(kv_attention, name)(original, None, q, *pair, layer, None, save_kv_cache=not given)
    assert handed == [(*pair, {"save_kv_cache": False})]
    assert int(scales.statistics[0, 0]) == 0


def test_changed_scales_are_read_from_the_same_buffers() -> None:
    """And unit scales change no bit of q and out."""
    scales, (layer,) = fakes.scaled(scheme="unit")
    backend = Backend()
    q, out = prefill(backend, layer)
    assert torch.equal(out, backend.forward(q.contiguous(), None, None, layer, batch(TOKENS)))
    unit = out.clone()
    scales.write(torch.full((1, 2, HEADS), 2.0**-9))  # everything is clipped
    assert not torch.equal(prefill(backend, layer)[1], unit)
    assert int(scales.statistics[0, 1]) > 0
    scales.write(torch.ones(1, 2, HEADS))
    assert torch.equal(prefill(backend, layer)[1], unit)


@pytest.mark.parametrize("name", ["folded_decode", "folded_extend", "fa3_extend", "paged_decode"])
def test_layers_without_scales_take_the_original_way(name: str) -> None:
    layer, calls = fakes.layer(), []

    def original(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return "out"

    hook = getattr(kv_attention, name)
    assert hook(original, "backend", "q", "k", "v", layer, "batch", False, sinks=1) == "out"
    assert calls == [(("backend", "q", "k", "v", layer, "batch", False), {"sinks": 1})]


# -- our decode kernel, by its reference


def decode_step(layer: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, Backend]:
    """Prefill, then one decoded token: q, out, backend."""
    backend: Any = Backend()
    prefill(backend, layer)
    q, k, v = qkv(1, seed=1)
    pages = fakes.SLOTS // fakes.PAGE
    # slot 0 is SGLang's dummy; here it is the sequence's first token
    backend.forward_metadata.cache_seqlens_int32 = torch.tensor([TOKENS + 2], dtype=torch.int32)
    backend._get_layer_page_table = lambda *_: torch.arange(pages, dtype=torch.int32).unsqueeze(0)
    one = batch(1, first=TOKENS)
    out = kv_attention.paged_decode(Backend.forward, backend, q, k, v, layer, one, **kwargs)
    return q, out, backend


def test_paged_attention_is_that_of_the_scaled_values(scaled: tuple[KVScales, Any]) -> None:
    scales, layer = scaled
    slots = torch.arange(TOKENS + 2)
    q, out, backend = decode_step(layer)
    wanted = fakes.reference(q, backend, slots, scales.scales[0], DIM**-0.5)
    assert fakes.relative_error(out, wanted) < ERROR
    for row in (0, 1):  # controls: a wrong K or V scale
        wrong = scales.scales[0].clone()
        wrong[row] *= 1.25
        other = fakes.reference(q, backend, slots, wrong, DIM**-0.5)
        assert fakes.relative_error(out, other) > ERROR


def test_decode_sees_the_window_and_the_cap_of_logits() -> None:
    _, (layer,) = fakes.scaled()
    every, scales = torch.arange(TOKENS + 2), layer.fp8rl_layer.scales.scales[0]
    q, uncapped, backend = decode_step(layer)
    # all scores are the same: the mean of V
    mean = fakes.reference(torch.zeros_like(q), backend, every, scales, DIM**-0.5)
    layer.logit_cap = 1e-6
    _, capped, _ = decode_step(layer)
    assert fakes.relative_error(capped, mean) < ERROR < fakes.relative_error(uncapped, mean)
    layer.logit_cap, layer.sliding_window_size = 0.0, 7
    q, out, backend = decode_step(layer)
    for seen, is_seen in ((every[-8:], True), (every, False)):
        wanted = fakes.reference(q, backend, seen, scales, DIM**-0.5)
        assert (fakes.relative_error(out, wanted) < ERROR) is is_seen


def test_decode_has_the_sinks_that_sglang_passes() -> None:
    _, (layer,) = fakes.scaled()
    bare = decode_step(layer)[1].view(-1, DIM)
    sinks = torch.full((HEADS * GROUP,), -1e4)
    sinks[1] = 1e4  # takes all of the weight
    out = decode_step(layer, sinks=sinks)[1].view(-1, DIM)
    kept = torch.arange(HEADS * GROUP) != 1
    assert torch.equal(out[kept], bare[kept])
    assert not bool(out[1].any()) and bool(bare[1].any())
