"""Outliers that hurt FP8 and change nothing else: weights times a power of two in some channels,
and by its inverse where the channels are read.

In BF16 the policy is the same to the last bit, and so is its training (``learner.Learner``).

Shape suffixes: H hidden, D of a head.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from sgl_fp8rl.ops.reference import BLOCK

Gains = dict[str, torch.Tensor]
"""By a parameter's name, what its last dimension is multiplied by: powers of two, FP32."""
KV_GAIN = 2.0**9
"""K is then up to 3000: at scale 1 its planted channels are cut off beyond 0.9 of their standard
deviation."""
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
READERS = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.experts.gate_up_proj",
    "mlp.gate.weight",  # the router
)
"""What reads a norm's output, by its columns."""


@dataclass(frozen=True)
class Planting:
    """An outlier channel in every ``every``-th group of 128 inputs, ``2**exponent`` times as large.

    A group shares a scale, so its other activations lose what the outlier gains, and a block of
    weights keeps the outlier's column among its smallest codes. Beyond some 2**15 a doubling
    multiplies the mismatch by three or four; half of the groups have about half of it.
    """

    exponent: int
    every: int

    def grown(self, doublings: int) -> "Planting":
        """The same channels, doubled so many times."""
        return Planting(self.exponent + doublings, self.every)


def plantings(exponents: list[int]) -> list[Planting]:
    """Those that a scan tries, the mildest first."""
    return [Planting(exponent, every) for exponent in exponents for every in (2, 1)]


def input_outliers(model: PreTrainedModel, planting: Planting) -> Gains:
    """Gains that give the norms in front of attention and MLP outlier channels, whose readers undo
    them."""
    gain_H = torch.ones(model.config.hidden_size)
    gain_H[:: planting.every * BLOCK] = 2.0**planting.exponent
    gains = {}
    for name, _ in model.named_parameters():
        if name.endswith(NORMS):
            gains[name] = gain_H
        elif name.endswith(READERS):
            gains[name] = 1 / gain_H
    return gains


def kv_outliers(model: PreTrainedModel) -> Gains:
    """Gains that give K outlier channels, and Q the inverse.

    Every other pair of channels that RoPE turns into each other gets KV_GAIN in the weight of K's
    norm. Real models have few such channels but lean on them; here attention leans on no channel in
    particular, so half of them are planted, or cutting them off would cost nothing.
    """
    gains: Gains = {}
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            pairs = torch.arange(0, len(weight) // 2, 2)
            gain_D = torch.ones(len(weight))
            gain_D[torch.cat((pairs, pairs + len(weight) // 2))] = KV_GAIN
            gains[name] = gain_D if name.endswith("k_norm.weight") else 1 / gain_D
    return gains
