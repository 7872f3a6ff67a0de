"""An attention module of SGLang with its parts, as far as the hook on decode steps reads them."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.qk_rope_oracle import Got, exact

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 64
BF16 = torch.bfloat16


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_size = self.rotary_dim = HEAD_DIM
        self.is_neox_style, self.use_fallback_kernel = True, False
        self.cos_sin_cache = torch.zeros(8, HEAD_DIM)

    def forward(self) -> None: ...

    def forward_cuda(self) -> None: ...


class Llama3Rotary(Rotary):
    """Fills the table otherwise."""


class MRotary(Rotary):
    def forward_cuda(self) -> None: ...


class WrappedRotary(Rotary):
    def forward(self) -> None: ...


class Norm(nn.Module):
    def __init__(self, weight_D: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_D)
        self.variance_epsilon = eps
        self.cast_x_before_out_mul, self.variance_size_override = False, None


class GemmaNorm(Norm):
    """Multiplies by 1 + weight."""


class Radix(nn.Module):
    """What is read of a ``RadixAttention``, and how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_id = 5
        self.tp_q_head_num, self.tp_k_head_num, self.tp_v_head_num = HEADS, KV_HEADS, KV_HEADS
        self.head_dim = self.qk_head_dim = self.v_head_dim = HEAD_DIM
        self.is_cross_attention = False
        self.fp8rl_layer: Any = None
        self.calls: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> str:
        self.calls.append((args, kwargs))
        return "attended"


class Qwen3Attention(nn.Module):
    def __init__(self, got: Got, normed: bool = True) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = HEADS, KV_HEADS, HEAD_DIM
        self.rotary_emb: Any = Rotary()
        self.attn: Any = Radix()
        self.attn.fp8rl_layer = SimpleNamespace(
            k_scale_h=got.cache.k_scale_H,
            v_scale_h=got.cache.v_scale_H,
            q_factor_h=got.cache.q_factor_H,
            statistics=got.cache.stats_C,
        )
        self.rotary_emb.cos_sin_cache = got.cos_sin
        if normed:
            assert got.norms is not None
            self.q_norm: Any = Norm(got.norms.q_D, got.norms.eps)
            self.k_norm: Any = Norm(got.norms.k_D, got.norms.eps)
        self.seen: list[Any] = []

    def qkv_proj(self, hidden_states: Any) -> tuple[Any, None]:
        self.seen.append(hidden_states)
        return self.qkv, None

    def o_proj(self, out: Any) -> tuple[Any, None]:
        return f"projected {out}", None


Qwen3Attention.__module__ = "sglang.srt.models.qwen3"


class MellumAttention(Qwen3Attention):
    """A subclass, with a way of its own."""


def made(normed: bool = True) -> tuple[Qwen3Attention, Got, Any, torch.Tensor]:
    """A module, what its kernel takes, a batch and hidden states."""
    got = exact((TOKENS, HEADS, KV_HEADS, HEAD_DIM), normed=normed).on("cpu")
    module = Qwen3Attention(got, normed)
    module.qkv = got.qkv
    mode = SimpleNamespace(is_decode=lambda: True)
    batch = SimpleNamespace(forward_mode=mode, out_cache_loc=got.slots)
    return module, got, batch, torch.zeros(TOKENS, 128, dtype=BF16)
