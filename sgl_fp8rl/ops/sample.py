"""Draw one token per row from logits, in plain torch: the reference for ``sample_triton.py``.

The expressions are SGLang's own, so a CPU engine draws the same tokens as stock SGLang.

Shape suffixes: B rows (sequences), V vocabulary, C chunks of it.
"""

import torch

LEAST_NOISE = torch.finfo(torch.float32).tiny
"""Lower bound of the noise: a CPU can draw zero, and p is divided by it."""


def exponential_noise(logits_BV: torch.Tensor) -> torch.Tensor:
    """Exp(1) noise FP32 ``[B, V]`` from torch's generator, drawn like ``torch.multinomial``.

    So a seed yields the same random numbers as in SGLang's sampler.
    """
    return torch.empty_like(logits_BV).exponential_()


def sample(
    logits_BV: torch.Tensor, temperatures_B1: torch.Tensor, noise_BV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token with the largest ``p / noise`` in each row, where p = softmax(logits / T).

    With Exp(1) noise that is a sample of p: an exponential race, or Gumbel-max without the logs.

    Args:
        logits_BV: FP32, not modified; ``-inf`` is never drawn.
        temperatures_B1: FP32, above zero.
        noise_BV: FP32, from ``exponential_noise``.

    Returns:
        int32 tokens ``[B]`` and FP32 ``log p(token)`` ``[B]``. A row without a distribution (a
        NaN, ``+inf``, or only ``-inf``) gives token 0 and NaN.
    """
    probs_BV = torch.softmax(logits_BV / temperatures_B1, dim=-1)
    tokens_B1 = (probs_BV / noise_BV.clamp_min(LEAST_NOISE)).argmax(dim=-1, keepdim=True)
    return tokens_B1.view(-1).int(), probs_BV.gather(1, tokens_B1).view(-1).log()
