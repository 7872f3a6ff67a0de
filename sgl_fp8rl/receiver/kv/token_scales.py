"""An INT8 KV cache: a scale for each token and KV head, K rotated (``ops/kv_int8.py``).

Nothing is calibrated, and no update brings scales: a token's codes depend on that token alone.
"""

import torch

from sgl_fp8rl.ops.kv import Cache
from sgl_fp8rl.ops.kv_int8 import rotate_queries
from sgl_fp8rl.protocol.kv_schema import INT8
from sgl_fp8rl.receiver.kv.quantized import Caches, Heads, LayerKV, QuantizedKV, on_host

SCALE_BYTES = 4
"""Of a token and KV head, in each layer: two BF16, of K and of V."""


class TokenScales(QuantizedKV):
    """The scales beside the pool of one rank, and the statistics of what was stored."""

    format = INT8
    value_dtype = torch.float16

    def __init__(self, layers: int, heads: Heads, device: torch.device | str) -> None:
        super().__init__(layers, heads, device)
        self.by_token: torch.Tensor = torch.empty(0, dtype=torch.int32)
        """``[layers, H, S]``, as ``pack_token_scales``; not a buffer, since the memory saver drops
        the KV cache and keeps buffers."""

    def allocate(self, slots: int) -> None:
        """Take memory for the scales of all slots of the pool, where its codes are."""
        shape = self.layers, self.heads.count, slots
        self.by_token = torch.zeros(shape, dtype=torch.int32, device=self.statistics.device)

    def layer(self, index: int) -> "TokenScaledLayer":
        return TokenScaledLayer(self, index)

    def after_update(self, incoming_L2H: torch.Tensor | None) -> None:
        assert incoming_L2H is None
        self.statistics.zero_()

    def read(self) -> tuple[None, torch.Tensor]:
        return None, on_host(self.statistics)


class TokenScaledLayer(LayerKV):
    """One layer's part of ``TokenScales``."""

    scales: TokenScales

    @property
    def by_token_HS(self) -> torch.Tensor:
        return self.scales.by_token[self.layer_index]

    def codes(self, caches: Caches) -> Cache:
        k_SHD, v_SHD = (cache.view(torch.int8) for cache in caches)
        return Cache(k_SHD, v_SHD, token_scales_HS=self.by_token_HS, stats_C=self.statistics)

    def query(self, q_NQD: torch.Tensor) -> torch.Tensor:
        if not q_NQD.is_cuda:
            return rotate_queries(q_NQD)
        from sgl_fp8rl.ops.kv_int8_triton import rotate_queries as on_gpu

        return on_gpu(q_NQD)
