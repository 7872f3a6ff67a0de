"""Draw one token per row on the GPU: each logit and its noise are read once.

A first kernel reduces each chunk of a row to its maximum, its sum of exponentials and its winner; a
second computes the row's log-sum-exp and compares the winners, on one scale. Results are those of
``sample.py`` to FP32 rounding: the token differs only if the two best are that close.
"""

import torch
import triton
import triton.language as tl

from sgl_fp8rl.ops.sample import LEAST_NOISE

CHUNK = 4096
"""Logits per program. Many small programs fill a GPU even at 32 rows."""
_WARPS = 4
_LEAST = tl.constexpr(LEAST_NOISE)


def sample(
    logits_BV: torch.Tensor, temperatures_B1: torch.Tensor, noise_BV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``sample.sample`` on the current stream, without synchronization.

    Args:
        logits_BV: FP32, at least one row and one column; the elements of a row are contiguous.
        temperatures_B1: FP32, contiguous.
        noise_BV: FP32; the elements of a row are contiguous.
    """
    rows, vocab = logits_BV.shape
    chunks = -(-vocab // CHUNK)
    maxima_BC = logits_BV.new_empty(rows, chunks)
    sums_BC = torch.empty_like(maxima_BC)
    winners_BC = torch.empty_like(maxima_BC, dtype=torch.int32)
    tokens_B = winners_BC.new_empty(rows)
    logprobs_B = maxima_BC.new_empty(rows)
    sources = logits_BV, logits_BV.stride(0), temperatures_B1, noise_BV, noise_BV.stride(0)
    parts = maxima_BC, sums_BC, winners_BC
    width = 1 << (chunks - 1).bit_length()
    with torch.cuda.device_of(logits_BV):  # a kernel starts on the current device
        _reduce_chunk[chunks, rows](*sources, *parts, vocab, CHUNK=CHUNK, num_warps=_WARPS)
        _draw_row[rows,](
            *sources,
            *parts,
            tokens_B,
            logprobs_B,
            chunks,
            WIDTH=width,
            num_warps=1,
        )
    return tokens_B, logprobs_B


@triton.jit
def _load_scaled(pointers: tl.tensor, inside: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Logits over the temperature, rounded as torch rounds a division."""
    x = tl.load(pointers, inside, -float("inf"))
    if temperature != 1.0:
        x = tl.div_rn(x, temperature)
    return x


@triton.jit
def _reduce_chunk(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    temperatures: tl.tensor,
    noise: tl.tensor,
    noise_stride: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    winners: tl.tensor,
    vocab: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = tokens < vocab
    x = _load_scaled(logits + row * logits_stride + tokens, inside, tl.load(temperatures + row))
    q = tl.maximum(tl.load(noise + row * noise_stride + tokens, inside, 1.0), _LEAST)
    maximum = tl.max(x, 0)
    # A grammar may mask a whole chunk; its weights are zero, not NaN.
    weights = tl.exp(x - tl.where(maximum == -float("inf"), 0.0, maximum))
    part = row * tl.num_programs(0) + chunk
    tl.store(maxima + part, maximum)
    tl.store(sums + part, tl.sum(weights, 0))
    # Not below zero, nor NaN: then the first of equals wins, which is inside the row.
    winner = tl.argmax(tl.maximum(weights / q, 0.0), 0)
    tl.store(winners + part, chunk * CHUNK + winner)


@triton.jit
def _draw_row(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    temperatures: tl.tensor,
    noise: tl.tensor,
    noise_stride: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    winners: tl.tensor,
    tokens: tl.tensor,
    logprobs: tl.tensor,
    chunks: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, WIDTH)
    inside = chunk < chunks
    parts = row * chunks + chunk
    part_maxima = tl.load(maxima + parts, inside, -float("inf"))
    maximum = tl.max(part_maxima, 0)
    # NaN if any part is, or if all are -inf.
    total = tl.sum(tl.load(sums + parts, inside, 0.0) * tl.exp(part_maxima - maximum), 0)

    winner = tl.load(winners + parts, inside, 0)
    x = _load_scaled(logits + row * logits_stride + winner, inside, tl.load(temperatures + row))
    x -= maximum
    q = tl.maximum(tl.load(noise + row * noise_stride + winner, inside, 1.0), _LEAST)
    best = chunk == tl.argmax(tl.maximum(tl.exp(x) / total / q, 0.0), 0)
    token = tl.sum(tl.where(best, winner, 0), 0)
    logprob = tl.sum(tl.where(best, x, 0.0), 0) - tl.log(total)
    tl.store(tokens + row, tl.where(logprob == logprob, token, 0))
    tl.store(logprobs + row, logprob)
