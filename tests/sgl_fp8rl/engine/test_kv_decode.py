"""The hook on attention modules: for which modules and steps it is, and what it does for them."""

import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import nn

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.attention import kv_decode
from tests.qk_rope_oracle import assert_equal, exact
from tests.sgl_fp8rl.conftest import Publish
from tests.sgl_fp8rl.engine.decode_fakes import (
    BF16,
    MellumAttention,
    OtherNorm,
    Qwen3Attention,
    WrappedRotary,
    llama3_rotary,
    m_rotary,
    made,
    norm,
    rotary,
)
from tests.sgl_fp8rl.engine.decode_fakes import HEAD_DIM as D
from tests.sgl_fp8rl.engine.decode_fakes import HEADS as N
from tests.sgl_fp8rl.engine.decode_fakes import KV_HEADS as H
from tests.sgl_fp8rl.engine.decode_fakes import TOKENS as T

pytestmark = pytest.mark.usefixtures("publish")


def never(*args: Any) -> str:
    raise AssertionError("the original was called")


def test_modules_that_fit_are_marked_and_their_class_is_hooked() -> None:
    model = nn.ModuleList([made()[0], nn.Linear(2, 2), made(normed=False)[0]])
    assert kv_decode.mark(model) == {"sglang.srt.models.qwen3.Qwen3Attention.forward"}
    marked = [bool(getattr(module, "fp8rl_is_fused", False)) for module in model]
    assert marked == [True, False, True]


def test_subclasses_and_other_classes_are_left_alone() -> None:
    got = made()[1]
    other = type("Qwen3Attention", (Qwen3Attention,), {"__module__": "elsewhere"})
    model = nn.ModuleList([MellumAttention(got), other(got)])
    assert kv_decode.mark(model) == set()
    assert not any(hasattr(module, "fp8rl_is_fused") for module in model)


def widen(module: Any, size: int) -> None:
    """Heads of another size, everywhere."""
    layer, rotary = module.attn, module.rotary_emb
    module.head_dim = layer.head_dim = layer.qk_head_dim = layer.v_head_dim = size
    rotary.head_size = rotary.rotary_dim = size
    module.q_norm, module.k_norm = norm(size), norm(size)


def test_other_tables_and_other_heads_fit() -> None:
    module = made()[0]
    module.rotary_emb = llama3_rotary()  # filled otherwise
    assert kv_decode.is_fusable(module)
    widen(module, 128)
    assert kv_decode.is_fusable(module)


