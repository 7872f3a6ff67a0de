"""Terms of a loss beside the policy's: how values of tokens are reduced, and the KL to a reference.

Shapes: B sequences, T tokens of the longest response.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch

from sgl_fp8rl.protocol.values import whole
from trainer_bridge.correction.correction import Correction
from trainer_bridge.metrics.batch_inputs import (
    MOST_LOGPROB,
    NOT_LOGPROBS,
    check_tensors,
    fault_of,
)
from trainer_bridge.metrics.mismatch import bounded

Reduction: TypeAlias = Literal["tokens", "sequences", "constant"]
Estimator: TypeAlias = Literal["k1", "k2", "k3"]


def reduce_tokens(
    values_BT: torch.Tensor,
    correction: Correction,
    reduce: Reduction,
    *,
    max_tokens: int | None = None,
) -> torch.Tensor:
    """A micro-batch's part of the mean of the whole batch on all ranks, as ``policy_loss`` has it.

    An entropy bonus (A3C: Mnih et al. 2016, arXiv:1602.01783) and a KL to a reference are terms of
    it: ``loss - 0.01 * reduce_tokens(entropy_BT, correction[rows], "tokens")``.

    Args:
        values_BT: of each token, any float dtype; what is outside the mask gets gradient 0.
        correction: the batch's; of a micro-batch, ``correction[rows]``.
        reduce: as for ``policy_loss``.
        max_tokens: as for ``policy_loss``.

    Returns:
        A scalar with gradient; FP32, or FP64 where values_BT are.

    Raises:
        ValueError: the shape differs, values are not floats, or the reduction is unknown.
    """
    check_reduction("reduce_tokens", reduce, max_tokens, get_args(Reduction))
    check_tensors("reduce_tokens", values_BT=values_BT)
    mask_BT = correction.mask_BT
    remedy = "pass a value of each token, and for a micro-batch correction[rows]"
    if fault := fault_of(remedy, values_BT=values_BT, mask_BT=mask_BT):
        raise ValueError(f"reduce_tokens: {fault}")
    wide = torch.promote_types(values_BT.dtype, torch.float32)
    return reduced(values_BT.to(wide).masked_fill(~mask_BT, 0.0), correction, reduce, max_tokens)


def reduced(
    values_BT: torch.Tensor, correction: Correction, reduce: str, max_tokens: int | None
) -> torch.Tensor:
    """``reduce_tokens`` of values that are checked, and 0 outside the mask."""
    if reduce == "sequences":
        values_BT = values_BT / counted(correction.mask_BT)
    parts = correction.tokens if reduce == "tokens" else correction.sequences * (max_tokens or 1)
    return values_BT.sum() * correction.ranks / max(parts, 1)


def reference_kl(
    logprobs_BT: torch.Tensor,
    reference_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    estimator: Estimator = "k3",
) -> torch.Tensor:
    """An estimate of KL(policy, reference) at each token that the policy sampled.

    With x = log pi_ref - log pi within +-20 (Schulman 2020, joschu.net/blog/kl-approx.html): k1 is
    -x, k2 is x^2 / 2, k3 is e^x - 1 - x (verl's low_var_kl; GRPO: arXiv:2402.03300). k1 and k3 are
    unbiased. As terms of a loss, in expectation, k2 has the gradient of KL(policy, reference), k3
    that of KL(reference, policy), and k1 none: it is for rewards (Tang and Munos 2025,
    arXiv:2506.09477). For tokens of another policy multiply by ``correction.weights_BT``.

    Args:
        logprobs_BT: of the current policy, any float dtype; with gradient.
        reference_BT: of the reference, at the same temperature; any float dtype, same device. It
            gets no gradient.
        mask_BT: the tokens that count, such as ``correction.mask_BT``; others may hold anything.
        estimator: "k1", "k2" or "k3".

    Returns:
        [B, T] in FP32 or wider, 0 outside the mask; for ``reduce_tokens``.

    Raises:
        ValueError: shapes differ, logprobs are not floats, one that counts is NaN, infinite or
            above 0 (by more than rounding), or the estimator is unknown. Values are checked on the
            device, for which this waits once.
    """
    if estimator not in get_args(Estimator):
        raise ValueError(f"reference_kl: estimator is {estimator!r}; pass k1, k2 or k3")
    given = {"logprobs_BT": logprobs_BT, "reference_BT": reference_BT}
    check_tensors("reference_kl", **given, mask_BT=mask_BT)
    if fault := fault_of("pass both of the same tokens", **given, mask_BT=mask_BT):
        raise ValueError(f"reference_kl: {fault}")
    wide = torch.promote_types(logprobs_BT.dtype, torch.float32)
    logprobs_BT, reference_BT = (
        each.to(wide).masked_fill(~mask_BT, 0.0) for each in (logprobs_BT, reference_BT.detach())
    )
    raise_where(
        "reference_kl", logprob_faults(logprobs_BT) | logprob_faults(reference_BT, "a reference's")
    )
    x_BT = bounded(reference_BT - logprobs_BT)
    if estimator == "k1":
        return -x_BT
    return x_BT.square() / 2 if estimator == "k2" else x_BT.expm1() - x_BT


def counted(mask_BT: torch.Tensor) -> torch.Tensor:
    """Tokens of each sequence, at least 1, int64 [B, 1]."""
    return mask_BT.sum(1, keepdim=True).clamp(min=1)


def check_reduction(caller: str, reduce: str, max_tokens: int | None, known: Sequence[str]) -> None:
    """Check that a reduction is known, and has ``max_tokens`` where it needs them."""
    if reduce not in known:
        raise ValueError(f"{caller}: reduce is {reduce!r}; pass one of {', '.join(known)}")
    if (reduce == "constant") != (max_tokens is not None):
        raise ValueError(
            f"{caller}: reduce is {reduce!r} and max_tokens {max_tokens!r}; pass max_tokens "
            f'with "constant", and with it alone'
        )
    if max_tokens is not None:
        whole(f"{caller}: max_tokens", max_tokens, least=1)


def logprob_faults(logprobs_BT: torch.Tensor, whose: str = "a") -> dict[str, torch.Tensor]:
    """Where logprobs are none, by what is wrong there."""
    logprobs_BT = logprobs_BT.detach()
    return {
        f"{whose} logprob is NaN or infinite; look for NaN or Inf in the logits": (
            ~logprobs_BT.isfinite()
        ),
        f"{whose} logprob is {NOT_LOGPROBS}": logprobs_BT > MOST_LOGPROB,
    }


def raise_where(caller: str, faults: dict[str, torch.Tensor]) -> None:
    """Raise ValueError with the first fault that is True anywhere."""
    found = torch.stack([fault_BT.any() for fault_BT in faults.values()]).tolist()  # one wait
    for fault, is_there in zip(faults, found, strict=True):
        if is_there:
            raise ValueError(f"{caller}: {fault}")
