"""How near XQA comes to the memory's speed in a decode step, as the benchmark of single kernels
measured it: few sequences give it few parts to read at once."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

Shares = Mapping[str, Sequence[tuple[int, float]]]
"""By stack: sequences, ascending, and the part of its time in which K and V would be copied."""


def share(shares: Shares, stack: str, batch: int) -> float:
    """The part for so many sequences, on the line between two that were measured."""
    known = shares[stack]
    if batch <= known[0][0]:
        return known[0][1]
    for (few, low), (many, high) in pairwise(known):
        if batch <= many:
            return low + (high - low) * math.log(batch / few) / math.log(many / few)
    return known[-1][1]
