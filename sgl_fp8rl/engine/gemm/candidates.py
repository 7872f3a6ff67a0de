"""The block-FP8 GEMM kernels that a layer can use, and the shapes that each supports.

Each computes ``y_MN = dequant(codes_MK) @ dequant(weight_NK).T`` in BF16 from the same input: codes
float8_e4m3fn [M, K] with FP32 scales [M, K/128] in DeepGEMM's layout (strides ``(1, M rounded up to
4)``). So an activation is quantized once, and a layer may switch kernels from one M to the next.
FlashInfer's GEMM also takes BF16, but then quantizes by another formula: its codes would differ
from those of a fused producer, and it would not save a launch.

A stream-K kernel in Triton was removed: on an H200 (docs/performance_evidence.md) DeepGEMM was
faster from 4 rows on, and FlashInfer below that.

Shape suffixes as in ``ops.reference``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.ops.reference import BLOCK

Config = Mapping[str, Any]
"""Parameters of a kernel besides its operands; empty if there is nothing to choose."""
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``kernel(codes_MK, scales_Mk, weight_NK, scales_nk)`` returns a new BF16 ``y_MN``."""

STOCK = "deep_gemm"
"""The kernel that SGLang itself runs on Hopper."""
FLASHINFER = "flashinfer_sm90"
SPLITS = (2, 3, 4)
MIN_SPLIT = 1024
"""Fewer columns leave most of the GPU idle."""
MAX_ROWS = 2048
"""Above it a GEMM is bound by the tensor cores, so only whole libraries are measured: splitting N
does not change the tiles, and Triton's kernels are not warp-specialized."""


TOO_MANY_ROWS = f"it takes at most {MAX_ROWS} rows"
MAX_ROWS_OF_FLASHINFER = 256
"""It compiles N, K and a tile that depends on M into each kernel, which takes seconds at the first
call: too slow for a prefill, whose M can be anything."""


def _one_config(_n: int, _k: int, _m: int) -> list[Config]:
    return [{}]


@dataclass(frozen=True)
class Candidate:
    """One way to compute the GEMM."""

    name: str
    why_not: Callable[[int, int, int], str | None]
    """``why_not(N, K, M)``: why it cannot run this shape, or None if it can."""
    bind: Callable[[Config], Kernel]
    """The kernel with a config; raises TypeError or ValueError for an unknown config."""
    configs: Callable[[int, int, int], list[Config]] = _one_config
    """``configs(N, K, M)``: the configs worth measuring, most promising first."""


def _bind_plain(name: str, kernel: Kernel) -> Callable[[Config], Kernel]:
    def bind(config: Config) -> Kernel:
        if config:
            raise ValueError(f"{name} takes no config, but got {dict(config)}")
        return kernel

    return bind


# DeepGEMM, as SGLang calls it


def fits_deep_gemm(n: int, k: int) -> bool:
    """Whether SGLang runs DeepGEMM for a weight [n, k], by its own conditions, or else Triton."""
    return n % 64 == 0 and k % BLOCK == 0


def _not_deep_gemm(n: int, k: int, _m: int) -> str | None:
    return None if fits_deep_gemm(n, k) else "N is not a multiple of 64, or K not of 128"


def _deep_gemm(
    codes_MK: torch.Tensor,
    scales_Mk: torch.Tensor,
    weight_NK: torch.Tensor,
    scales_nk: torch.Tensor,
) -> torch.Tensor:
    out_MN = codes_MK.new_empty((codes_MK.shape[0], weight_NK.shape[0]), dtype=torch.bfloat16)
    compat.deep_gemm_nt((codes_MK, scales_Mk), (weight_NK, scales_nk), out_MN)
    return out_MN