UNFIT: dict[str, Callable[[Any], object]] = {
    "no KV scales": lambda m: setattr(m.attn, "fp8rl_layer", None),
    "SGLang's own fused kernel": lambda m: setattr(m, "use_fused_qk_norm_rope", True),
    "V's head dim": lambda m: setattr(m.attn, "v_head_dim", D // 2),
    "head dim": lambda m: setattr(m, "head_dim", D // 2),
    "heads of 96": lambda m: widen(m, 96),
    "query heads": lambda m: setattr(m.attn, "tp_q_head_num", N + 2),
    "KV heads": lambda m: setattr(m.attn, "tp_v_head_num", H + 1),
    "cross attention": lambda m: setattr(m.attn, "is_cross_attention", True),
    "no rotary embedding": lambda m: setattr(m, "rotary_emb", nn.Identity()),
    "M-RoPE": lambda m: setattr(m, "rotary_emb", m_rotary()),
    "forward of its own": lambda m: setattr(m, "rotary_emb", rotary(WrappedRotary)),
    "interleaved": lambda m: setattr(m.rotary_emb, "is_neox_style", False),
    "partial": lambda m: setattr(m.rotary_emb, "rotary_dim", D // 2),
    "fallback kernel": lambda m: setattr(m.rotary_emb, "use_fallback_kernel", True),
    "BF16 table": lambda m: setattr(m.rotary_emb, "cos_sin_cache", torch.zeros(8, D, dtype=BF16)),
    "other norm": lambda m: setattr(m, "k_norm", norm(kind=OtherNorm)),
    "two eps": lambda m: setattr(m.k_norm, "variance_epsilon", 0.5),
    "FP32 weight": lambda m: setattr(m, "q_norm", norm(dtype=torch.float32)),
    "norm over all heads": lambda m: setattr(m, "q_norm", norm(N * D)),
    "HF's rounding": lambda m: setattr(m.q_norm, "cast_x_before_out_mul", True),
    "part of a head": lambda m: setattr(m.k_norm, "variance_size_override", D // 2),
}


@pytest.mark.parametrize("name", UNFIT)
def test_modules_that_do_not_fit_are_not_marked(name: str) -> None:
    module = made()[0]
    assert kv_decode.is_fusable(module)
    UNFIT[name](module)
    assert not kv_decode.is_fusable(module)
    assert kv_decode.mark(module) == set()


@pytest.mark.parametrize(
    ("name", "value"), [("rl_on_policy_target", "fsdp"), ("enable_deterministic_inference", True)]
)
def test_deterministic_engines_keep_their_kernels(publish: Publish, name: str, value: Any) -> None:
    module = made()[0]
    publish(**{name: value})
    assert not kv_decode.is_fusable(module)


STEPS: dict[str, Callable[[Any, Any, Any, Any], tuple[Any, Any, Any, Any]]] = {
    "module not marked": lambda m, p, h, b: (MellumAttention(made()[1]), p, h, b),
    "prefill": lambda m, p, h, b: (m, p, h, SimpleNamespace(forward_mode=ForwardMode.EXTEND)),
    "quantized activations": lambda m, p, h, b: (m, p, (h, h), b),
    "FP16": lambda m, p, h, b: (m, p, h.half(), b),
    "no tokens": lambda m, p, h, b: (m, p[:0], h[:0], b),
    "M-RoPE's positions": lambda m, p, h, b: (m, p.expand(3, -1), h, b),
    "int32 positions": lambda m, p, h, b: (m, p.int(), h, b),
}


@pytest.mark.parametrize("name", STEPS)
def test_other_steps_take_the_original_way(name: str) -> None:
    module, got, batch, hidden = made()
    kv_decode.mark(module)
    args = STEPS[name](module, got.positions, hidden, batch)
    calls: list[Any] = []

    def original(*given: Any) -> str:
        calls.append(given)
        return "original"

    assert kv_decode.fused_forward(original, *args) == "original"
    assert len(calls) == 1 and all(a is b for a, b in zip(calls[0], args, strict=True))
    assert not module.seen and not module.attn.calls


def test_what_is_asked_besides_takes_the_original_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an argument that a newer SGLang has, and a compiled model."""
    module, got, batch, hidden = made()
    kv_decode.mark(module)
    step = module, got.positions, hidden, batch

    def original(*args: Any, **named: Any) -> Any:
        return args[4:], named

    for given, named in (((1,), {}), ((), {"new": 1})):
        out: Any = kv_decode.fused_forward(original, *step, *given, **named)
        assert out == (given, named)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert kv_decode.fused_forward(original, *step) == ((), {})  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("normed", [True, False], ids=["normed", ""])
def test_a_decode_step_does_what_the_oracle_does(
    normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, got, batch, hidden = made(normed)
    kv_decode.mark(module)
    layers: list[int] = []

    def get_kv_buffer(layer_id: int) -> Any:
        layers.append(layer_id)
        return got.k_cache.box, got.v_cache.box

    pool = SimpleNamespace(get_kv_buffer=get_kv_buffer)
    monkeypatch.setitem(compat.__dict__, "get_token_to_kv_pool", lambda: pool)
    # as SGLang's decoder layers call it
    out: Any = kv_decode.fused_forward(
        never, module, positions=got.positions, hidden_states=hidden, forward_batch=batch
    )
    assert out == "projected attended" and layers == [5]
    assert len(module.seen) == 1 and module.seen[0] is hidden
    ((args, kwargs),) = module.attn.calls
    assert args[1:] == (None, None, batch)
    assert kwargs == {"save_kv_cache": False, "fp8rl_q_is_ready": True}
    got.q = args[0]
    assert_equal(got.left(), exact((T, N, H, D), normed=normed).want())


@pytest.mark.parametrize("target", compat.DECODED_ATTENTION)
def test_sglangs_modules_have_what_the_hook_stands_on(target: str) -> None:
    module, name, method = target.rsplit(".", 2)
    attention = getattr(importlib.import_module(module), name)
    arguments = ["self", "positions", "hidden_states", "forward_batch"]
    assert list(inspect.signature(getattr(attention, method)).parameters) == arguments
    source = inspect.getsource(attention)
    assert all(f"self.{part}" in source for part in ("qkv_proj", "rotary_emb", "attn(", "o_proj("))
    assert ("q_norm" in source) is ("Qwen3" in name)


def test_sglang_hands_our_keyword_to_the_decode_backend() -> None:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    calls: list[Any] = []

    class Decode(AttentionBackend):  # type: ignore[misc]
        def forward_decode(self, *args: Any, **kwargs: Any) -> str:
            calls.append((args, kwargs))
            return "attended"

    hybrid = HybridAttnBackend.__new__(HybridAttnBackend)
    hybrid.decode_backend = Decode()
    layer = RadixAttention(N, D, 1.0, H, layer_id=0)
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE)
    q = torch.zeros(T, N * D)
    for backend in (hybrid, hybrid.decode_backend):
        with forward_context(ForwardContext(attn_backend=backend)):
            out = layer(q, None, None, batch, save_kv_cache=False, fp8rl_q_is_ready=True)
        assert out == "attended"
        ((args, kwargs),) = calls
        calls.clear()
        assert args[0] is q and args[1:] == (None, None, layer, batch)
        assert kwargs == {"save_kv_cache": False, "fp8rl_q_is_ready": True}
