"""Requests with NaN or infinite logits, as where activations overflow: each fails alone.

Stock's draw raises on NaN, on a GPU by an assertion that ends its context. Here such a row draws
some token, and is noted beside the logits until the scheduler takes up the tokens. Nothing waits
for the GPU before that.

Shape suffixes: B rows (sequences), V vocabulary.
"""

from http import HTTPStatus
from typing import Any, NamedTuple

import torch

from sgl_fp8rl.engine import compat

MESSAGE = (
    "the logits of this request are not finite: the policy's weights or KV scales overflow its "
    "activations; update with sound ones"
)


class Lost(NamedTuple):
    """Which rows of a batch are lost."""

    rows_B: torch.Tensor
    """On the host."""
    copied: torch.cuda.Event | None
    """When they are there, where they came from a GPU."""


def note(logits_output: Any, lost_B: torch.Tensor) -> None:
    """Remember which rows are lost, behind what is on the GPU's stream."""
    noted = lost_B.to("cpu", non_blocking=True)
    done = None
    if lost_B.is_cuda:
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(lost_B.device))
    logits_output.fp8rl_lost = Lost(noted, done)


def lost_before_draw(logits_BV: torch.Tensor, temperatures_B1: torch.Tensor) -> torch.Tensor:
    """Rows that no draw can take: with NaN or Inf once divided, or all -Inf. They become zeros."""
    compat.sanitize_nan_logits(logits_BV, "logits")  # where SGLang is told to
    lost_B = ~(logits_BV.amax(-1) / temperatures_B1[: len(logits_BV)].view(-1)).isfinite()
    logits_BV.masked_fill_(lost_B.unsqueeze(1), 0.0)
    return lost_B


def lost_of_greedy(logits_BV: torch.Tensor, tokens_B: torch.Tensor) -> torch.Tensor:
    """Rows whose largest logit is NaN or Inf, which it is if any is; the others may be masked."""
    return ~(logits_BV.gather(1, tokens_B.long().unsqueeze(1)).squeeze(1) < torch.inf)


def fail_lost(original: Any, processor: Any, batch: Any, result: Any, *more: Any) -> Any:
    """AROUND the steps of the scheduler that take up the tokens of a batch."""
    output = getattr(result, "logits_output", None)  # embeddings have none
    lost: Lost | None = getattr(output, "fp8rl_lost", None)
    if lost is not None:
        if lost.copied is not None:
            lost.copied.synchronize()
        for row in lost.rows_B.nonzero().flatten().tolist():
            request = batch.reqs[row]
            # a part of a prompt brings no token yet
            goes_on = not (request.finished() or request.is_retracted)
            if request.inflight_middle_chunks <= 0 and goes_on:
                request.to_finish = compat.FINISH_ABORT(MESSAGE, HTTPStatus.INTERNAL_SERVER_ERROR)
    return original(processor, batch, result, *more)
