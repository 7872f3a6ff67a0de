"""An attention module of SGLang as the hook on decode steps reads it: its parts are SGLang's own,
its projections and its attention are not.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import MRotaryEmbedding, RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import nn

from tests.qk_rope_oracle import Got, exact

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 64
BF16 = torch.bfloat16


class WrappedRotary(RotaryEmbedding):  # type: ignore[misc]
    def forward(self) -> None: ...


def rotary(kind: type = RotaryEmbedding, *more: Any) -> Any:
    """One of SGLang's as it is on a GPU; ``more`` is what its kind takes besides."""
    made = kind(HEAD_DIM, HEAD_DIM, 8, 10000, True, BF16, *more)
    made.use_fallback_kernel = False
    made.cos_sin_cache = made.cos_sin_cache.float()
    return made


def llama3_rotary() -> Any:
    """It fills the table otherwise."""
    return rotary(Llama3RotaryEmbedding, 8.0, 1.0, 4.0, 8)


def m_rotary() -> Any:
    return rotary(MRotaryEmbedding, [8, 12, 12])


class OtherNorm(RMSNorm):  # type: ignore[misc]
    """As Gemma's, which multiplies by 1 + weight."""


def norm(
    size: int = HEAD_DIM, eps: float = 1.0, dtype: torch.dtype = BF16, kind: type = RMSNorm
) -> Any:
    return kind(size, eps, weight_dtype=dtype)


class Radix(RadixAttention):  # type: ignore[misc]
    """Notes how it is called."""

    def __init__(self) -> None:
        super().__init__(HEADS, HEAD_DIM, 1.0, KV_HEADS, layer_id=5)
        self.calls: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> str:
        self.calls.append((args, kwargs))
        return "attended"


class Qwen3Attention(nn.Module):
    def __init__(self, got: Got, normed: bool = True) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = HEADS, KV_HEADS, HEAD_DIM
        self.rotary_emb: Any = rotary()
        self.attn: Any = Radix()
        self.attn.fp8rl_layer = SimpleNamespace(
            codes=lambda caches: replace(got.cache, k_SHD=caches[0], v_SHD=caches[1]),
        )
        self.rotary_emb.cos_sin_cache = got.cos_sin
        if normed:
            assert got.norms is not None
            self.q_norm, self.k_norm = norm(eps=got.norms.eps), norm(eps=got.norms.eps)
            self.q_norm.weight.data, self.k_norm.weight.data = got.norms.q_D, got.norms.k_D
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
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, out_cache_loc=got.slots)
    return module, got, batch, torch.zeros(TOKENS, 128, dtype=BF16)
