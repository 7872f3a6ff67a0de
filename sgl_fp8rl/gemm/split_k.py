"""Block-FP8 GEMM in Triton for decode: few tokens, and all of the weight read once.

``out_MN[m, n] = sum_k scales_Mk[m, k // 128] * scales_nk[n // 128, k // 128] * codes_MK[m, k]
* weight_NK[n, k]``. The sum over one block of 128 is the tensor cores'; it is scaled and added up
in FP32, as DeepGEMM does.

What makes it fast at small M:

- Weight rows take the side of the tensor core's tile that is 64 at least, tokens the side that is
  8 at least, so that a batch of 16 is not padded to 64.
- Work is cut evenly: a unit is one K block of one tile, and every program takes an equal run of
  units, of whatever tiles they are (stream-K, arXiv:2301.03598). As many programs as tiles is one
  tile each; twice as many splits K in two. No SM waits for a second wave.
- Where several programs share a tile, each leaves its FP32 part in a workspace and the last to
  arrive adds the parts in the order of K, so the bits do not depend on which one that is.
"""

import threading
from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from sgl_fp8rl.gemm.split_k_kernel import multiply
from sgl_fp8rl.numerics.reference import BLOCK, FP8_DTYPE

_SMS = 132
"""Of an H100 or H200; fewer or more cost time only."""
_SHARED_BYTES = 226 * 1024
"""Shared memory of an SM for tiles, of 228 KiB: each program takes 1 KiB for itself."""
_COUNTERS = 1 << 20


@dataclass(frozen=True)
class Config:
    """How a product is cut."""

    rows: int
    """Weight rows of a tile: 64, 128 or 256."""
    tokens: int
    """Tokens of a tile: a power of two, 16 to 256."""
    programs: int
    """Among how many programs the K blocks of all tiles are dealt out."""
    num_warps: int
    num_stages: int
    """K blocks of a program that are in shared memory or on their way to it."""
    pdl: bool = False
    """Start while the kernel before on the stream ends (programmatic dependent launch)."""


# For as many tokens at most: (rows, tokens, warps) of a tile and how many programs an SM holds.
_TILES = {
    16: ((128, 16, 4, 2), (128, 16, 4, 3), (64, 16, 4, 3)),
    32: ((128, 32, 4, 2), (128, 32, 4, 3), (64, 32, 4, 3)),
    64: ((128, 64, 4, 2), (128, 64, 8, 2), (256, 64, 8, 1), (64, 64, 4, 3)),
    128: ((128, 128, 8, 1), (128, 64, 8, 2), (64, 128, 4, 2)),
    256: ((128, 128, 8, 1), (64, 256, 8, 1), (64, 128, 4, 2)),
}


