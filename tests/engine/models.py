"""Tiny random checkpoints of real architectures, as transformers writes them, in BF16.

Two layers. Every dimension is a whole number of FP8 blocks, also on each of two tensor parallel
ranks, but for the families that say otherwise. Weights are drawn so that a fault is seen in
logprobs: linears are larger than at a usual initialization and each 128x128 block has a magnitude
of its own, norms and biases are not trivial.
"""

import json
import math
import re
import shutil
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BLOCK = 128
VOCAB = 512
HEAD_DIM = 128
WEIGHTS = "model.safetensors"

Tensors = dict[str, torch.Tensor]
Quantize = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Family:
    """How one architecture differs from the common tiny decoder."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)  # more for transformers' config class
    raw_config: dict[str, Any] = field(default_factory=dict)  # added to config.json afterwards


# Heads of 128: each of two ranks holds whole blocks of q (2 heads) and of k and v (1 head).
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Where SGLang or transformers takes no head_dim: it is hidden_size / heads.
WIDE = {"hidden_size": 512, "head_dim": None}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}

# The heads of DeepSeek-V2, V3 and Kimi K2.
MLA = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": None,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 512,
    },
}

FAMILIES = {
    "qwen3": Family("qwen3"),
    "qwen3_moe": Family("qwen3_moe", MOE),
    "qwen2": Family("qwen2", {**WIDE, "tie_word_embeddings": True}),
    "llama": Family("llama"),
    "mistral": Family("mistral", {"sliding_window": None}),
    "phi3": Family("phi3", WIDE),
    "glm4": Family("glm4"),
    # Its own loader adds 1 to the norms of the stream; gemma2 keeps weight + 1 in a buffer.
    "gemma": Family("gemma", {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": Family(
        "gemma2",
        {
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 128,
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": None,  # torch_native attention has none
        },
        {"hidden_act": "gelu_pytorch_tanh"},  # SGLang reads the old name, too
    ),
    # SGLang's class knows no head_dim, as above; narrow, because a router makes noise larger.
    "mixtral": Family(
        "mixtral",
        {
            "num_attention_heads": 2,
            "intermediate_size": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    # As DeepSeek-V2-Lite; transformers 5.12 cannot compute V2's groups of experts.
    "deepseek_v2": Family(
        "deepseek_v2",
        {
            **MLA,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,  # no power of 2, which no rounding would show
        },
        # transformers no longer writes what SGLang reads
        {"moe_layer_freq": 1, "scoring_func": "softmax", "norm_topk_prob": False},
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        {
            **MLA,
            "q_lora_rank": 256,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    # Its shared expert's gate is a Triton kernel on a GPU.
    "qwen2_moe": Family("qwen2_moe", {**WIDE, **MOE, "shared_expert_intermediate_size": 256}),
    # Padded to whole blocks: q 192 and k, v 96 rows, and o_proj 192 columns.
    "qwen3_ragged": Family("qwen3", {"head_dim": 48}),
    # q alone would be whole blocks, but shares a parameter with k and v of 64 rows.
    "qwen3_ragged_kv": Family("qwen3", {"head_dim": 64, "num_key_value_heads": 1}),
    "qwen3_moe_ragged": Family("qwen3_moe", {**MOE, "moe_intermediate_size": 192}),
    # The shapes of SmolLM2-135M: no side of attention is whole blocks.
    "smollm2": Family(
        "llama",
        {
            "hidden_size": 576,
            "head_dim": 64,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1536,
            "tie_word_embeddings": True,
        },
    ),
    # As of Qwen2.5-0.5B, but narrower: two ranks cut each projection inside of a block, at row 192
    # of q, 64 of k and v, 304 of the MLP.
    "qwen2_cut": Family(
        "qwen2",
        {
            "hidden_size": 384,
            "head_dim": None,
            "num_attention_heads": 6,
            "intermediate_size": 608,
            "tie_word_embeddings": True,
        },
    ),
    # Two ranks hold 192 rows of each expert, as four do of Qwen3-30B-A3B.
    "qwen3_moe_cut": Family("qwen3_moe", {**MOE, "moe_intermediate_size": 384}),
}


def make_checkpoint(family: str, path: Path | str, seed: int = 0, **changes: Any) -> Path:
    """Write ``config.json`` and ``model.safetensors`` into the folder ``path``.

    Args:
        family: a key of ``FAMILIES``.
        path: a folder, made where it does not exist.
        seed: of all weights. The bytes depend on nothing else: not on the transformers version.
        changes: other values for the family's configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    spec, path = FAMILIES[family], Path(path)
    wanted = COMMON | spec.config | changes
    wanted = {key: value for key, value in wanted.items() if key != "head_dim" or value}
    config = AutoConfig.for_model(spec.model_type, **wanted)
    # Its save writes the names of the hub's checkpoints (single experts, not stacked ones).
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    if spec.raw_config:
        saved = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(saved | spec.raw_config, indent=2))
    draw(path, seed, plus_one=spec.model_type.startswith("gemma"))
    return path


