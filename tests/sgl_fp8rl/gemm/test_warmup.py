"""Which DeepGEMM kernels an engine compiles before it serves, and whom that leaves alone."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.layers.moe import utils as moe_utils
from sglang.srt.layers.moe.utils import MoeA2ABackend, MoeRunnerBackend
from sglang.srt.layers.quantization import fp8
from torch import nn

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.startup import warmup
from tests.sgl_fp8rl.conftest import Publish

STOCK_SIZES = list(range(1, 16385))
SHAPES = [(6144, 4096), (4096, 12288)]
RUNNER = SimpleNamespace(
    gpu_id=0, model=nn.Module(), model_config=SimpleNamespace(dtype=torch.bfloat16)
)


def seen_by_deep_gemm(m: int) -> tuple[int, ...]:
    """All that its choice of a tile depends on in M, on Hopper."""
    blocks = [64, 128, 256] + [b for b in (16, 32) if m <= b]
    return (len(blocks), *(-(-m // b) for b in blocks))


def uncovered(sizes: list[int], largest: int) -> int:
    covered = {seen_by_deep_gemm(size) for size in sizes}
    return sum(seen_by_deep_gemm(m) not in covered for m in range(1, largest + 1))


@given(st.integers(1, 9000))
def test_every_batch_size_has_its_kernel(largest: int) -> None:
    sizes = warmup.batch_sizes(largest)
    assert uncovered(sizes, largest) == 0
    assert max(sizes) < max(largest, warmup.SMALL_BATCHES[-1]) + warmup.ROW_STEP


def test_no_size_can_be_left_out() -> None:
    sizes = warmup.batch_sizes(8192)
    assert len(sizes) == 2 + 8192 // 64
    for size in (16, 32, 64, 192, 8192):
        assert uncovered([s for s in sizes if s != size], 8192) > 0


@pytest.mark.parametrize(
    ("chunk", "running", "bound", "largest"),
    [
        (8192, None, 16384, 8192),
        (2048, None, 16384, warmup.MAX_RUNNING_REQUESTS),
        (2048, 128, 16384, 2048),
        (16384, 128, 32768, 16384),
        (16384, 128, 4096, 4096),
        (-1, 128, 65536, 65536),
    ],
)
def test_sizes_go_as_far_as_a_forward_pass(
    chunk: int, running: int | None, bound: int, largest: int
) -> None:
    schedule = SimpleNamespace(chunked_prefill_size=chunk, max_running_requests=running)
    assert warmup.largest_batch(schedule, bound) == largest


class Engine:
    """SGLang's warm-up as it stands on a Hopper GPU, and what our hook did for it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.compiled: list[Any] = []
        self.stock = compat.deep_gemm_warmup
        for name, value in {
            "ENABLE_JIT_DEEPGEMM": True,
            "_ENABLE_JIT_DEEPGEMM_PRECOMPILE": True,
            "_IN_PRECOMPILE_STAGE": False,
            "_IS_FIRST_RANK_ON_NODE": True,
            "_BUILTIN_M_LIST": STOCK_SIZES,
        }.items():
            patch.setattr(self.stock, name, value)
        patch.delenv("SGLANG_JIT_DEEPGEMM_FAST_WARMUP", raising=False)
        patch.setenv("DG_JIT_CACHE_DIR", "cache-of-the-user")
        patch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
        self.shapes = SHAPES
        patch.setattr(warmup, "compile_ahead", lambda *args: self.compiled.append(args))

    def start(self) -> bool:
        """Whether our sizes are to replace SGLang's."""
        self.sizes = warmup.warm_up(self.shapes, RUNNER)
        assert self.stock._BUILTIN_M_LIST == STOCK_SIZES
        return self.sizes is not None


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, publish: Publish) -> Engine:
    publish(chunked_prefill_size=8192, max_running_requests=256)
    return Engine(monkeypatch)


def test_the_first_rank_compiles_for_all(engine: Engine) -> None:
    assert engine.start()
    sizes = warmup.batch_sizes(8192)
    assert sizes == engine.sizes
    assert engine.compiled == [(SHAPES, sizes, 0, Path("cache-of-the-user"))]
    engine.compiled.clear()
    engine.stock._IS_FIRST_RANK_ON_NODE = False
    assert engine.start()
    assert engine.compiled == []


def without_deep_gemm(engine: Engine) -> None:
    """Nor is a GPU asked for."""
    engine.stock.ENABLE_JIT_DEEPGEMM = False
    engine.patch.delattr(torch.cuda, "get_device_capability")


LEFT_ALONE: dict[str, Callable[[Engine], object]] = {
    "off": lambda e: setattr(e.stock, "_ENABLE_JIT_DEEPGEMM_PRECOMPILE", False),
    "sizes of the user's": lambda e: e.patch.setenv("SGLANG_JIT_DEEPGEMM_FAST_WARMUP", "0"),
    "his few sizes": lambda e: e.patch.setenv("SGLANG_JIT_DEEPGEMM_FAST_WARMUP", "1"),
    "SGLang's compile command": lambda e: setattr(e.stock, "_IN_PRECOMPILE_STAGE", True),
    "no FP8 linear on DeepGEMM": lambda e: setattr(e, "shapes", []),
    "FP16": lambda e: e.patch.setattr(RUNNER.model_config, "dtype", torch.float16),
    "Blackwell": lambda e: e.patch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0)),
    "no DeepGEMM": without_deep_gemm,
}