def configs(M: int, N: int, K: int) -> list[Config]:
    """What is worth measuring for a shape, the most promising first; 8 at most."""
    fit = next((most for most in _TILES if most >= M), max(_TILES))
    found: dict[Config, None] = {}
    for rows, tokens, warps, programs_an_sm in _TILES[fit]:
        if N % rows:
            continue
        tiles = N // rows * -(-M // tokens)
        stages = min(_SHARED_BYTES // programs_an_sm // ((rows + tokens) * BLOCK), 8)
        for programs in _programs(tiles, K // BLOCK, programs_an_sm * _SMS):
            found[Config(rows, tokens, programs, warps, stages)] = None
    return list(found)


def _programs(tiles: int, k_blocks: int, most: int) -> list[int]:
    """Numbers of programs: an even share each; a tile, or an even part of one, each."""
    split = min(most // tiles, k_blocks)
    return [min(most, tiles * k_blocks), *([tiles * split] if split else [])]


def split_k_gemm(
    codes_MK: torch.Tensor,
    scales_Mk: torch.Tensor,
    weight_NK: torch.Tensor,
    scales_nk: torch.Tensor,
    config: Config,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x @ W.T`` in block FP8; asynchronous, and the same bits each time.

    It can be captured in a CUDA graph once it has run on the device. Graphs and streams may run it
    side by side: a call has its workspace from the allocator, in stream order, and its counters
    from a ring of 2**20 (some 5000 calls) that no one else takes meanwhile.

    Args:
        codes_MK: float8_e4m3fn, contiguous.
        scales_Mk: FP32, one for each 128 of K; taken as they are in DeepGEMM's layout (strides 1
            and a multiple of 4, the last column padded too), else copied into it.
        weight_NK: float8_e4m3fn, contiguous; N a multiple of ``config.rows``, K of 128.
        scales_nk: FP32 ``[ceil(N / 128), K / 128]``, any strides.
        out: BF16 ``[M, N]``, any strides; made if None.

    Returns:
        BF16 ``[M, N]``: ``out`` where it was given.

    Raises:
        ValueError: shapes, dtypes or alignment that the kernel does not take.
        RuntimeError: the first call on a device is inside a CUDA graph capture.
    """
    _check(codes_MK, scales_Mk, weight_NK, scales_nk, config)
    (M, K), N = codes_MK.shape, len(weight_NK)
    if out is None:
        out = torch.empty(M, N, dtype=torch.bfloat16, device=codes_MK.device)
    elif out.shape != (M, N) or out.dtype != torch.bfloat16:
        raise ValueError(f"out is {out.dtype} {list(out.shape)}; pass bfloat16 [{M}, {N}]")
    if M == 0:
        return out
    token_tiles = -(-M // config.tokens)
    tiles = N // config.rows * token_tiles
    units = tiles * (K // BLOCK)
    programs = min(config.programs, units)
    reach = sum((size - 1) * step for size, step in zip(out.shape, out.stride(), strict=True))
    if max(units * programs, reach) >= 2**31:
        raise ValueError(
            f"a product of M={M}, N={N}, K={K} in {programs} programs needs indices of more than "
            f"31 bits; split it"
        )
    scales_Mk = _in_layout(scales_Mk)
    shared = programs * 2 * config.rows * config.tokens if tiles % programs else 0
    parts = torch.empty(shared, dtype=torch.float32, device=codes_MK.device)
    pdl = config.pdl and codes_MK.is_cuda
    with torch.cuda.device_of(codes_MK):  # a kernel starts on the current device
        multiply[(programs,)](
            TensorDescriptor.from_tensor(codes_MK, [config.tokens, BLOCK]),
            TensorDescriptor.from_tensor(weight_NK, [config.rows, BLOCK]),
            scales_Mk,
            scales_nk,
            out,
            parts,
            _counters(codes_MK.device, tiles),
            M,
            -(-M // 4),
            token_tiles,
            tiles,
            K // BLOCK,
            scales_Mk.stride(1) // 4,
            *scales_nk.stride(),
            *out.stride(),
            ROWS=config.rows,
            TOKENS=config.tokens,
            WHOLE=M % config.tokens == 0,
            PDL=pdl,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **({"launch_pdl": True} if pdl else {}),
        )
    return out


def _check(
    codes_MK: torch.Tensor,
    scales_Mk: torch.Tensor,
    weight_NK: torch.Tensor,
    scales_nk: torch.Tensor,
    config: Config,
) -> None:
    if codes_MK.ndim != 2 or weight_NK.ndim != 2 or codes_MK.shape[1] != weight_NK.shape[1]:
        raise ValueError(
            f"codes {list(codes_MK.shape)} and weight {list(weight_NK.shape)} do not share K; "
            f"pass [M, K] and [N, K]"
        )
    (M, K), N = codes_MK.shape, len(weight_NK)
    if K == 0 or K % BLOCK or N == 0 or N % config.rows:
        raise ValueError(
            f"N={N}, K={K} is not whole tiles of {config.rows} x {BLOCK}; take another kernel"
        )
    for name, codes in (("codes", codes_MK), ("weight", weight_NK)):
        if codes.dtype != FP8_DTYPE or not codes.is_contiguous() or codes.data_ptr() % 16:
            raise ValueError(
                f"{name} is {codes.dtype} with strides {codes.stride()}; pass contiguous "
                f"{FP8_DTYPE} that begins at a multiple of 16 bytes"
            )
    for name, scales, shape in (
        ("activations", scales_Mk, (M, K // BLOCK)),
        ("weight", scales_nk, (-(-N // BLOCK), K // BLOCK)),
    ):
        if scales.dtype != torch.float32 or scales.shape != shape:
            raise ValueError(
                f"scales of the {name} are {scales.dtype} {list(scales.shape)}; pass float32 "
                f"{list(shape)}"
            )


def _in_layout(scales_Mk: torch.Tensor) -> torch.Tensor:
    """The same values with strides (1, a multiple of 4), each column readable to its padding."""
    M, k_blocks = scales_Mk.shape
    padded = -(-M // 4) * 4
    step = scales_Mk.stride(1)
    end = scales_Mk.storage_offset() + (k_blocks - 1) * step + padded
    if (
        (M == 1 or scales_Mk.stride(0) == 1)
        and step % 4 == 0
        and scales_Mk.data_ptr() % 16 == 0
        and end * 4 <= scales_Mk.untyped_storage().nbytes()
    ):
        return scales_Mk
    laid_Mk = scales_Mk.new_empty(k_blocks, padded).T[:M]
    return laid_Mk.copy_(scales_Mk)


class _Ring:
    """Counters of one device, zero but for those of a kernel that runs: it resets its own."""

    def __init__(self, device: torch.device) -> None:
        self.words = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
        self.taken = 0


_rings: dict[torch.device, _Ring] = {}
_rings_lock = threading.Lock()


def _counters(device: torch.device, count: int) -> torch.Tensor:
    """The next ``count`` zeros; they come round again when all others were taken."""
    with _rings_lock:
        if device not in _rings:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"split_k_gemm is first called on {device} inside a CUDA graph capture, where "
                    f"its counters cannot be zeroed; call it once before"
                )
            _rings[device] = _Ring(device)
        ring = _rings[device]
        if ring.taken + count > _COUNTERS:
            ring.taken = 0
        # 16 bytes apart, or Triton would compile one kernel for each alignment.
        begin, ring.taken = ring.taken, ring.taken + -(-count // 4) * 4
        return ring.words[begin : begin + count]