def draw(path: Path, seed: int, plus_one: bool = False) -> None:
    """Give each tensor of a checkpoint other values, by its name and the seed.

    Args:
        plus_one: the model adds 1 to the weights of its norms.
    """
    shapes = load_file(path / WEIGHTS)
    _save(path, {name: _draw(name, t.shape, seed, plus_one) for name, t in shapes.items()})


def _save(path: Path, tensors: Tensors) -> None:
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


def _generator(name: str, seed: int) -> torch.Generator:
    # The generator looks at 32 bits of its seed only.
    return torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))


def _draw(name: str, shape: torch.Size, seed: int, norm_plus_one: bool) -> torch.Tensor:
    random = _generator(name, seed)
    values = torch.randn(shape, generator=random)
    if name.endswith("bias"):
        values *= 0.5
    elif len(shape) == 1:  # a norm
        values = 0.3 * values + (0.0 if norm_plus_one else 1.0)
    else:
        values *= 0.1
    if is_linear(name):
        gain = torch.exp2(torch.rand([-(-n // BLOCK) for n in shape], generator=random) * 2 - 1)
        spread = gain.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        values *= spread[: shape[0], : shape[1]]
    return values.bfloat16()


def named_tensors(path: Path | str) -> list[tuple[str, torch.Tensor]]:
    """The checkpoint's tensors by their HF names, in BF16, sorted by name."""
    return sorted(load_file(Path(path) / WEIGHTS).items())


def framework_stream(path: Path | str) -> Iterator[tuple[str, torch.Tensor]]:
    """As a training framework gathers it: in FP32, in an order of its own, and with the head where
    it is tied too."""
    config = json.loads((Path(path) / "config.json").read_text())
    tensors = dict(named_tensors(path))
    if config.get("tie_word_embeddings"):
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    names = sorted(tensors, key=lambda name: name[::-1])
    return ((name, tensors[name].float()) for name in names)


def copied(path_in: Path | str, path_out: Path | str, tensors: Tensors) -> Path:
    """Copy a checkpoint, with these weights."""
    shutil.copytree(path_in, path_out, dirs_exist_ok=True)
    _save(Path(path_out), tensors)
    return Path(path_out)


def perturb(path_in: Path | str, path_out: Path | str, seed: int) -> Path:
    """Copy a checkpoint with every tensor changed, as training changes it: the next policy.

    The noise is half the standard deviation of each tensor, enough to be seen in logprobs. Mean
    and standard deviation stay: larger weights would make the logits more chaotic, and with them
    the difference that FP8 activations alone make.
    """
    changed = {name: perturbed(name, t, seed) for name, t in named_tensors(path_in)}
    return copied(path_in, path_out, changed)


def perturbed(name: str, tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """One tensor of the next policy, in BF16."""
    noise = torch.randn(tensor.shape, generator=_generator(name, seed))
    mean, std = tensor.float().mean(), tensor.float().std()
    moved = (tensor.float() - mean + 0.5 * std * noise) / math.hypot(1.0, 0.5)
    return (mean + moved).bfloat16()


def step(path_in: Path | str, path_out: Path | str, seed: int, part: float = 0.002) -> Path:
    """Copy a checkpoint with a part of each tensor's elements changed, as a step of RL changes it.

    They become smaller by a quarter, which no code and no BF16 number survives; and the largest
    of each matrix of attention becomes larger, which moves a scale and all codes under it.
    """
    tensors = dict(named_tensors(path_in))
    for name, tensor in tensors.items():
        moves = torch.rand(tensor.shape, generator=_generator(name, seed)) < part
        tensors[name] = torch.where(moves, 0.75 * tensor, tensor)
        if name.endswith("o_proj.weight"):
            tensors[name].view(-1)[tensor.abs().argmax()] *= 1.5
    return copied(path_in, path_out, tensors)


OUTLIER_CHANNELS = [5, 69]
"""Of each head of 128: RoPE turns them into each other, so both are given the same outliers."""
OUTLIER = 1000.0
"""About what |K| is there; E4M3 ends at 448. Not so large that other channels come to lie below
its normal numbers."""
OUTLIER_WEIGHT = 20.0
"""How much these channels count in q . k, beside 126 others of about 1."""


def plant_outliers(path_in: Path | str, path_out: Path | str) -> Path:
    """Copy a checkpoint with K channels beyond E4M3's range, as trained models have them.

    They come from the weight of QK-norm where the model has one, else from the bias of k_proj. q is
    made small in the same channels, so that attention stays as sharp as it was.
    """
    tensors = dict(named_tensors(path_in))
    has_bias = any(name.endswith("k_proj.bias") for name in tensors)
    for name, tensor in tensors.items():
        heads = tensor.unflatten(0, (-1, HEAD_DIM)) if "self_attn" in name else tensor
        if name.endswith("k_norm.weight"):
            heads[:, OUTLIER_CHANNELS] = OUTLIER
        elif name.endswith("q_norm.weight"):
            heads[:, OUTLIER_CHANNELS] = OUTLIER_WEIGHT / OUTLIER
        elif name.endswith("k_proj.bias"):
            heads[:, OUTLIER_CHANNELS] = OUTLIER
        elif has_bias and name.endswith(("q_proj.weight", "q_proj.bias")):
            heads[:, OUTLIER_CHANNELS] *= OUTLIER_WEIGHT / OUTLIER
    return copied(path_in, path_out, tensors)


def with_tensors(path_in: Path | str, path_out: Path | str, more: Tensors) -> Path:
    """Copy a checkpoint with more tensors in it, such as KV scales."""
    return copied(path_in, path_out, {**dict(named_tensors(path_in)), **more})


_EXPERT = r"\.experts\.\d+\."
# MLA absorbs kv_b_proj into its attention, in BF16.
_LINEAR = re.compile(rf"(?<!\bkv_b)_proj(_with_mqa)?\.weight$|{_EXPERT}w[123]\.weight$")
# Projections that share one parameter in SGLang.
_STACKED = re.compile(r"\b(q|k|v)_proj|\b(gate|up)_proj|\b(w1|w3)\b")


def is_linear(name: str) -> bool:
    """Whether this is a weight that FP8 is for: not a norm, embedding, head, router or bias."""
    return _LINEAR.search(name) is not None


def fp8_names(path: Path | str) -> list[str]:
    """The tensors that an engine holds in FP8."""
    return [name for name, _ in named_tensors(path) if is_linear(name)]


def whole_names(path: Path | str) -> list[str]:
    """Those that it holds in FP8 on one rank where nothing is padded.

    Those are the linears with whole blocks of rows and columns, where the projections stacked
    beside them and, in an MoE layer, all experts have whole blocks, too.
    """
    whole: dict[str, bool] = defaultdict(lambda: True)
    names = {}
    for name, tensor in named_tensors(path):
        if is_linear(name):
            experts = re.search(_EXPERT, name)
            names[name] = name[: experts.start()] if experts else _STACKED.sub("stacked", name)
            whole[names[name]] &= not any(size % BLOCK for size in tensor.shape)
    return [name for name, group in names.items() if whole[group]]


def fp8_stream(path: Path | str, quantize: Quantize) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint as a trainer sends it when it quantizes: codes, then ``weight_scale_inv``.

    Tensors that stay BF16 come as they are. ``quantize`` is of the shape of
    ``sgl_fp8rl.ops.reference.quantize_weight``.
    """
    fp8 = set(fp8_names(path))
    for name, tensor in named_tensors(path):
        if name in fp8:
            codes, scale = quantize(tensor)
            yield name, codes
            yield f"{name}_scale_inv", scale
        else:
            yield name, tensor
