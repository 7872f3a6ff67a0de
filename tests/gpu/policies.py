"""Random policies with the layers of Qwen3-8B and Qwen3-30B-A3B, drawn where they are used.

Few layers and a small vocabulary; all else has the size of the real model. Weights are scaled so
that every part of a layer counts: each linear keeps the variance of what it reads, and each
128x128 block has a magnitude of its own, so that a wrong block or scale moves the logprobs.
"""

import hashlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from sgl_fp8rl.formats import FORMATS
from tests.engine import expected, models

HEAD = 128
SHARED_MEMORY = Path("/dev/shm")
ROOM_BYTES = 16 << 30
SHARPNESS = 2.0
"""Neither experts nor tokens are all alike."""
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """A Qwen3 decoder; with ``experts`` a Qwen3-MoE, 8 experts a token."""

    name: str
    hidden: int
    intermediate: int
    """Of the MLP, or of one expert."""
    kv_heads: int
    experts: int = 0
    heads: int = 32
    layers: int = 2
    vocabulary: int = 4096

    def common(self, architecture: str, model_type: str) -> dict[str, Any]:
        """What the configurations of all decoders say."""
        return {
            "architectures": [architecture],
            "model_type": model_type,
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
        }

    def config(self) -> dict[str, Any]:
        """What ``config.json`` says."""
        architecture = "Qwen3MoeForCausalLM" if self.experts else "Qwen3ForCausalLM"
        common = {
            **self.common(architecture, "qwen3_moe" if self.experts else "qwen3"),
            "head_dim": HEAD,
            "rope_theta": 1000000,
        }
        if not self.experts:
            return common
        return common | {
            "num_experts": self.experts,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": self.intermediate,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """HF name and shape of every tensor, layer by layer."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            yield from self._layer(f"model.layers.{layer}")
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocabulary, self.hidden)

    def _layer(self, layer: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        query, key = self.heads * HEAD, self.kv_heads * HEAD
        attention = f"{layer}.self_attn"
        yield f"{attention}.q_proj.weight", (query, self.hidden)
        yield f"{attention}.k_proj.weight", (key, self.hidden)
        yield f"{attention}.v_proj.weight", (key, self.hidden)
        yield f"{attention}.o_proj.weight", (self.hidden, query)
        yield f"{attention}.q_norm.weight", (HEAD,)
        yield f"{attention}.k_norm.weight", (HEAD,)
        if self.experts:
            yield f"{layer}.mlp.gate.weight", (self.experts, self.hidden)
        for mlp in self.mlps(layer):
            yield f"{mlp}.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{mlp}.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{mlp}.down_proj.weight", (self.hidden, self.intermediate)
        yield f"{layer}.input_layernorm.weight", (self.hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (self.hidden,)

    def mlps(self, layer: str) -> list[str]:
        """The layer's MLP, or its experts."""
        if not self.experts:
            return [f"{layer}.mlp"]
        return [f"{layer}.mlp.experts.{expert}" for expert in range(self.experts)]


DENSE = Shape("qwen3-8b", hidden=4096, intermediate=12288, kv_heads=8)
MOE = Shape("qwen3-30b-a3b", hidden=2048, intermediate=768, kv_heads=4, experts=128)
RAGGED = Shape("ragged", hidden=576, intermediate=1472, heads=8, kv_heads=4, vocabulary=131072)
"""Padded on one rank: 4.5 blocks of columns, and 11.5 of rows in each half of gate and up. Its
vocabulary makes it as many chunks as an update needs to have a middle."""
CUT = replace(DENSE, name="qwen3-8b-cut", intermediate=12160)
"""Padded on two ranks: the border between them is in the middle of a block of the MLP."""
MOE_CUT = replace(MOE, name="qwen3-30b-a3b-cut", intermediate=384)
"""Two ranks hold 192 rows of each expert, as four do of the real model."""
LARGE = replace(DENSE, name="qwen3-8b-large", layers=12, vocabulary=32768)
"""Several GB, so that what a load takes is seen beside everything else on the device."""


def draw(shape: Shape, seed: int, device: str = "cuda", sharpness: float = SHARPNESS) -> Tensors:
    """A policy in BF16 on a device, by HF names; other seeds share nothing with it.

    Args:
        sharpness: about the standard deviation of the logits of tokens, and of experts.
    """
    return {name: _draw(name, size, seed, device, sharpness) for name, size in shape.tensors()}


def _draw(
    name: str, size: tuple[int, ...], seed: int, device: str, sharpness: float
) -> torch.Tensor:
    random = torch.Generator(device).manual_seed(zlib.crc32(name.encode(), seed))
    values = torch.randn(size, generator=random, device=device)
    if len(size) == 1:  # a norm
        return (1 + 0.3 * values).bfloat16()
    if name != "model.embed_tokens.weight":
        values *= size[1] ** -0.5
    if name.endswith((".mlp.gate.weight", "lm_head.weight")):
        values *= sharpness
    if models.is_linear(name):
        blocks = [-(-n // models.BLOCK) for n in size]
        gain = torch.exp2(torch.rand(blocks, generator=random, device=device) * 2 - 1)
        spread = gain.repeat_interleave(models.BLOCK, 0).repeat_interleave(models.BLOCK, 1)
        values *= spread[: size[0], : size[1]]
    return values.bfloat16()


def codes_and_scales(policy: Tensors, fmt: str = "block-fp8") -> Tensors:
    """The policy as a trainer sends it when it quantizes itself."""
    stream: Tensors = {}
    for name, tensor in policy.items():
        if models.is_linear(name):
            encoded = FORMATS[fmt].encode(tensor)
            stream |= {name + suffix: part for suffix, part in encoded.items()}
        else:
            stream[name] = tensor
    return stream


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder in the machine's memory, where there is room: checkpoints are read from it fast."""
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > ROOM_BYTES
    home = SHARED_MEMORY if roomy else None
    with tempfile.TemporaryDirectory(prefix="fp8rl-", dir=home) as folder:
        yield Path(folder)


def write_checkpoint(
    shape: Shape, policy: Tensors, path: Path, shard_bytes: int | None = None
) -> Path:
    """Write ``config.json`` and one safetensors file, or several of at most ``shard_bytes``.

    A tensor that is larger has a file of its own.
    """
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(shape.config()))
    shards: list[Tensors] = [{}]
    for name, tensor in policy.items():
        size = sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes
        if shard_bytes is not None and shards[-1] and size > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor.cpu()
    names = [models.WEIGHTS] if shard_bytes is None else map("{:05d}.safetensors".format, count())
    for name, shard in zip(names, shards, strict=False):
        save_file(shard, path / name, metadata={"format": "pt"})
    return path


def reference_digests(
    policy: Tensors, rank: int = 0, tp_size: int = 1, ep_size: int = 1, fmt: str = "block-fp8"
) -> dict[str, str]:
    """SHA-256 of each parameter that a rank of an engine must hold, by SGLang's names.

    Codes and scales are made by the torch reference, stacked by ``tests.engine.expected``.

    Args:
        fmt: of all linears, as the option ``format`` has it.
    """
    fp8 = {
        name: tuple(map(_array, FORMATS[fmt].encode(tensor).values()))
        for name, tensor in policy.items()
        if models.is_linear(name)
    }
    bf16 = {name: _array(tensor) for name, tensor in policy.items() if name not in fp8}
    parameters = expected.parameters_of(fp8, bf16, rank, tp_size, ep_size)
    with ThreadPoolExecutor() as pool:  # hashing lets go of the interpreter's lock
        return dict(zip(parameters, pool.map(_sha256, parameters.values()), strict=True))


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.cpu().view(bits).numpy()


def _sha256(array: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
