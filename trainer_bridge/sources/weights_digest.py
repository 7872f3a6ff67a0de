"""A digest of the weights that a rank holds: whether a second try at an update brings the same.

It reads all of them once, and is made only where an update did not reach every engine.
"""

import hashlib

import torch
from torch.distributed.tensor import DTensor

from trainer_bridge.sources.parameters import Named

_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)


def weights_digest(named: Named) -> str:
    """SHA-256 over name, type, shape and the sum of the bits of each tensor, or this rank's shard.

    The sum is of 64-bit words, or of narrower ones where a tensor has no whole number of them. A
    step of an optimizer changes it; words that change places do not.
    """
    found = []
    for name, tensor in named:
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        total = _words(local.contiguous().view(-1)).sum(dtype=torch.int64)
        found.append((name, str(local.dtype), tuple(local.shape), total))
    # sums are read when all are queued; in one order, whatever the trainer's is
    content = sorted((*described, int(total)) for *described, total in found)
    return hashlib.sha256(repr(content).encode()).hexdigest()


def _words(flat: torch.Tensor) -> torch.Tensor:
    """The bits of a flat tensor, as integers of the widest type that fits."""
    start, nbytes = flat.storage_offset() * flat.itemsize, flat.numel() * flat.itemsize
    return flat.view(next(w for w in _WORDS if start % w.itemsize == nbytes % w.itemsize == 0))
