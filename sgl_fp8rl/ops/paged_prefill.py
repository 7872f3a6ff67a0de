"""Attention of a prefill over a paged KV cache of 8-bit codes: some sequences at a time, their
pages become 16-bit values side by side, and a kernel of 16 bits attends to these.

Shape suffixes: B sequences, N query tokens of all of them, Q query heads, H KV heads, P pages, W
tokens of the workspace, T tokens of a sequence, D head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from sgl_fp8rl.ops.paged_decode import Codes, attend_last

REFERENCE_ROWS = 128
"""Query tokens whose scores the reference keeps at once."""


@dataclass(frozen=True)
class Group:
    """Sequences whose values are in the workspace together."""

    rows: slice
    """Their query tokens."""
    pages_P: torch.Tensor
    """int32: their pages, one sequence after the other."""
    page_size: int
    starts_q: torch.Tensor
    """int32 ``[B + 1]``: their first query tokens, counted from the group's first; and the end."""
    starts_k: torch.Tensor
    """int32 ``[B + 1]``: their first tokens in the workspace, and the end; pages are whole."""
    lengths_k: torch.Tensor
    """int32 ``[B]``."""
    longest_q: int
    longest_k: int


Kernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Group, slice, torch.Tensor],
    None,
]
"""Writes attention of q ``[N, Q, D]`` over K and V ``[W, H, D]`` of a group into ``[N, Q, D]``: of
each sequence's last tokens, each to those up to itself. The slice says which query heads of the
layer these are."""


