"""The Triton kernel of ``split_k.py``."""
# Triton comes without types.
# mypy: disable-error-code="untyped-decorator"

import triton
import triton.language as tl
from triton.language.extra import cuda

from sgl_fp8rl.numerics.reference import BLOCK

_K = tl.constexpr(BLOCK)
_ABREAST = tl.constexpr(4)  # parts in flight while a tile is summed: their latency is what it costs


# Of sizes that differ from call to call no kernels of their own.
@triton.jit(
    do_not_specialize=[
        "M",
        "token_fours",
        "token_tiles",
        "tiles",
        "k_blocks",
        "scales_fours",
        "weight_scales_n",
    ]
)
def multiply(
    codes: tl.tensor_descriptor,
    weight: tl.tensor_descriptor,
    scales: tl.tensor,
    weight_scales: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    arrivals: tl.tensor,
    M: int,
    token_fours: int,
    token_tiles: int,
    tiles: int,
    k_blocks: int,
    scales_fours: int,
    weight_scales_n: int,
    weight_scales_k: int,
    out_m: int,
    out_n: int,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A run of units: K blocks of tiles of ``ROWS`` weight rows and ``TOKENS`` tokens.

    ``token_fours``: of M, rounded up; ``scales_fours``: of the stride of K; ``WHOLE``: M is whole
    tiles. ``arrivals`` holds a zero for each tile, and again when the kernel ends.
    """
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    scales_k = scales_fours * 4
    units = tiles * k_blocks
    first = program * units // programs
    end = (program + 1) * units // programs
    row = tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    for tile in range(first // k_blocks, (end - 1) // k_blocks + 1):
        begin = tile * k_blocks
        k_first = tl.maximum(first - begin, 0)
        k_end = tl.minimum(end - begin, k_blocks)
        row_0 = (tile // token_tiles) * ROWS
        token_0 = (tile % token_tiles) * TOKENS

        if ROWS > _K:
            weight_scales_of = weight_scales + (row_0 + row) // _K * weight_scales_n
        else:
            weight_scales_of = weight_scales + row_0 // _K * weight_scales_n
        total = tl.zeros((ROWS, TOKENS), tl.float32)
        for k in range(k_first, k_end):
            # Read before the product and used after it, which hides how long that takes.
            scales_of = scales + (token_0 + k * scales_k) + token
            if WHOLE:
                scale = tl.load(scales_of)
            else:
                # By fours, so that one load takes several; what pads the last is not stored.
                scale = tl.load(scales_of, token_0 + token < token_fours * 4)
            weight_scale = tl.load(weight_scales_of + k * weight_scales_k)
            w = weight.load([row_0, k * _K])
            x = codes.load([token_0, k * _K])
            product = tl.dot(w, x.T)
            if ROWS > _K:
                total += product * (weight_scale[:, None] * scale[None, :])
            else:
                total += product * (weight_scale * scale)[None, :]

        there = (token_0 + token < M)[None, :]
        outs = out + (row_0 + row)[:, None] * out_n + (token_0 + token)[None, :] * out_m
        if k_end - k_first == k_blocks:
            tl.store(outs, total.to(tl.bfloat16), there)
        else:
            # The program of unit u is the last i with i * units // programs <= u.
            head = ((begin + 1) * programs - 1) // units
            tail = ((begin + k_blocks) * programs - 1) // units
            here = parts + row[:, None] * TOKENS + token[None, :]
            # A program can share two tiles: the one that it begins in, and the one it ends in.
            slot = program * 2 + (program == head).to(tl.int32)
            fours = (token_0 + token < token_fours * 4)[None, :]
            tl.store(here + slot * (ROWS * TOKENS), total, fours, cache_modifier=".cg")
            tl.debug_barrier()
            if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == tail - head:
                tl.store(arrivals + tile, 0)
                total = tl.zeros((ROWS, TOKENS), tl.float32)
                for i in range(head, tail + 1, _ABREAST):
                    for j in tl.static_range(_ABREAST):
                        slot = (i + j) * 2 + (i + j == head).to(tl.int32)
                        total += tl.load(
                            here + slot * (ROWS * TOKENS),
                            fours & (i + j <= tail),
                            0.0,
                            cache_modifier=".cg",
                        )
                tl.store(outs, total.to(tl.bfloat16), there)
