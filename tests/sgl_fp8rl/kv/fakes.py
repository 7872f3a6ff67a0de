"""SGLang's attention layer, with a pool and a backend in the shapes of its own.

``reference`` is float64 attention that shares nothing with what is tested: it decodes the pool's
bytes by ``tests.oracle`` and multiplies each head's scale in.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from torch import nn

from sgl_fp8rl.engine.startup.kv_setup import attach
from sgl_fp8rl.receiver.kv.quantized import Heads
from sgl_fp8rl.receiver.kv.scales import KVScales
from tests import oracle

HEADS, GROUP, DIM, SLOTS, PAGE = 2, 2, 64, 64, 16
FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16


def layer(layer_id: int = 0, scaling: float = DIM**-0.5) -> nn.Module:
    """SGLang's own attention layer, which holds no tensor."""
    return RadixAttention(HEADS * GROUP, DIM, scaling, HEADS, layer_id)  # type: ignore[no-any-return]


def scaled(
    layers: int = 1,
    scheme: str = "engine",
    heads: Heads | None = None,
    scaling: float = DIM**-0.5,
) -> tuple[KVScales, list[Any]]:
    """Scales of a model of such layers, and the layers."""
    made: list[Any] = [layer(i, scaling) for i in range(layers)]
    scales = KVScales(layers, heads or Heads(HEADS, 0, HEADS), scheme, torch.device("cpu"))
    attach(scales, nn.Module(), made)
    return scales, made


class Backend:
    """Attends to the codes of its pool as BF16, one sequence, as torch_native does."""

    page_size = PAGE

    def __init__(self) -> None:
        self.k = torch.full((SLOTS, HEADS, DIM), 7.0).to(FP8)
        self.v = self.k.clone()
        self.token_to_kv_pool = SimpleNamespace(get_kv_buffer=lambda _: (self.k, self.v))
        self.forward_metadata = SimpleNamespace(use_ragged=False)
        self.saved: list[bool] = []
        self.handed: tuple[Any, Any] = (None, None)

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        self.saved.append(save_kv_cache)
        self.handed = (k, v)
        keys, values = (
            c[batch.slots].to(BF16).repeat_interleave(GROUP, 1) for c in (self.k, self.v)
        )
        q_THD = q.view(-1, HEADS * GROUP, DIM)
        out = nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1).float() for x in (q_THD, keys, values)), scale=layer.scaling
        )
        return out.transpose(0, 1).to(BF16).reshape(len(q), -1)


def batch(tokens: int, first: int = 0, seen: int | None = None) -> Any:
    """Tokens that are stored from slot ``first`` on, and attend to the first ``seen`` slots."""
    slots = torch.arange(1, 1 + (first + tokens if seen is None else seen))
    return SimpleNamespace(out_cache_loc=torch.arange(first + 1, first + 1 + tokens), slots=slots)


def qkv(tokens: int, seed: int = 0, size: float = 1.0) -> tuple[torch.Tensor, ...]:
    """q, k, v as slices of a fused projection, with heads of unlike sizes."""
    generator = torch.Generator().manual_seed(seed)
    width = (HEADS * GROUP + 2 * HEADS) * DIM
    fused = torch.randn(tokens, width, generator=generator)
    fused *= torch.exp2(torch.arange(width // DIM) % 3 * 1.0).repeat_interleave(DIM)
    fused = (fused * size).to(BF16)
    q, k, v = fused.split([HEADS * GROUP * DIM, HEADS * DIM, HEADS * DIM], -1)
    return q, k.unflatten(1, (HEADS, DIM)), v.unflatten(1, (HEADS, DIM))


def reference(
    q: torch.Tensor, backend: Backend, slots: torch.Tensor, scale_2H: torch.Tensor, scaling: float
) -> np.ndarray[Any, Any]:
    """Float64: softmax(scaling * k_scale * q . c_k) @ c_v * v_scale, [tokens, q heads, dim]."""
    decoded = [
        oracle.decode(cache.view(torch.uint8).numpy())[slots.numpy()].astype(np.float64)
        for cache in (backend.k, backend.v)
    ]
    scales = scale_2H.double().numpy()
    q_THD = q.double().view(-1, HEADS * GROUP, DIM).numpy()
    out = np.empty_like(q_THD)
    for head in range(HEADS * GROUP):
        h = head // GROUP
        logits = scaling * scales[0, h] * (q_THD[:, head] @ decoded[0][:, h].T)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[:, head] = weights @ decoded[1][:, h] * scales[1, h]
    return out


def relative_error(out: torch.Tensor, wanted: np.ndarray[Any, Any]) -> float:
    """Root mean square of the error by that of what was wanted, head by head; the largest."""
    got = out.double().view(wanted.shape).numpy()
    by_head = np.sqrt(((got - wanted) ** 2).mean((0, 2)) / (wanted**2).mean((0, 2)))
    return float(by_head.max())