def split_bounds(n: int, splits: int) -> list[int]:
    """The bounds of so many splits of N, as equal as blocks of 128 allow, from 0 to N.

    Raises:
        ValueError: N has fewer blocks than that.
    """
    blocks = n // BLOCK
    if n % BLOCK or not 2 <= splits <= blocks:
        raise ValueError(f"N = {n} cannot be cut into {splits} splits of whole blocks of {BLOCK}")
    return [split * blocks // splits * BLOCK for split in range(splits + 1)]


def _bind_split_n(config: Config) -> Kernel:
    splits = int(config.get("splits", 0))
    if set(config) != {"splits"} or splits < 2:
        raise ValueError(f"deep_gemm_split_n takes 2 splits or more, not {dict(config)}")

    def kernel(
        codes_MK: torch.Tensor,
        scales_Mk: torch.Tensor,
        weight_NK: torch.Tensor,
        scales_nk: torch.Tensor,
    ) -> torch.Tensor:
        import deep_gemm  # type: ignore[import-untyped, import-not-found, unused-ignore]

        n = weight_NK.shape[0]
        out_MN = codes_MK.new_empty((codes_MK.shape[0], n), dtype=torch.bfloat16)
        bounds = split_bounds(n, splits)
        for begin, end in pairwise(bounds):
            # DeepGEMM stores through a TMA descriptor with the row stride of the result, so one
            # call can write some of its columns. Not through SGLang, which would compile all M for
            # a shape that runs at a few.
            deep_gemm.fp8_gemm_nt(
                (codes_MK, scales_Mk),
                (weight_NK[begin:end], scales_nk[begin // BLOCK : end // BLOCK]),
                out_MN[:, begin:end],
            )
        return out_MN

    return kernel


def _not_split_n(n: int, k: int, m: int) -> str | None:
    if n % BLOCK or n < 2 * MIN_SPLIT:
        return f"N is not a multiple of {BLOCK}, or too small to split"
    if m > MAX_ROWS:
        return TOO_MANY_ROWS
    return _not_deep_gemm(n, k, m)


def _splits(n: int, _k: int, _m: int) -> list[Config]:
    return [{"splits": splits} for splits in SPLITS if n // splits >= MIN_SPLIT]


# FlashInfer's block-scale GEMM for SM90, swap-AB below 32 rows


@cache
def _flashinfer_runner() -> tuple[Any, torch.Tensor]:
    from flashinfer.gemm.gemm_base import get_fp8_blockscale_gemm_runner_sm90

    runner = get_fp8_blockscale_gemm_runner_sm90()
    # It wants an address and does not use it if both operands are FP8. FlashInfer's own call would
    # allocate as much as the weight in BF16, for each GEMM.
    workspace = torch.empty(16, dtype=torch.uint8, device="cuda")
    runner.configure_workspace(workspace)
    return runner, workspace


def _not_flashinfer(n: int, k: int, m: int) -> str | None:
    if n % 64 or k % BLOCK:
        return "N is not a multiple of 64, or K not of 128"
    in_range = 1 <= m <= MAX_ROWS_OF_FLASHINFER
    return None if in_range else f"it takes 1 to {MAX_ROWS_OF_FLASHINFER} rows"


def _flashinfer(
    codes_MK: torch.Tensor,
    scales_Mk: torch.Tensor,
    weight_NK: torch.Tensor,
    scales_nk: torch.Tensor,
) -> torch.Tensor:
    out_MN = codes_MK.new_empty((codes_MK.shape[0], weight_NK.shape[0]), dtype=torch.bfloat16)
    # reads the activation's scales like DeepGEMM: column-major, rows rounded up to 4
    runner, _ = _flashinfer_runner()
    runner.run_gemm(codes_MK, weight_NK, out_MN, scales_Mk, scales_nk)
    return out_MN


def flashinfer_is_built() -> bool:
    """Whether FlashInfer's GEMM is compiled; its first use builds it for a minute or more."""
    try:
        from flashinfer.jit.gemm import gen_fp8_blockscale_gemm_sm90_module
    except ImportError:
        return False
    return bool(gen_fp8_blockscale_gemm_sm90_module().is_compiled)


# SGLang's Triton kernel, with SGLang's own config for the shape


def _triton(
    codes_MK: torch.Tensor,
    scales_Mk: torch.Tensor,
    weight_NK: torch.Tensor,
    scales_nk: torch.Tensor,
) -> torch.Tensor:
    out_MN: torch.Tensor = compat.triton_block_fp8_matmul(
        codes_MK, weight_NK, scales_Mk, scales_nk, [BLOCK, BLOCK], output_dtype=torch.bfloat16
    )
    return out_MN


def _not_triton(n: int, k: int, m: int) -> str | None:
    if n % BLOCK or k % BLOCK:
        return "N or K is not a multiple of 128"
    return TOO_MANY_ROWS if m > MAX_ROWS else None


CANDIDATES = {
    candidate.name: candidate
    for candidate in (
        Candidate(STOCK, _not_deep_gemm, _bind_plain(STOCK, _deep_gemm)),
        Candidate("deep_gemm_split_n", _not_split_n, _bind_split_n, _splits),
        Candidate(FLASHINFER, _not_flashinfer, _bind_plain(FLASHINFER, _flashinfer)),
        Candidate("triton", _not_triton, _bind_plain("triton", _triton)),
    )
}
"""Candidates by name: the stock choice, then in the order of a quick tune."""
