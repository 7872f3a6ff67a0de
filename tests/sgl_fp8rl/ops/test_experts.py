"""Gated experts of block FP8, against a loop over tokens that dequantizes by the oracle."""

from typing import Any

import numpy as np
import torch
from torch.nn.functional import silu

from sgl_fp8rl.ops.reference import fp8_experts, quantize_weight
from tests import oracle

TOLERANCE = 0.06
"""Of the largest output. 0.026 here: gate, up, their product and down are rounded to BF16, after
which an activation may take the next code."""
EXPERTS, H, INNER = 3, 128, 256


def drawn(*shape: int) -> torch.Tensor:
    return (
        0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    ).bfloat16()


def by_oracle(x_K: np.ndarray[Any, Any], weight_NK: torch.Tensor) -> np.ndarray[Any, Any]:
    weight = oracle.dequantize_weight(*oracle.quantize_weight(weight_NK.float().numpy()))
    row = oracle.dequantize_activation(*oracle.quantize_activation(x_K[None].astype(np.float32)))
    return np.asarray((row @ weight.T)[0])


def test_experts_are_a_loop_over_tokens() -> None:
    gate_up, down, x = drawn(EXPERTS, 2 * INNER, H), drawn(EXPERTS, H, INNER), 20 * drawn(5, H)
    ids = torch.tensor([[0, 1], [2, 0], [-1, 2], [1, 2], [-1, -1]])  # -1: on another rank
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(7))
    got = fp8_experts(x, quantize_weight(gate_up), quantize_weight(down), weights, ids, silu)
    assert got.dtype == torch.float32
    wanted = np.zeros((5, H))
    for token in range(5):
        for slot in range(2):
            expert = int(ids[token, slot])
            if expert < 0:
                continue
            both = by_oracle(x[token].float().numpy(), gate_up[expert])
            gate, up = both[:INNER], both[INNER:]
            inner = gate / (1 + np.exp(-gate)) * up
            wanted[token] += float(weights[token, slot]) * by_oracle(inner, down[expert])
    error = np.abs(got.numpy() - wanted).max() / np.abs(wanted).max()
    assert error < TOLERANCE
    assert not got[4].any()

    # the control: gate and up exchanged
    swapped = torch.cat([gate_up[:, INNER:], gate_up[:, :INNER]], dim=1)
    wrong = fp8_experts(x, quantize_weight(swapped), quantize_weight(down), weights, ids, silu)
    assert np.abs(wrong.numpy() - wanted).max() / np.abs(wanted).max() > 5 * TOLERANCE
