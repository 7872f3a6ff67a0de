"""The divergence of a changed model's next-token distributions from the model's own.

Shapes: T tokens, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Divergence:
    """Means over tokens, in nats."""

    kl: float
    """KL(model || changed model) over the whole vocabulary, exact."""
    k3: float
    """The same, estimated from the tokens alone: ratio - 1 - log ratio, of changed to model. Its
    expectation is the KL if the tokens are the model's own samples."""
    kl_error: float = 0.0
    """Standard error of ``kl``, as if tokens were independent."""

    @classmethod
    def of_tokens(cls, kl_T: torch.Tensor, k3_T: torch.Tensor) -> "Divergence":
        """Means over tokens; one token has no error."""
        error = kl_T.std() / math.sqrt(len(kl_T)) if len(kl_T) > 1 else kl_T.new_zeros(())
        kl, k3, kl_error = torch.stack([kl_T.mean(), k3_T.mean(), error]).tolist()
        return cls(kl, k3, kl_error)


def token_divergence(
    reference_TV: torch.Tensor, changed_TV: torch.Tensor, tokens_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(reference || changed) of each position over the vocabulary, and k3 of its token.

    KL is summed as p * (exp(d) - 1 - d) with d = log q - log p, the mean of k3 over the vocabulary.
    The sum equals that of p * -d, since both distributions add up to 1, but no term is negative, so
    nothing cancels.

    Args:
        reference_TV: logits of any float dtype.
        changed_TV: logits of any float dtype.
        tokens_T: sampled tokens, int64.

    Returns:
        float64 [T] each.
    """
    logp_TV = reference_TV.double().log_softmax(-1)
    d_TV = changed_TV.double().log_softmax(-1).sub_(logp_TV)
    k3_TV = d_TV.expm1() - d_TV
    k3_T = k3_TV.gather(-1, tokens_T[:, None]).squeeze(-1)
    return k3_TV.mul_(logp_TV.exp_()).sum(-1), k3_T
