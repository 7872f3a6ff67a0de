"""Launches ``paged_decode.cu``: attention of a decode step over a paged KV cache of 8-bit codes.

Compiled at the first use for a shape by NVRTC, which comes with torch; cuda.core, which comes with
SGLang, compiles, loads and launches. Shape suffixes: B sequences, N query tokens of all of them, Q
query heads, H KV heads, S slots of the cache, D head dim.
"""

from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sgl_fp8rl.ops.paged_decode import SPLIT, Codes, Pages

HEAD_DIMS = (64, 96, 128, 192, 256)
MAX_COLUMNS = 128
"""Query heads of a KV head times query tokens of a sequence."""
_COLUMNS_OF_TILE = 8
_WHOLE_TILES = 2
"""Up to so many tiles of columns a block takes all; of more it takes some, and the codes again."""
_BLOCK_TILES = {64: 4, 96: 2, 128: 2, 192: 1, 256: 1}
"""How many, by head dim, at most: what fits in the registers of two blocks an SM."""
_WARPS = 4
_MERGE_BLOCKS_OF_SM, _MERGE_THREADS, _PLAN_THREADS = 8, 128, 1024
_THREADS = 32 * _WARPS
_STAGE_BYTES = 64 << 10
"""About, of a block: two of them, up to a head size of 128, keep 128 KiB of an SM in flight."""
SOURCE = Path(__file__).with_name("paged_decode.cu")
_EVERYTHING = 1 << 30
_CUDA_CORE = [1, 2]
"""The first with programmatic stream serialization."""
_LOG2_E = 1.4426950408889634


