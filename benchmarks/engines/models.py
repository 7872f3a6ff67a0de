"""Shapes of the benchmarked models: parameters as transformers 5 names them, and config.json."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A Qwen3 decoder, dense where ``experts`` is 0."""

    hidden: int
    intermediate: int  # of the dense MLP, or of one expert
    layers: int
    heads: int
    kv_heads: int
    experts: int = 0
    experts_per_token: int = 0
    head_dim: int = 128
    vocab: int = 151936

    @property
    def model_type(self) -> str:
        """``config.model_type``."""
        return "qwen3_moe" if self.experts else "qwen3"

    def experts_read(self, tokens: int) -> float:
        """Part of a layer's experts that so many tokens use, if each takes its experts evenly."""
        if not self.experts:
            return 1.0
        return 1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens


MODELS = {
    "qwen3-8b": Shape(hidden=4096, intermediate=12288, layers=36, heads=32, kv_heads=8),
    "qwen3-30b-a3b": Shape(
        hidden=2048,
        intermediate=768,
        layers=48,
        heads=32,
        kv_heads=4,
        experts=128,
        experts_per_token=8,
    ),
}
"""Those that run on one GPU."""
SHAPES = MODELS | {
    "qwen3-32b": Shape(hidden=5120, intermediate=25600, layers=64, heads=64, kv_heads=8),
}


@dataclass(frozen=True)
class Parameter:
    """One parameter of the trainer's model."""

    name: str
    shape: tuple[int, ...]
    fp8: bool = False
    """Whether ``--quantization fp8rl`` keeps it in FP8: the linears of the layers, no router."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def parameters(shape: Shape) -> Iterator[Parameter]:
    """Every parameter, in the order of the model; the experts of a layer are fused in two."""
    yield Parameter("model.embed_tokens.weight", (shape.vocab, shape.hidden))
    for layer in range(shape.layers):
        yield from _attention(shape, f"model.layers.{layer}.")
        yield from _mlp(shape, f"model.layers.{layer}.mlp.")
    yield Parameter("model.norm.weight", (shape.hidden,))
    yield Parameter("lm_head.weight", (shape.vocab, shape.hidden))


def _attention(shape: Shape, layer: str) -> Iterator[Parameter]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield Parameter(f"{layer}input_layernorm.weight", (shape.hidden,))
    yield Parameter(f"{layer}self_attn.q_proj.weight", (queries, shape.hidden), fp8=True)
    yield Parameter(f"{layer}self_attn.k_proj.weight", (keys, shape.hidden), fp8=True)
    yield Parameter(f"{layer}self_attn.v_proj.weight", (keys, shape.hidden), fp8=True)
    yield Parameter(f"{layer}self_attn.o_proj.weight", (shape.hidden, queries), fp8=True)
    yield Parameter(f"{layer}self_attn.q_norm.weight", (shape.head_dim,))
    yield Parameter(f"{layer}self_attn.k_norm.weight", (shape.head_dim,))
    yield Parameter(f"{layer}post_attention_layernorm.weight", (shape.hidden,))


def _mlp(shape: Shape, mlp: str) -> Iterator[Parameter]:
    hidden, inner = shape.hidden, shape.intermediate
    if not shape.experts:
        yield Parameter(f"{mlp}gate_proj.weight", (inner, hidden), fp8=True)
        yield Parameter(f"{mlp}up_proj.weight", (inner, hidden), fp8=True)
        yield Parameter(f"{mlp}down_proj.weight", (hidden, inner), fp8=True)
        return
    yield Parameter(f"{mlp}gate.weight", (shape.experts, hidden))
    yield Parameter(f"{mlp}experts.gate_up_proj", (shape.experts, 2 * inner, hidden), fp8=True)
    yield Parameter(f"{mlp}experts.down_proj", (shape.experts, hidden, inner), fp8=True)


def written(shape: Shape, folder: Path, layers: int | None) -> Shape:
    """The shape, with as many layers as were asked for, and its ``config.json`` in ``folder``."""
    shape = replace(shape, layers=layers or shape.layers)
    save_config(shape, folder)
    return shape


def save_config(shape: Shape, folder: Path) -> None:
    """Write ``config.json``, from which an engine with dummy weights starts."""
    (folder / "config.json").write_text(json.dumps(config(shape)))


def config(shape: Shape) -> dict[str, Any]:
    """``config.json`` of the checkpoint, for SGLang."""
    common = {
        "architectures": ["Qwen3MoeForCausalLM" if shape.experts else "Qwen3ForCausalLM"],
        "model_type": shape.model_type,
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "eos_token_id": None,  # answers end at the length that was asked for
    }
    if not shape.experts:
        return common
    return common | {
        "moe_intermediate_size": shape.intermediate,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
