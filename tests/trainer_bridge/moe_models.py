"""Tiny random MoE models of transformers, and experts that they would not choose themselves."""

from typing import Any

import pytest
import torch

VOCAB = 64
LAYERS, EXPERTS, TOP_K = 2, 6, 2
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": TOP_K,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 16, "norm_topk_prob": False},
    "olmoe": {"num_experts": EXPERTS, "norm_topk_prob": False},
    "mixtral": {"num_local_experts": EXPERTS},
}


def tiny(
    family: str = "qwen3_moe", dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> Any:
    """A model whose experts differ by so much that another choice of them is seen."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    known = FAMILIES.get(family, {})
    config = transformers.AutoConfig.for_model(family, **{**TINY, **known, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.4 if "gate.weight" in name else 0.2)
    return model.eval()


def random_experts(rows: int, seed: int) -> torch.Tensor:
    """Distinct experts for each row and layer, uint8 ``[rows, LAYERS, TOP_K]``."""
    noise = torch.rand(rows, LAYERS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return noise.argsort(-1)[..., :TOP_K].to(torch.uint8)


def random_tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed))
