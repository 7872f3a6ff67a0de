"""The reference of decode attention beside float64, and that the CUDA source compiles."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_fp8rl.ops import paged_decode, paged_decode_cuda
from tests.attention_oracle import Case, Step, draw, errors, exact

ERROR = 1e-5
"""Relative. Healthy: 3e-7, FP32."""
CASES = (
    Case((5, 33, 130), heads=2, dim=64, group=3, queries=2),
    Case((5, 33, 130), heads=2, dim=64, int8=True, page=1),
    Case((70, 300), heads=2, softmax="needle", window=20, page=16),
    Case((3000,), heads=2, softmax="flat", mean=1.0),
    Case((70, 300), heads=2, dim=64, cap=50.0),
    Case((5, 33, 130), heads=2, dim=64, group=3, queries=2, sink=2.0),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_is_exact(case: Case) -> None:
    step = draw(case, "cpu")
    wanted = exact(step, case.window)
    out = reference(step, case.window)
    assert errors(out, wanted)[0] < ERROR
    one_more = None if case.window is None else case.window + 1
    other_scale = step.scale if one_more else step.scale * 2
    other = reference(replace(step, scale=other_scale), one_more)
    assert errors(other, wanted)[0] > 10 * ERROR


def reference(step: Step, window: int | None) -> torch.Tensor:
    given = step.q_NQD, step.codes, step.pages, step.scale
    return paged_decode.attend(*given, window, step.cap, step.sinks_Q)


@pytest.mark.parametrize("cap", [30.0, 50.0])
def test_a_cap_is_seen(cap: float) -> None:
    step = draw(Case((300,), heads=2, cap=cap), "cpu")
    assert errors(reference(replace(step, cap=0.0), None), exact(step))[0] > 0.1


@pytest.mark.parametrize("sink", [-2.0, 4.0, 12.0])
def test_sinks_are_seen(sink: float) -> None:
    """Also where one query head has that of another."""
    step = draw(Case((1, 30, 300), heads=2, sink=sink), "cpu")
    assert step.sinks_Q is not None
    for wrong in (None, step.sinks_Q.roll(1)):
        assert errors(reference(replace(step, sinks_Q=wrong), None), exact(step))[0] > 0.01


def test_token_scales_are_packed_as_they_are_read() -> None:
    step = draw(Case((40,), heads=2, dim=64, int8=True), "cpu")
    packed = step.codes.token_scales_HS
    assert packed is not None
    k_SH, v_SH = ((bits & -65536).view(torch.float32).t() for bits in (packed << 16, packed))
    assert torch.equal(paged_decode.pack_token_scales(k_SH, v_SH), packed)


@pytest.mark.parametrize(("column_tiles", "is_capped"), [(1, False), (16, True)])
@pytest.mark.parametrize("is_int8", [False, True])
def test_the_kernel_compiles_for_hopper(is_int8: bool, column_tiles: int, is_capped: bool) -> None:
    """Without a GPU; NVRTC comes with torch's CUDA build."""
    core = pytest.importorskip("cuda.core")
    source = paged_decode_cuda.SOURCE.read_text()
    macros = paged_decode_cuda.macros(128, column_tiles, is_int8, is_capped)
    options = core.ProgramOptions(arch="sm_90", std="c++17", define_macro=macros)
    assert core.Program(source, "c++", options).compile("cubin").code


@pytest.mark.parametrize("dim", paged_decode_cuda.HEAD_DIMS)
def test_a_block_fits_in_an_sm(dim: int) -> None:
    for tiles in range(1, paged_decode_cuda.MAX_COLUMNS // 8 + 1):
        of = {name: int(value) for name, value in paged_decode_cuda.macros(dim, tiles, True, False)}
        assert of["BLOCKED"] or of["COLUMN_TILES"] == tiles
        codes = of["STAGES"] * of["TILE"] * (2 * dim + 4)
        sums = of["BUFFERS"] * 8 * of["COLUMN_TILES"] * (dim + 6) * 4
        assert of["WARPS"] * (codes + sums) <= 227 * 1024 - 64


@pytest.mark.parametrize(
    ("cap", "sinks_Q", "message"),
    [
        (30.0, None, "a logit cap of 30.0 and a workspace made with is_capped=False"),
        (0.0, torch.zeros(4), r"8 query heads has attention sinks torch.float32 \[4\]"),
        (0.0, torch.zeros(8).half(), "float16 .* in BF16 or FP32"),
        (0.0, torch.zeros(16)[::2], "contiguous"),
    ],
)
def test_what_the_kernel_would_misread_is_refused(
    cap: float, sinks_Q: torch.Tensor | None, message: str
) -> None:
    step = draw(Case((40,), heads=2), "cpu")
    workspace: Any = SimpleNamespace(columns=4, is_capped=False, kernels=None)
    given = step.q_NQD, step.codes, step.pages, workspace, step.scale
    with pytest.raises(ValueError, match=message):
        paged_decode_cuda.attend(*given, None, cap, sinks_Q)


def test_a_shape_without_a_kernel_is_refused() -> None:
    for dim, columns in ((80, 4), (128, 129), (128, 0)):
        with pytest.raises(ValueError, match="no decode kernel"):
            paged_decode_cuda.check_shape(dim, columns)