class Workspace:
    """The values that a kernel attends to, for all layers, and the plan of the current batch.

    Args:
        heads: KV heads of a layer.
        longest: tokens of the longest sequence, in whole pages.
        dtype: FP16 or BF16.
        size: in bytes.

    Raises:
        ValueError: one head of the longest sequence does not fit.
    """

    def __init__(
        self,
        heads: int,
        dim: int,
        longest: int,
        dtype: torch.dtype,
        device: torch.device,
        size: int,
    ) -> None:
        self.row = size // (2 * dtype.itemsize * dim)
        """Heads of tokens."""
        if longest > self.row:
            raise ValueError(
                f"a sequence of {longest} tokens does not fit into the workspace of an 8-bit KV "
                f"cache, which holds {self.row}; start with a smaller --context-length, or an E4M3 "
                f"cache with --prefill-attention-backend flashinfer"
            )
        self.heads = heads
        # a kernel reads what its group wrote, and nothing of earlier ones
        self.k_WD, self.v_WD = torch.empty(2, self.row, dim, dtype=dtype, device=device)
        self.planned: torch.Tensor | None = None
        """What the plan is of: any tensor of the batch."""
        self.groups: list[Group] = []

    def plan(
        self,
        batch: torch.Tensor,
        extends: Sequence[int],
        lengths: Sequence[int],
        table_BP: torch.Tensor,
        page_size: int,
    ) -> None:
        """Once a batch, before its layers.

        Args:
            batch: any tensor that no other batch has.
            extends: query tokens of each sequence.
            lengths: its tokens, those of q among them.
            table_BP: int32, contiguous: the pages of each sequence, in order.
        """
        self.planned, self.groups = None, []
        capacity = self.row // self.heads
        pages = [-(-length // page_size) for length in lengths]
        first, row = 0, 0
        while first < len(pages):
            last, held = first + 1, pages[first]
            while last < len(pages) and (held + pages[last]) * page_size <= capacity:
                held += pages[last]
                last += 1
            several = slice(first, last)
            mine = extends[several], lengths[several], pages[several]
            self.groups.append(_group(row, *mine, table_BP[several], page_size))
            first, row = last, self.groups[-1].rows.stop
        self.planned = batch


def _group(
    row: int,
    extends: Sequence[int],
    lengths: Sequence[int],
    counts: Sequence[int],
    table_BP: torch.Tensor,
    page_size: int,
) -> Group:
    """``counts``: pages of each sequence."""
    starts_q = list(accumulate(extends, initial=0))
    starts_k = list(accumulate((count * page_size for count in counts), initial=0))
    numbers = torch.tensor([*starts_q, *starts_k, *lengths, *counts], dtype=torch.int32)
    B, P, device = len(counts), sum(counts), table_BP.device
    moved = numbers.to(device, non_blocking=True).split([B + 1, B + 1, B, B])
    on_q, on_k, lengths_k, counts_B = moved
    # of page p of the group: its place in the table
    first_B = torch.arange(B, device=device) * table_BP.shape[1] - (counts_B.cumsum(0) - counts_B)
    first_P = first_B.repeat_interleave(counts_B, output_size=P)
    places_P = first_P + torch.arange(P, device=device)
    return Group(
        slice(row, row + starts_q[-1]),
        table_BP.flatten()[places_P],
        page_size,
        on_q,
        on_k,
        lengths_k,
        max(extends),
        max(lengths),
    )


def attend(q_NQD: torch.Tensor, codes: Codes, workspace: Workspace, kernel: Kernel) -> torch.Tensor:
    """Attention of a batch that ``workspace.plan`` was made of, as q: ``[N, Q, D]``.

    A sequence that is longer than the workspace is attended to a few heads at a time. Tokens of q
    behind those of the plan get 0.

    Args:
        q_NQD: of the workspace's dtype.
    """
    N, (heads, dim) = q_NQD.shape[0], codes.k_SHD.shape[1:]
    group_size = q_NQD.shape[1] // heads
    if q_NQD.is_cuda:
        from sgl_fp8rl.ops.kv_pages_triton import dequantize_pages
    else:
        from sgl_fp8rl.ops.kv_pages import dequantize_pages
    out_NQD = torch.empty(q_NQD.shape, dtype=q_NQD.dtype, device=q_NQD.device)
    last = workspace.groups[-1].rows.stop if workspace.groups else 0
    if last < N:
        out_NQD[last:] = 0
    for group in workspace.groups:
        tokens = len(group.pages_P) * group.page_size
        if not tokens:
            continue
        q, out = q_NQD[group.rows], out_NQD[group.rows]
        step = min(heads, max(1, workspace.row // tokens))
        for first in range(0, heads, step):
            several = slice(first, min(first + step, heads))
            count = several.stop - first
            k_WHD, v_WHD = (
                x_WD[: tokens * count].view(tokens, count, dim)
                for x_WD in (workspace.k_WD, workspace.v_WD)
            )
            part = codes if step == heads else codes.of_heads(several)
            dequantize_pages(part, group.pages_P, group.page_size, k_WHD, v_WHD)
            of_q = slice(first * group_size, several.stop * group_size)
            kernel(q[:, of_q], k_WHD, v_WHD, group, of_q, out[:, of_q])
    return out_NQD


def reference(
    scale: float,
    window: int | None = None,
    logit_cap: float = 0.0,
    sinks_Q: torch.Tensor | None = None,
) -> Kernel:
    """A kernel in plain torch, with sums in FP32; its arguments are those of ``paged_decode``."""

    def kernel(
        q_NQD: torch.Tensor,
        k_WHD: torch.Tensor,
        v_WHD: torch.Tensor,
        group: Group,
        heads: slice,
        out_NQD: torch.Tensor,
    ) -> None:
        kind = scale, window, logit_cap, None if sinks_Q is None else sinks_Q[heads]
        bounds = pairwise(group.starts_q.tolist())
        places = zip(group.starts_k.tolist(), group.lengths_k.tolist(), strict=False)
        for (row, stop), (start, length) in zip(bounds, places, strict=True):
            for first in range(row, stop, REFERENCE_ROWS):
                last = min(first + REFERENCE_ROWS, stop)
                seen = slice(start, start + length - (stop - last))
                k_THD, v_THD = k_WHD[seen].float(), v_WHD[seen].float()
                out_NQD[first:last] = attend_last(q_NQD[first:last], k_THD, v_THD, *kind)

    return kernel
