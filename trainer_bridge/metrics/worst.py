"""The tokens on which rollout and trainer differ most: look at them first after an alarm.

Shapes: B sequences, T tokens of the longest response.
"""

from dataclasses import dataclass

import torch

from sgl_fp8rl.protocol.values import whole
from trainer_bridge.metrics.batch_inputs import check_tensors, fault_of


@dataclass(frozen=True)
class TokenMismatch:
    """A token to which rollout and trainer assign different logprobs."""

    sequence: int
    """Its row in the batch."""
    position: int
    """Its position in the response, from 0."""
    length: int
    """Unmasked tokens of that response."""
    alive: int
    """Sequences with a token at this position: about the engine's batch size then, if all began
    together."""
    trainer_logprob: float
    """In nats."""
    rollout_logprob: float
    """In nats."""


def worst_tokens(
    trainer_logprobs_BT: torch.Tensor,
    rollout_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    count: int = 8,
) -> list[TokenMismatch]:
    """The ``count`` tokens of this rank whose logprobs differ most, worst first.

    Metrics of a batch cannot distinguish one misaligned token from a layer that is wrong for all.
    This synchronizes with the GPU, so call it after an alarm and not in each step.

    Args:
        trainer_logprobs_BT: any float dtype and device; may hold anything outside mask_BT.
        rollout_logprobs_BT: any float dtype and device.
        mask_BT: bool, any device.
        count: at most this many.

    Returns:
        The tokens; fewer than ``count`` if the mask has fewer.

    Raises:
        ValueError: shapes differ, logprobs are not floats, the mask is not bool, or ``count`` is
            not a whole number from 0 up.
    """
    count = whole("worst_tokens: count", count, least=0)
    given = {"trainer_logprobs_BT": trainer_logprobs_BT, "rollout_logprobs_BT": rollout_logprobs_BT}
    check_tensors("worst_tokens", **given, mask_BT=mask_BT)
    device = trainer_logprobs_BT.device
    mask_BT = mask_BT.to(device)
    given = {name: tensor.detach().to(device) for name, tensor in given.items()}
    if fault := fault_of("pass [B, T] of the same tokens", mask_BT=mask_BT, **given):
        raise ValueError(f"worst_tokens: {fault}")
    trainer_BT, rollout_BT = (tensor.double() for tensor in given.values())
    distance_BT = (trainer_BT - rollout_BT).abs().nan_to_num(torch.inf).where(mask_BT, -1.0)
    most = min(count, int(mask_BT.sum()))
    index = distance_BT.flatten().topk(most).indices
    rows, columns = index // mask_BT.shape[1], index % mask_BT.shape[1]
    numbers = torch.stack(
        [
            rows.double(),
            columns.double(),
            mask_BT.sum(1)[rows].double(),
            mask_BT.sum(0)[columns].double(),
            trainer_BT[rows, columns],
            rollout_BT[rows, columns],
        ],
        dim=1,
    ).tolist()
    return [TokenMismatch(*map(int, found[:4]), *found[4:]) for found in numbers]
