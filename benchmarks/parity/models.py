"""The models: a dense Qwen3 and one with a mixture of experts, each in a full and a tiny size, a
dense one in a large size, and a published one in its own."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from examples.grpo import tiny_model
from examples.grpo.arithmetic import END_TOKEN, VOCAB_SIZE

MODELS = ("dense", "moe", "moe32")
"""Trained from scratch, in each size; in the last each expert is half as wide, and twice as many
are active."""
PRETRAINED = "smollm2"
"""Begins with a published checkpoint (``benchmarks.pretrained``); also the name of its size."""
LARGE = "large"
"""Size of a dense model: what a start and four runs of half an hour on two H200s allow."""
CONTEXT, LARGE_CONTEXT = 512, 1024
"""Positions; the longest prompt with its response takes 350, and of long responses 785."""
EXPERTS: dict[str, dict[str, Any]] = {
    "tiny": {
        **tiny_model.SIZES["tiny"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
    "full": {
        "hidden_size": 768,
        "intermediate_size": 2048,  # of dense layers, of which there is none
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
    },
}
MORE_EXPERTS: dict[str, dict[str, Any]] = {
    "tiny": {"num_experts": 8},
    "full": {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256},
}
"""What ``moe32`` has in the place of that."""
# Four query heads a KV head, as in Qwen3-8B: XQA is compiled for each such number.
DENSE = {
    "tiny": tiny_model.SIZES["tiny"],
    "full": {**tiny_model.SIZES["small"], "num_key_value_heads": 4},
    LARGE: {  # as deep as Qwen3-0.6B and Qwen3-1.7B, and between them in width
        "hidden_size": 1536,
        "intermediate_size": 4608,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 3,
        "head_dim": 128,
    },
}


def models_of(size: str) -> tuple[str, ...]:
    """The models that come in a size."""
    return {PRETRAINED: (PRETRAINED,), LARGE: ("dense",)}.get(size, MODELS)


def has_experts(model: str) -> bool:
    """Whether it is a mixture of experts."""
    return model.startswith("moe")


def build(model: str, size: str, seed: int) -> PreTrainedModel:
    """A random model in FP32. Every FP8 matrix has sides that are multiples of 128."""
    torch.manual_seed(seed)
    common = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": LARGE_CONTEXT if size == LARGE else CONTEXT,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": END_TOKEN,
        "pad_token_id": None,
    }
    if not has_experts(model):
        return Qwen3ForCausalLM(Qwen3Config(**common, **DENSE[size]))
    sizes = EXPERTS[size] | (MORE_EXPERTS[size] if model == "moe32" else {})
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**common, **sizes, norm_topk_prob=True, decoder_sparse_step=1)
    )


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write a BF16 checkpoint as Hugging Face has it."""
    disable_progress_bar()
    model.to(torch.bfloat16).save_pretrained(folder)


def dtype_of(device: torch.device) -> torch.dtype:
    """What a trainer computes in: on CPUs without AVX-512 torch multiplies BF16 by plain loops."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def load(folder: Path, device: torch.device) -> PreTrainedModel:
    """A BF16 checkpoint, as the trainer has it."""
    disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype_of(device)).to(device)


def alias(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Another model whose weights are those of ``model``, in the same storage: what writes into the
    one has written into the other.

    Args:
        folder: a checkpoint of such a model.
    """
    other = load(folder, model.device)
    other.load_state_dict(model.state_dict(), assign=True)
    return other
