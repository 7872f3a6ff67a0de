"""An independent oracle of the draw: float64 NumPy, from the definition."""

import numpy as np
import torch
from numpy.typing import NDArray

# Measured: 1.6e-7 in the interpreter, 151,936 logits a row, T from 0.1 to 1.3.
LOGPROB_TOLERANCE = 2e-6
"""Relative, or absolute below 1."""
# Measured: 0, every token is the best; a GPU's exp is good to about 5e-7 at p = e**-10.
TIE = 2e-6
"""How far below the best key (p / noise) a drawn one may be, relative: FP32 cannot tell them."""


def check_sample(
    tokens_B: torch.Tensor,
    logprobs_B: torch.Tensor,
    logits_BV: torch.Tensor,
    temperatures_B1: torch.Tensor,
    noise_BV: torch.Tensor,
) -> tuple[float, float]:
    """Hold a draw to the oracle; (largest error of a logprob, largest distance from the best key).

    Raises:
        AssertionError: a wrong dtype, shape, token or logprob.
    """
    assert tokens_B.dtype == torch.int32 and logprobs_B.dtype == torch.float32
    assert tokens_B.shape == logprobs_B.shape == logits_BV.shape[:1]
    tokens = tokens_B.cpu().numpy()[:, None].astype(np.int64)
    want_BV = logprobs_of(logits_BV, temperatures_B1)
    want_B = np.take_along_axis(want_BV, tokens, 1)[:, 0]
    error = np.abs(logprobs_B.cpu().numpy() - want_B) / np.maximum(1.0, np.abs(want_B))
    assert (error < LOGPROB_TOLERANCE).all(), f"logprob off by {error.max()}"

    keys_BV = want_BV - np.log(noise_BV.cpu().numpy().astype(np.float64))
    behind = keys_BV.max(1) - np.take_along_axis(keys_BV, tokens, 1)[:, 0]
    assert (behind < TIE).all(), f"token drawn at {behind.max()} behind the best"
    return float(error.max()), float(behind.max())


def logprobs_of(logits_BV: torch.Tensor, temperatures_B1: torch.Tensor) -> NDArray[np.float64]:
    """log softmax(x) in float64, where x = logits / T is rounded to FP32: that much is given."""
    x_BV = (logits_BV.cpu().numpy() / temperatures_B1.cpu().numpy()).astype(np.float64)
    x_BV -= x_BV.max(1, keepdims=True)
    return np.asarray(x_BV - np.log(np.exp(x_BV).sum(1, keepdims=True)))
