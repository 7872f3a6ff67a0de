"""The layers of a transformers model that ``--quantization fp8rl`` quantizes, by engine names.

SGLang stacks projections: q, k and v are one layer of the engine, gate and up another, and all
experts of a decoder layer a third. What is one layer there is quantized or BF16 as a whole.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sgl_fp8rl.formats import BLOCK_FP8
from sgl_fp8rl.formats.padding import BF16_BYTES, Shard, fit, fit_experts
from sgl_fp8rl.formats.weight_format import WeightFormat
from trainer_bridge.fp8.fp8_layers import is_experts
from trainer_bridge.sources import hf_names

_STACKED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
_WHOLE = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_ROUTERS = ("gate", "router", "shared_expert_gate")
_EXPERTS = ".experts"
_LAYER = re.compile(r"\blayers\.\d+\.")


@dataclass(frozen=True)
class Group:
    """One layer of the engine."""

    name: str
    """As the engine names it, such as ``model.layers.3.mlp.down_proj``."""
    modules: tuple[nn.Module, ...]
    """Linears, or the one module that holds the experts of the layer as 3-D parameters."""
    format: WeightFormat = BLOCK_FP8
    """What the engine keeps it in."""

    @property
    def weights(self) -> Iterator[torch.Tensor]:
        """The matrices, ``[N, K]`` or ``[E, N, K]``."""
        for module in self.modules:
            yield from _matrices(module)

    @property
    def bf16_bytes(self) -> int:
        """Bytes of the weights in BF16."""
        return sum(BF16_BYTES * weight.numel() for weight in self.weights)


def fp8_groups(
    model: nn.Module, format_: WeightFormat = BLOCK_FP8, ragged: str = "pad"
) -> list[Group]:
    """The layers that an engine of one rank keeps in a format, in the order of the model.

    A layer that is not smaller there than in BF16, padded to whole blocks, is left out.

    Args:
        model: a causal language model of transformers 5.
        format_: one of ``BLOCKS``.
        ragged: one of ``RAGGED``: what becomes of layers whose sizes are not multiples of 128.

    Raises:
        ValueError: it has a layer of which the engine's name is not known, or none that is FP8.
    """
    found: dict[str, list[nn.Module]] = defaultdict(list)
    for name, module in model.named_modules():
        is_weighty = isinstance(module, nn.Linear) or is_experts(module)
        if _LAYER.search(name) and is_weighty:
            engine_name = _engine_name(name, hf_names.model_type(model))
            if engine_name is not None:
                found[engine_name].append(module)
    config: Any = model.config
    groups, reasons = [], []
    for name, modules in found.items():
        if (reason := _why_bf16(name, modules, config, pads=ragged == "pad")) is None:
            groups.append(Group(name, tuple(modules), format_))
        else:
            reasons.append(reason)
    if not groups:
        raise ValueError(
            f"no layer of this model would run in {format_.name}, of {len(found)}: "
            f"{next(iter(reasons), 'it has none')}; choose another --ragged"
        )
    return groups


def _matrices(module: nn.Module) -> Iterator[torch.Tensor]:
    names = ("gate_up_proj", "down_proj") if is_experts(module) else ("weight",)
    for name in names:
        yield getattr(module, name)


def _engine_name(name: str, family: str) -> str | None:
    """What the engine calls the layer that holds this module; None where it is never FP8."""
    name = hf_names.with_experts_of(name, family)
    base, found, _ = name.partition(_EXPERTS)
    if found:
        return base + _EXPERTS
    base, _, leaf = name.rpartition(".")
    if leaf in _ROUTERS:
        return None
    if leaf not in _STACKED and leaf not in _WHOLE:
        raise ValueError(
            f"precision does not know how the engine stores {name} of a {family} model; give it "
            f"one with attention of q, k, v, o and MLPs or experts of gate, up, down"
        )
    return f"{base}.{_STACKED.get(leaf, leaf)}"


def _why_bf16(name: str, modules: list[nn.Module], config: Any, *, pads: bool) -> str | None:
    """Why the engine keeps a layer in BF16."""
    if is_experts(modules[0]):
        *_, down = _matrices(modules[0])
        *_, hidden, size = down.shape
        if not pads:
            return BLOCK_FP8.refusal([size], hidden)
        return fit_experts(BLOCK_FP8, hidden, Shard(size))[1]
    rows, cols = zip(*(weight.shape for m in modules for weight in _matrices(m)), strict=True)
    if len(modules) == 1:  # stacked in the checkpoint already
        rows = _parts(name, rows[0], config)
    if not pads:
        return BLOCK_FP8.refusal(rows, cols[0])
    return fit(BLOCK_FP8, [Shard(size) for size in rows], Shard(cols[0]))[1]


def _parts(name: str, rows: int, config: Any) -> tuple[int, ...]:
    """Rows of each projection of a layer that the checkpoint has in one matrix."""
    if name.endswith("gate_up_proj"):
        return rows // 2, rows // 2
    if name.endswith("qkv_proj"):
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        kv = config.num_key_value_heads * head_dim
        return rows - 2 * kv, kv, kv
    return (rows,)
