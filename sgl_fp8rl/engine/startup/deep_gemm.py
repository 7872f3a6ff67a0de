"""Settings of SGLang's DeepGEMM warm-up: which kernels it compiles before it serves."""

from collections.abc import Iterator
from contextlib import contextmanager

from sgl_fp8rl.engine import compat


def set_batch_sizes(rows: list[int]) -> None:
    """Restrict SGLang's warm-up to these batch sizes."""
    compat.deep_gemm_warmup._BUILTIN_M_LIST = rows


@contextmanager
def compiling_only_what_runs() -> Iterator[None]:
    """Keep SGLang from compiling DeepGEMM's kernels for every M at a GEMM's first call."""
    stock = compat.deep_gemm_warmup
    before = stock._DO_COMPILE_ALL
    stock._DO_COMPILE_ALL = False
    try:
        yield
    finally:
        stock._DO_COMPILE_ALL = before
