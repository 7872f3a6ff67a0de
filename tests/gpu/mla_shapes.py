"""Decoders with DeepSeek's MLA: its heads, and fewer, narrower layers and experts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.gpu.policies import Shape

LATENT, NOPE, ROPE, VALUES = 512, 128, 64, 128
"""Sizes of a latent, and of a head: keys without RoPE and with it, values."""
GROUPS = 4


@dataclass(frozen=True)
class MlaShape(Shape):
    """A dense layer, then layers of experts; with ``q_rank`` DeepSeek-V3's, else V2-Lite's."""

    q_rank: int = 0
    expert: int = 0
    """Channels of an expert."""
    shared: int = 1
    """Shared experts."""

    def config(self) -> dict[str, Any]:
        kind = "3" if self.q_rank else "2"
        return {
            **self.common(f"DeepseekV{kind}ForCausalLM", f"deepseek_v{kind}"),
            "q_lora_rank": self.q_rank or None,
            "kv_lora_rank": LATENT,
            "qk_nope_head_dim": NOPE,
            "qk_rope_head_dim": ROPE,
            "v_head_dim": VALUES,
            "n_routed_experts": self.experts,
            "n_shared_experts": self.shared,
            "num_experts_per_tok": 8 if self.q_rank else 6,
            "moe_intermediate_size": self.expert,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_group": GROUPS if self.q_rank else 1,
            "topk_group": GROUPS // 2 if self.q_rank else 1,
            "topk_method": "noaux_tc" if self.q_rank else "greedy",
            "scoring_func": "sigmoid" if self.q_rank else "softmax",
            "norm_topk_prob": bool(self.q_rank),
            "routed_scaling_factor": 2.5 if self.q_rank else 1.0,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 2048,
            },
        }

    def _layer(self, layer: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        attention, queries = f"{layer}.self_attn", self.heads * (NOPE + ROPE)
        if self.q_rank:
            yield f"{attention}.q_a_proj.weight", (self.q_rank, self.hidden)
            yield f"{attention}.q_a_layernorm.weight", (self.q_rank,)
            yield f"{attention}.q_b_proj.weight", (queries, self.q_rank)
        else:
            yield f"{attention}.q_proj.weight", (queries, self.hidden)
        yield f"{attention}.kv_a_proj_with_mqa.weight", (LATENT + ROPE, self.hidden)
        yield f"{attention}.kv_a_layernorm.weight", (LATENT,)
        yield f"{attention}.kv_b_proj.weight", (self.heads * (NOPE + VALUES), LATENT)
        yield f"{attention}.o_proj.weight", (self.hidden, self.heads * VALUES)
        mlp, is_dense = f"{layer}.mlp", layer.endswith(".0")
        if not is_dense:
            yield f"{mlp}.gate.weight", (self.experts, self.hidden)
            if self.q_rank:
                yield f"{mlp}.gate.e_score_correction_bias", (self.experts,)
            yield from self._mlp(f"{mlp}.shared_experts", self.shared * self.expert)
        for each in self.mlps(layer):
            yield from self._mlp(each, self.intermediate if is_dense else self.expert)
        yield f"{layer}.input_layernorm.weight", (self.hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (self.hidden,)

    def _mlp(self, name: str, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.gate_proj.weight", (size, self.hidden)
        yield f"{name}.up_proj.weight", (size, self.hidden)
        yield f"{name}.down_proj.weight", (self.hidden, size)

    def mlps(self, layer: str) -> list[str]:
        return [f"{layer}.mlp"] if layer.endswith(".0") else super().mlps(layer)


V2_LITE = MlaShape(
    "deepseek-v2-lite",
    hidden=2048,
    intermediate=4096,
    heads=16,
    kv_heads=16,
    experts=32,
    expert=1408,
    shared=2,
)
V3 = MlaShape(
    "deepseek-v3",
    hidden=2048,
    intermediate=4096,
    heads=16,
    kv_heads=16,
    experts=32,
    q_rank=1536,
    expert=1024,
)
