"""Where in a batch rollout and trainer differ most: the first thing to look at after an alarm.

Shapes: B sequences, T tokens of the longest response.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenMismatch:
    """A token that rollout and trainer find differently likely."""

    sequence: int
    """Its row in the batch."""
    position: int
    """Its place in the response."""
    length: int
    """Tokens of that response that count."""
    alive: int
    """Sequences that have a token at this position: about how many the engine still sampled from
    then, where all began together."""
    trainer_logprob: float
    rollout_logprob: float


def worst_tokens(
    trainer_logprobs_BT: torch.Tensor,
    rollout_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    count: int = 8,
) -> list[TokenMismatch]:
    """The ``count`` tokens of this rank whose logprobs differ most, the worst first.

    A metric of a whole batch does not tell one token with another's logprob from a layer that is
    wrong for all. It waits for a GPU, so ask it after an alarm rather than at each step.

    Args:
        trainer_logprobs_BT: float, on any device; positions outside mask_BT may hold anything.
        rollout_logprobs_BT: float, on any device.
        mask_BT: bool.
    """
    device = trainer_logprobs_BT.device
    mask_BT = mask_BT.to(device)
    trainer_BT = trainer_logprobs_BT.detach().double()
    rollout_BT = rollout_logprobs_BT.to(device).double()
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