class Workspace:
    """The kernels of a model and what they write besides outputs: for all layers and all graphs.

    Args:
        tokens: of the whole cache.
        sequences: of the largest step.
        columns: query heads of a KV head times query tokens of a sequence.
        is_capped: its layers cap their logits.

    Raises:
        ValueError: no kernel has this shape.
    """

    def __init__(
        self,
        tokens: int,
        sequences: int,
        heads: int,
        columns: int,
        dim: int,
        device: torch.device,
        *,
        is_int8: bool = False,
        is_capped: bool = False,
    ) -> None:
        check_shape(dim, columns)
        check_installed()
        self.columns, self.is_capped = columns, is_capped
        self.planned: torch.Tensor | None = None
        """The lengths that the plan is of."""
        # compiled here, never while a graph is captured
        tiles = -(-columns // _COLUMNS_OF_TILE)
        self.kernels = _kernels(device, tuple(macros(dim, tiles, is_int8, is_capped)))
        splits = tokens // SPLIT + sequences  # a plan that needs more takes longer ones
        self.work = torch.zeros(splits, 4, dtype=torch.int32, device=device)
        self.first = torch.zeros(sequences + 2, dtype=torch.int32, device=device)
        self.sums = torch.zeros(splits * heads * columns, dim, device=device)
        self.stats = torch.zeros(splits * heads * columns, 2, device=device)

    def plan(self, lengths_B: torch.Tensor) -> None:
        """Cut sequences of these lengths, int32, into splits: once a step, before its layers.

        Raises:
            ValueError: there are more than this was made for.
        """
        if len(lengths_B) + 2 > len(self.first):
            raise ValueError(
                f"a decode step has {len(lengths_B)} sequences, more than the "
                f"{len(self.first) - 2} that its workspace was made for"
            )
        self.planned = lengths_B
        config = _config(1, _PLAN_THREADS, 0, follows=False)
        _launch(
            self.kernels.plan,
            config,
            lengths_B,
            np.int32(len(lengths_B)),
            np.int32(len(self.work)),
            self.work,
            self.first,
        )


def attend(
    q_NQD: torch.Tensor,
    codes: Codes,
    pages: Pages,
    workspace: Workspace,
    scale: float,
    window: int | None = None,
    logit_cap: float = 0.0,
    sinks_Q: torch.Tensor | None = None,
) -> torch.Tensor:
    """``softmax(scale * q k^T) v`` of the last tokens of each sequence, BF16 ``[N, Q, D]``.

    Reads the plan that ``Workspace.plan`` made of ``pages.lengths_B`` in this stream.

    Args:
        q_NQD: BF16, over INT8 FP16 (``kv_int8.rotate_queries``), the same number of tokens for
            each sequence, of which each has at least so many.
        window, logit_cap: as of ``paged_decode.attend``.
        sinks_Q: the same, BF16 or FP32.

    Raises:
        ValueError: the workspace is not for this shape, or sinks are of another.
    """
    (n, query_heads, dim), heads = q_NQD.shape, codes.k_SHD.shape[1]
    sequences, group = len(pages.lengths_B), query_heads // heads
    queries, rest = divmod(n, sequences)
    token_scales = codes.token_scales_HS
    dtype = torch.bfloat16 if token_scales is None else torch.float16
    if rest or q_NQD.dtype != dtype:
        raise ValueError(
            f"a decode step of {sequences} sequences has a q of {n} tokens in {q_NQD.dtype}; pass "
            f"as many tokens for each, in {dtype}"
        )
    if q_NQD.stride()[1:] != (dim, 1):
        q_NQD = q_NQD.contiguous()
    columns, kernels = group * queries, workspace.kernels
    if columns > workspace.columns:
        raise ValueError(
            f"a decode step has {columns} query heads and tokens a KV head, more than the "
            f"{workspace.columns} that its workspace was made for"
        )
    if bool(logit_cap) != workspace.is_capped:
        raise ValueError(
            f"a decode step has a logit cap of {logit_cap} and a workspace made with "
            f"is_capped={workspace.is_capped}; make a workspace with is_capped={bool(logit_cap)}"
        )
    if sinks_Q is not None and (
        sinks_Q.shape != (query_heads,)
        or sinks_Q.dtype not in (torch.bfloat16, torch.float32)
        or not sinks_Q.is_contiguous()
    ):
        raise ValueError(
            f"a decode step of {query_heads} query heads has attention sinks {sinks_Q.dtype} "
            f"{list(sinks_Q.shape)}; pass one for each head, contiguous, in BF16 or FP32"
        )
    out = torch.empty(q_NQD.shape, dtype=torch.bfloat16, device=q_NQD.device)
    arguments = (
        q_NQD,
        np.int64(q_NQD.stride(0)),
        codes.k_SHD,
        codes.v_SHD,
        np.int64(codes.k_SHD.stride(0)),
        codes.k_scale_H,
        codes.v_scale_H,
        token_scales,
        np.int64(0 if token_scales is None else token_scales.stride(0)),
        pages.table_BP,
        np.int64(pages.table_BP.stride(0)),
        np.int32(pages.size.bit_length() - 1),
        workspace.work,
        workspace.first,
        workspace.sums,
        workspace.stats,
        out,
        np.int32(sequences),
        np.int32(heads),
        np.int32(group),
        np.int32(queries),
        np.int32(_EVERYTHING if window is None else window),
        np.float32(scale * _LOG2_E * (2 / logit_cap if logit_cap else 1)),
        np.float32(logit_cap * _LOG2_E),
        sinks_Q,
        np.int32(0 if sinks_Q is None else sinks_Q.element_size()),
    )
    sums = kernels.buffers * _WARPS * min(columns, kernels.columns) * (dim + 6) * 4
    shared = kernels.stage_bytes + sums
    blocks = kernels.decode.occupancy.max_active_blocks_per_multiprocessor(_THREADS, shared)
    decode = _config(blocks * kernels.sms, _THREADS, shared, follows=False)
    _launch(kernels.decode, decode, *arguments)
    merge = _config(_MERGE_BLOCKS_OF_SM * kernels.sms, _MERGE_THREADS, 0, follows=True)
    _launch(kernels.merge_splits, merge, *arguments)
    return out


def check_shape(dim: int, columns: int) -> None:
    """Check that there is a kernel.

    Raises:
        ValueError: there is none.
    """
    if dim not in HEAD_DIMS or not 0 < columns <= MAX_COLUMNS:
        raise ValueError(
            f"no decode kernel attends with {columns} query heads a KV head of size {dim}: sizes "
            f"are {', '.join(map(str, HEAD_DIMS))}, and at most {MAX_COLUMNS} heads; use "
            f"--decode-attention-backend flashinfer"
        )


def check_installed() -> None:
    """Check that cuda.core can launch kernels that overlap.

    Raises:
        ValueError: it is missing, or too old.
    """
    try:
        found = version("cuda-core")
    except PackageNotFoundError:
        found = "none"
    numbers = [int(part) if part.isdigit() else -1 for part in found.split(".")[:2]]
    if numbers < _CUDA_CORE:
        raise ValueError(
            f"the decode kernel of an FP8 KV cache needs cuda-core 1.2 or newer, and {found} is "
            f"installed; pip install 'cuda-core>=1.2', or use --decode-attention-backend flashinfer"
        )


@dataclass(frozen=True)
class _Kernels:
    decode: Any
    merge_splits: Any
    plan: Any
    sms: int
    stage_bytes: int
    """Shared memory in which a block of ``decode`` keeps codes."""
    columns: int
    """Of an item of work."""
    buffers: int
    """Of each warp's sums of an item: one is written while the other is merged."""


@cache
def _kernels(device: torch.device, defined: tuple[tuple[str, str], ...]) -> _Kernels:
    """Compile for a device: some seconds."""
    from cuda.bindings import driver
    from cuda.core import Device, Program, ProgramOptions

    index = torch.cuda.current_device() if device.index is None else device.index
    here = Device(index)
    here.set_current()  # its primary context, which is torch's
    options = ProgramOptions(arch=f"sm_{here.arch}", std="c++17", define_macro=list(defined))
    code = Program(SOURCE.read_text(), "c++", options).compile("cubin")
    decode, merge, plan = (code.get_kernel(name) for name in ("decode", "merge_splits", "plan"))
    limit = here.properties.max_shared_memory_per_block_optin
    shared_size = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    static = decode.attributes.shared_size_bytes
    (status,) = driver.cuKernelSetAttribute(
        shared_size, limit - static, decode.handle, driver.CUdevice(index)
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the decode kernel gets no shared memory: {status}; report it")
    of = {name: int(value) for name, value in defined}
    stage_bytes = of["WARPS"] * of["STAGES"] * of["TILE"] * (2 * of["D"] + 4 * of["INT8"])
    columns = of["COLUMN_TILES"] * _COLUMNS_OF_TILE
    sms = here.properties.multiprocessor_count
    return _Kernels(decode, merge, plan, sms, stage_bytes, columns, of["BUFFERS"])


def macros(dim: int, column_tiles: int, is_int8: bool, is_capped: bool) -> list[tuple[str, str]]:
    """What the source is compiled with. ``column_tiles``: of all columns."""
    tile, stages = _tile_and_stages(dim)
    is_blocked = column_tiles > _WHOLE_TILES
    blocks = -(-column_tiles // _BLOCK_TILES[dim]) if is_blocked else 1
    tiles = -(-column_tiles // blocks)
    values = {
        "D": dim,
        "COLUMN_TILES": tiles,
        "BLOCKED": int(is_blocked),
        "INT8": int(is_int8),
        "CAPPED": int(is_capped),
        "TILE": tile,
        "STAGES": stages,
        "BUFFERS": 2 if tiles == 1 else 1,
        "SPLIT": SPLIT,
        "WARPS": _WARPS,
    }
    return [(name, str(value)) for name, value in values.items()]


def _tile_and_stages(dim: int) -> tuple[int, int]:
    """Tokens that a warp takes at once, and how many times that it holds."""
    tile = 32 if dim <= 128 else 16
    return tile, max(2, round(_STAGE_BYTES / (_WARPS * tile * 2 * dim)))


def _config(blocks: int, threads: int, shared: int, *, follows: bool) -> Any:
    """``follows``: starts before the kernel before it has ended, and waits for it by itself."""
    from cuda.core import LaunchConfig

    return LaunchConfig(
        grid=blocks, block=threads, shmem_size=shared, programmatic_stream_serialization=follows
    )


def _launch(kernel: Any, config: Any, *arguments: Any) -> None:
    from cuda.core import Stream, launch

    stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
    pointers = (
        argument
        if isinstance(argument, np.generic)
        else (0 if argument is None else argument.data_ptr())
        for argument in arguments
    )
    launch(stream, config, kernel, *pointers)
