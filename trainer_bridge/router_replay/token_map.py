"""Which token of a forward pass is which position of which sequence.

Shapes: N tokens of a forward pass, in the order of ``input_ids`` flattened; B sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

NOWHERE = -1


@dataclass(frozen=True)
class TokenMap:
    """The tokens of one forward pass: padded or packed sequences, or parts of them."""

    sequence_N: torch.Tensor
    """Index of each token's sequence, -1 for padding; int64 on the CPU."""
    position_N: torch.Tensor
    """Its position in prompt and response, from 0."""
    whole: bool
    """Whether positions were counted here, so that every sequence must be complete."""
    sequences: int
    """How many there are, those without a token here too."""

    @classmethod
    def of(
        cls,
        attention_mask: torch.Tensor | None,
        sequence_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
    ) -> "TokenMap":
        """From the arguments of ``replay_routing``."""
        if attention_mask is not None and sequence_ids is None:
            sequence_ids = _of_mask(attention_mask)
        elif sequence_ids is None or attention_mask is not None:
            raise ValueError(
                "router replay: pass either attention_mask (padded batches) or sequence_ids "
                "(packed ones), to say which token is which"
            )
        sequence_N = sequence_ids.detach().cpu().long().flatten()
        sequences = int(sequence_N.max()) + 1 if sequence_N.numel() else 0
        if attention_mask is not None:  # its last rows may be padding alone
            sequences = len(attention_mask)
        if position_ids is None:
            return cls(sequence_N, _rank_within(sequence_N), True, sequences)
        position_N = position_ids.detach().cpu().long().flatten()
        if position_N.shape != sequence_N.shape:
            raise ValueError(
                f"router replay: {position_N.numel()} position_ids for {sequence_N.numel()} "
                f"tokens; pass both in the shape of input_ids"
            )
        return cls(sequence_N, position_N, False, sequences)

    def rows(self, lengths: Sequence[int]) -> torch.Tensor:
        """Each token's row in the concatenated rows of all sequences, int64 [N].

        -1 for padding, for the last token of a sequence, which the engine sampled and never ran,
        and for a sequence without rows.

        Args:
            lengths: number of rows of each sequence.
        """
        if self.sequence_N.numel() and int(self.sequence_N.max()) >= len(lengths):
            raise ValueError(
                f"router replay: a token belongs to sequence {int(self.sequence_N.max())}, and "
                f"there are experts of {len(lengths)}; pass the experts of all sequences"
            )
        real_N = self.sequence_N >= 0
        length_B = torch.tensor(lengths, dtype=torch.long)
        count_B = torch.bincount(self.sequence_N[real_N], minlength=len(lengths))
        if not real_N.any():
            return torch.full_like(self.sequence_N, NOWHERE)
        sequence_N = self.sequence_N.clamp(min=0)
        length_N = length_B[sequence_N]
        outside_N = (self.position_N < 0) | (self.position_N > length_N) & (length_N > 0)
        wrong_B = torch.zeros(len(lengths), dtype=torch.bool)
        wrong_B[self.sequence_N[real_N & outside_N]] = True
        if self.whole:
            wrong_B |= (count_B > 0) & (count_B < length_B)
        if bool(wrong_B.any()):
            index = int(wrong_B.nonzero()[0])
            raise ValueError(
                f"router replay: sequence {index} has {int(count_B[index])} tokens here and "
                f"experts for {lengths[index]}; pass all tokens of prompt and response, with or "
                f"without the last, or position_ids if the sequence is incomplete"
            )
        first_B = length_B.cumsum(0) - length_B
        known_N = real_N & (self.position_N < length_N)
        return torch.where(known_N, first_B[sequence_N] + self.position_N, NOWHERE)

    def split(self, values_NX: torch.Tensor) -> list[torch.Tensor]:
        """The values of each sequence's tokens by position, without padding."""
        found = []
        for index in range(self.sequences):
            mine = (self.sequence_N == index).nonzero().squeeze(1)
            found.append(values_NX[mine[self.position_N[mine].argsort()]])
        return found


def _of_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    if attention_mask.dim() != 2:
        raise ValueError(
            f"router replay: attention_mask has {attention_mask.dim()} dimensions; pass the "
            f"[batch, tokens] mask that is 0 at padding"
        )
    row_B1 = torch.arange(len(attention_mask), device=attention_mask.device).unsqueeze(1)
    return torch.where(attention_mask != 0, row_B1, NOWHERE)


def _rank_within(sequence_N: torch.Tensor) -> torch.Tensor:
    """How many earlier tokens belong to the same sequence."""
    sorted_N, order_N = sequence_N.sort(stable=True)
    first_N = torch.searchsorted(sorted_N, sorted_N)
    rank_N = torch.arange(len(sequence_N)) - first_N
    return torch.empty_like(sequence_N).scatter_(0, order_N, rank_N)