@pytest.mark.parametrize("change", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_other_warm_ups_are_left_alone(engine: Engine, change: Callable[[Engine], object]) -> None:
    change(engine)
    assert not engine.start() and not engine.compiled


@pytest.mark.parametrize(
    ("runner", "a2a", "ours"),
    [
        (MoeRunnerBackend.DEEP_GEMM, MoeA2ABackend.NONE, False),
        (MoeRunnerBackend.AUTO, MoeA2ABackend.DEEPEP, False),
        (MoeRunnerBackend.AUTO, MoeA2ABackend.NONE, True),
        (MoeRunnerBackend.TRITON, MoeA2ABackend.NONE, True),
    ],
)
def test_experts_on_deep_gemm_keep_sglangs_sizes(
    engine: Engine, runner: MoeRunnerBackend, a2a: MoeA2ABackend, ours: bool
) -> None:
    """Their grouped products have more rows than a batch; "auto" is DeepGEMM with DeepEP."""
    engine.patch.setattr(fp8, "get_moe_runner_backend", lambda: runner)
    for module in (fp8, moe_utils):  # SGLang's versions look it up in either
        engine.patch.setattr(module, "get_moe_a2a_backend", lambda: a2a, raising=False)
    engine.patch.setattr("sglang.srt.layers.deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM", True)
    assert engine.start() is ours
    assert bool(engine.compiled) is ours


def test_sglangs_pass_runs_the_sizes_that_were_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stock = compat.deep_gemm_warmup
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    for name in ("_ENABLE_JIT_DEEPGEMM_PRECOMPILE", "_DO_COMPILE_ALL"):
        monkeypatch.setattr(stock, name, True)
    monkeypatch.setattr(stock, "_INITIALIZATION_DICT", {})
    monkeypatch.setattr(stock, "_BUILTIN_M_LIST", [16, 64])
    ran: list[Any] = []
    monkeypatch.setattr(stock, "_compile_deep_gemm_one_type_all", lambda **given: ran.append(given))
    kernel = stock.DeepGemmKernelType.GEMM_NT_F8F8BF16
    with stock.deep_gemm_execution_hook(7, 4096, 1024, 1, kernel):
        assert [given["m_list"] for given in ran] == [[16, 64]]


def test_shares_make_the_whole() -> None:
    rows = [16, 32, 64, 128, 192]
    shares = [warmup.share_of(index, 3, SHAPES, rows) for index in range(3)]
    products = [product for share in shares for product in share]
    assert sorted(products) == sorted((m, n, k) for n, k in SHAPES for m in rows)
    assert {len(share) for share in shares} == {3, 4}


def test_processes_fit_into_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    each = warmup.PROCESS_BYTES + 64 * 12288 + 4096 * 12288 + 64 * 6144 * 2
    free = 2 * 3 * each
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, 10 * free))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))
    assert warmup.process_count(SHAPES, [64], 0) == 2  # no more than there are products
    assert warmup.process_count(SHAPES, [16, 32, 64], 0) == 3
    free *= 100
    assert warmup.process_count(SHAPES, warmup.batch_sizes(4096), 0) == warmup.MAX_PROCESSES
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    assert warmup.process_count(SHAPES, [16, 32, 64], 0) == 1


class Runs:
    """Stands in for the processes: what they were given, and how they end."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.failure: str | None = None
        self.largest: list[int] = []
        patch.setattr(warmup, "process_count", lambda *_: 2)
        patch.setattr(warmup, "_key", lambda shapes, rows, _: f"{len(shapes)}-{len(rows)}")
        patch.setattr(warmup, "_run_shares", self)

    def __call__(self, shapes: Any, rows: list[int], device: int, processes: int) -> str | None:
        self.largest.append(max(rows))
        return self.failure


def test_kernels_are_compiled_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs, rows = Runs(monkeypatch), warmup.batch_sizes(8192)
    runs.failure = "nvcc is missing"
    warmup.compile_ahead(SHAPES, rows, 0, tmp_path)
    assert "nvcc is missing" in caplog.text
    runs.failure = None
    for _ in range(2):
        warmup.compile_ahead(SHAPES, rows, 0, tmp_path)
    assert runs.largest == [warmup.LARGEST_SHARED] * 2  # again after the failure, then no more
    warmup.compile_ahead(SHAPES[:1], rows, 0, tmp_path)
    assert len(runs.largest) == 3


def test_a_cache_that_cannot_be_marked_is_told_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine starts all the same."""
    runs, folder = Runs(monkeypatch), tmp_path / "no folder"
    folder.touch()
    warmup.compile_ahead(SHAPES, [16, 64], 0, folder)
    assert runs.largest == [64]
    assert "cannot be marked as complete" in caplog.text


@pytest.mark.timeout(120)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there they would succeed")
def test_processes_that_fail_are_told_of() -> None:
    failure = warmup._run_shares([(128, 128)], [16, 32], 0, 2)
    assert failure is not None
    assert "CUDA" in failure or "NVIDIA" in failure
