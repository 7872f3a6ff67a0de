"""The head of a model that ties it to its embedding: trainers send it beside the embedding, and the
engine keeps one tensor for both. So it must equal the embedding, and is not sent.

The embedding is known by its shape, which the engine tells. Shape suffixes: V vocabulary, H hidden.
"""

import logging
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from sgl_fp8rl.formats.weight_format import WEIGHT_DTYPES
from sgl_fp8rl.protocol.manifest import TIED_HEAD, ManifestError, wrong_shape
from sgl_fp8rl.protocol.values import attempt
from trainer_bridge.sources.parameters import Named

logger = logging.getLogger(__name__)

AT_ONCE = 1 << 22
"""Elements that are compared at once: unlike heads differ among the first."""
_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)
UNLIKE = (
    f"{TIED_HEAD} is not the embedding, and this engine ties the two; train with tied embeddings, "
    f"or start the engine on a checkpoint whose tie_word_embeddings is false"
)


def repeats_embedding(named: Named) -> bool | None:
    """Whether the head equals another tensor of its shape, as far as this rank holds them.

    Collective over the mesh of DTensors that lie differently. Tensors are compared where they lie,
    in the narrower of two dtypes; the same memory takes no time.

    Returns:
        None where there is no head, or nothing of its shape.
    """
    head = next((tensor for name, tensor in named if name == TIED_HEAD), None)
    if head is None:
        return None
    others = [t for name, t in named if name != TIED_HEAD and t.shape == head.shape]
    # all of them, since a comparison may be a collective
    same = [_equal(head, other) for other in others]
    return any(same) if others else None


def repeats_here(named: Named) -> bool | None:
    """``repeats_embedding`` on one of several ranks: what fails counts as unlike, since the others
    wait for this one."""
    repeats, error = attempt(repeats_embedding, named)
    if error is None:
        return repeats
    logger.error("the head cannot be compared with the embedding", exc_info=error)
    return False


def check_head(named: Named, tied: list[int] | None, repeats: bool | None) -> None:
    """Check the head of an update of an engine that ties it.

    Args:
        tied: shape of the engine's embedding; None where the engine does not tie.
        repeats: what ``repeats_embedding`` returned, on all ranks together.
    """
    if tied is None:
        return
    for name, tensor in named:
        if name == TIED_HEAD and list(tensor.shape) != tied:
            raise ManifestError(wrong_shape(name, tensor.shape, tied))
    if repeats is False:
        raise ManifestError(UNLIKE)


def on_all_ranks(found: Iterable[bool | None]) -> bool | None:
    """What ``repeats_embedding`` returned on each rank, together."""
    known = {each for each in found if each is not None}
    return None if not known else known == {True}


class StreamedHead:
    """The head and the embedding of one stream, which come one after the other: of each, only a sum
    by row is kept.

    Args:
        tied: as for ``check_head``.
    """

    def __init__(self, tied: list[int] | None, dtype: torch.dtype) -> None:
        self._tied, self._dtype = tied, dtype
        self._head: torch.Tensor | None = None
        self._others: list[torch.Tensor] = []

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Note the next tensor of the stream."""
        if self._tied is None:
            return
        if name == TIED_HEAD:
            check_head([(name, tensor)], self._tied, None)
            self._head = _sums(tensor, self._dtype)
        elif list(tensor.shape) == self._tied:
            self._others.append(_sums(tensor, self._dtype))

    def check(self) -> None:
        """Check the head at the end of the stream."""
        head, others = self._head, self._others
        if head is None or not others:
            return
        if not any(torch.equal(head, other.to(head.device)) for other in others):
            raise ManifestError(UNLIKE)


@torch.no_grad()
def _equal(head: torch.Tensor, other: torch.Tensor) -> bool:
    head, other = _aligned(head.detach(), other.detach())
    if head.dtype != other.dtype and not {head.dtype, other.dtype} <= {*WEIGHT_DTYPES}:
        return False
    dtype = min(head.dtype, other.dtype, key=lambda each: each.itemsize)
    same = head.data_ptr() == other.data_ptr() and head.stride() == other.stride()
    if (same and head.dtype == other.dtype) or not head.numel():
        return True
    rows = max(AT_ONCE // max(head[0].numel(), 1), 1)
    pairs = zip(head.split(rows), other.split(rows), strict=True)
    return all(torch.equal(_bits(a, dtype), _bits(b, dtype).to(a.device)) for a, b in pairs)


def _aligned(head: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank holds of both, the same elements of each."""
    mesh = next((t for t in (other, head) if isinstance(t, DTensor)), None)
    if mesh is None:
        return head, other
    where = mesh.device_mesh, mesh.placements

    def held(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):  # whole on each rank
            local = tensor.to(where[0].device_type)
            tensor = distribute_tensor(local, *where, src_data_rank=None)
        elif tensor.device_mesh != where[0]:
            tensor = distribute_tensor(tensor.full_tensor(), *where, src_data_rank=None)
        elif tensor.placements != where[1]:
            tensor = tensor.redistribute(*where)
        return tensor.to_local()

    return held(head), held(other)


def _bits(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As integers, so that NaN equals itself: it is found where weights are checked."""
    return part.to(dtype).contiguous().view(torch.int16 if dtype.itemsize == 2 else torch.int32)


def as_words(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The bits of a contiguous tensor, as integers of the widest type that so many bytes and its
    place in memory are whole numbers of."""
    start = tensor.storage_offset() * tensor.itemsize
    return tensor.view(next(w for w in _WORDS if start % w.itemsize == nbytes % w.itemsize == 0))


@torch.no_grad()
def _sums(tensor_VH: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of each row, the sum of its words times odd numbers, modulo 2**64: a changed word changes it,
    and so do two that change places. Int64 ``[V]``, in one pass and without a copy of the whole."""
    if tensor_VH.dtype in WEIGHT_DTYPES:
        tensor_VH = tensor_VH.to(dtype)
    tensor_VH = tensor_VH.detach().contiguous()
    words = as_words(tensor_VH, tensor_VH.shape[1] * tensor_VH.itemsize)
    seeded = torch.Generator().manual_seed(0)
    odd = (torch.randint(1 << 62, words.shape[1:], generator=seeded) * 2 + 1).to(words.device)
    step = max(AT_ONCE // words.shape[1], 1)
    return torch.cat([(part * odd).sum(1) for part in words.split(step)])
