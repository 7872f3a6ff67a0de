"""The shape of a model, from its ``config.json``: what an engine holds, reads and computes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_fp8rl.protocol.kv_schema import E4M3, INT8

BF16 = "bf16"
BF16_BYTES, FP8_BYTES = 2, 1
BLOCK, SCALE_BYTES = 128, 4
"""Side of a block of FP8 weights, and bytes of the scale that it shares: those of the format in
``formats``, which loads torch."""
KV_BYTES = {BF16: (BF16_BYTES, 0), E4M3: (FP8_BYTES, 0), INT8: (1, 2)}
"""Of an element of K or V, and of the scale of a token and head, by what the KV cache is in."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""``model_type`` of decoders whose layers all are attention and one MLP, or one set of experts."""


class PlanError(ValueError):
    """A model that ``plan`` has no formula for, a workload that cannot be read, or one that does
    not fit."""


@dataclass(frozen=True)
class Shape:
    """A decoder of equal layers, dense where ``experts`` is 0."""

    hidden: int
    intermediate: int
    """Of the dense MLP, or of one expert."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0
    tied: bool = False
    """Whether embeddings and head are one matrix."""

    @property
    def linear_weights(self) -> int:
        """Elements of all layers' projections, MLPs and experts."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        mlp = 3 * self.intermediate * max(self.experts, 1)
        return self.layers * self.hidden * (attention + mlp)

    @property
    def head_weights(self) -> int:
        """Elements of the head."""
        return self.vocab * self.hidden

    def is_divisible(self, tp: int) -> bool:
        """Whether SGLang can give each of ``tp`` ranks as much; ranks may share a KV head, and
        experts may stay whole."""
        few, many = sorted((self.kv_heads, tp))
        columns = self.experts or self.intermediate
        return not (self.heads % tp or many % few or columns % tp)

    def linear_bytes(self, fp8: bool) -> float:
        """The same as an engine holds them."""
        return self.linear_weights * (FP8_BYTES + SCALE_BYTES / BLOCK**2 if fp8 else BF16_BYTES)

    def weight_bytes(self, fp8: bool) -> float:
        """All weights as an engine holds them; norms are left out."""
        rest = self.head_weights * (1 if self.tied else 2)
        rest += self.layers * self.hidden * self.experts  # routers
        return self.linear_bytes(fp8) + rest * BF16_BYTES

    def attention_flops(self, length: int) -> float:
        """Floating-point operations of causal attention over a prompt."""
        return 2.0 * self.layers * self.heads * self.head_dim * float(length) ** 2

    def kv_token_bytes(self, cache: str, tp: int = 1) -> int:
        """K and V of one token in all layers, on one of ``tp`` ranks: a head that ranks share is
        held by each of them.

        Args:
            cache: one of ``KV_BYTES``.
        """
        element, scale = KV_BYTES[cache]
        return 2 * self.layers * -(-self.kv_heads // tp) * (self.head_dim * element + scale)


def read(model: str) -> Shape:
    """The shape of a model in a folder, or of a ``config.json``.

    Raises:
        PlanError: it cannot be read, or is of a family without a formula.
    """
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        return of(json.loads(path.read_text()))
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        other = "" if path.exists() else f", or download it: hf download {model} config.json"
        raise PlanError(
            f"{path} is not the config.json of a model ({type(error).__name__}: {error}); name a "
            f"folder that has one{other}"
        ) from None


def of(config: Any) -> Shape:
    """The shape that a ``config.json`` describes.

    Raises:
        KeyError: it lacks a size.
        PlanError: plan has no formula for the family.
    """
    if not isinstance(config, dict):
        raise TypeError("it is not a JSON object")
    family = config.get("model_type")
    if family not in FAMILIES or config.get("quantization_config"):
        what = f"model_type {family!r}" if family not in FAMILIES else "a quantized checkpoint"
        raise PlanError(f"plan has no formula for {what}; it knows {', '.join(FAMILIES)}")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise PlanError("plan has no formula for layers with and without experts")
    heads = _size(config, "num_attention_heads")
    hidden = _size(config, "hidden_size")
    experts = _size(config, "num_experts", "num_local_experts", least=0, default=0)
    return Shape(
        hidden=hidden,
        intermediate=_size(config, "moe_intermediate_size" if experts else "intermediate_size"),
        layers=_size(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", default=heads),
        head_dim=_size(config, "head_dim", default=hidden // heads),
        vocab=_size(config, "vocab_size"),
        experts=experts,
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _size(config: dict[str, Any], *names: str, least: int = 1, default: int | None = None) -> int:
    """The first of these names that the config has, or the default."""
    given = [(name, config[name]) for name in names if config.get(name) is not None]
    name, size = given[0] if given else (names[0], default)
    if size is None:
        raise KeyError(name)
    if type(size) is not int or size < least:
        raise PlanError(f"{name} is {size!r}; it must be an integer of at least {least}")
    return size
