"""How far a changed model's next-token distributions are from the model's own.

Shapes: T tokens, V vocabulary.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Divergence:
    """Means over tokens, in nats."""

    kl: float
    """KL(model || changed model) over the whole vocabulary, exact."""
    k3: float
    """The estimate of the same from the tokens alone: ratio - 1 - log ratio, of changed to model.
    In the mean it is the KL where the tokens are the model's own samples."""


def token_kl(reference_TV: torch.Tensor, changed_TV: torch.Tensor) -> torch.Tensor:
    """KL(reference || changed) of each token over the vocabulary, float64 [T].

    It is summed as p * (exp(d) - 1 - d) with d = log q - log p. The terms add up to p * -d, since
    both distributions add up to 1, but none is negative, and none cancels another.

    Args:
        reference_TV: logits of any float dtype.
        changed_TV: likewise.
    """
    logp_TV = reference_TV.double().log_softmax(-1)
    d_TV = changed_TV.double().log_softmax(-1) - logp_TV
    return (logp_TV.exp() * (d_TV.expm1() - d_TV)).sum(-1)


def token_k3(
    reference_TV: torch.Tensor, changed_TV: torch.Tensor, tokens_T: torch.Tensor
) -> torch.Tensor:
    """k3 of each token that was sampled, float64 [T]."""
    logps = [logits.double().log_softmax(-1) for logits in (reference_TV, changed_TV)]
    logp_T, logq_T = (x.gather(-1, tokens_T[:, None]).squeeze(-1) for x in logps)
    d_T = logq_T - logp_T
    return d_T.expm1() - d_T
