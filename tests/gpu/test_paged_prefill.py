"""Prefill over an 8-bit cache by FlashAttention-3 in 16 bits: right at every length and batch.

Beside float64 over the same codes, with V that has a mean, as real models' has.
"""

from collections.abc import Sequence

import pytest
import torch

from benchmarks.kv import attention_inputs as inputs_of
from benchmarks.kv import attention_kernels as kernels
from benchmarks.kv import prefill as benchmark
from sgl_fp8rl.engine.attention.kv_prefill import fa3
from sgl_fp8rl.ops.paged_prefill import Workspace, attend
from sgl_fp8rl.protocol.kv_schema import WORKSPACE_BYTES
from tests.attention_oracle import Case, Step, draw, errors, exact, with_powers_of_two
from tests.gpu.conftest import Record

ERROR, BIAS = 5e-3, 1e-3
"""Relative, of all outputs. FA3 rounds P and out to 16 bits."""
DEVICE = torch.device("cuda")
LONG = [
    Case((context,), queries=64, mean=mean, softmax=softmax, int8=int8)
    for context in (8192, 32768, 131072)
    for mean, softmax in ((0.0, "peaked"), (0.3, "peaked"), (1.0, "flat"), (0.3, "needle"))
    for int8 in (False, True)
]
UNEQUAL = (17, 64, 65, 700, 1025, 9000)
EXTENDS = (17, 1, 16, 3, 17, 9)
SHAPES = [
    Case(UNEQUAL, heads=heads, group=group, queries=17, page=page, int8=int8, window=window)
    for heads, group in ((2, 4), (8, 1), (1, 16))
    for page in (1, 64)
    for int8 in (False, True)
    for window in (None, 127)
] + [
    Case(UNEQUAL, heads=2, queries=17, int8=int8, cap=cap, sink=sink)
    for int8 in (False, True)
    for cap, sink in ((0.0, 4.0), (30.0, None), (50.0, 0.0))
]
SMALL = 2 * 2 * 128 * 9100
"""A workspace in bytes, of one head of the longest sequence."""


def prefill(step: Step, case: Case, extends: Sequence[int], size: int) -> torch.Tensor:
    rows = [(b + 1) * case.queries - n + i for b, n in enumerate(extends) for i in range(n)]
    q_NQD = step.q_NQD[rows]
    longest = max(case.lengths) + case.page
    workspace = Workspace(case.heads, case.dim, longest, q_NQD.dtype, DEVICE, size)
    pages = step.pages
    workspace.plan(pages.lengths_B, extends, case.lengths, pages.table_BP, pages.size)
    out = attend(q_NQD, step.codes, workspace, fa3(step.scale, case.window, step.cap, step.sinks_Q))
    full = torch.full_like(step.q_NQD, torch.nan)
    full[rows] = out
    return full


def check(step: Step, case: Case, extends: Sequence[int], size: int, record: Record) -> None:
    out, wanted = prefill(step, case, extends, size), exact(step, case.window)
    asked = ~out[:, 0, 0].isnan()
    assert int(asked.sum()) == sum(extends)
    found = errors(out[asked], wanted[asked])
    record(case.name, found)
    assert found[0] < ERROR and abs(found[1]) < BIAS


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_long_prompts(case: Case, record_property: Record) -> None:
    step = with_powers_of_two(draw(case, "cuda"))
    check(step, case, (64,), WORKSPACE_BYTES, record_property)


@pytest.mark.parametrize("size", [SMALL, WORKSPACE_BYTES], ids=["heads in turn", "at once"])
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.name)
def test_unequal_sequences(case: Case, size: int, record_property: Record) -> None:
    step = with_powers_of_two(draw(case, "cuda"))
    check(step, case, EXTENDS, size, record_property)


@pytest.mark.parametrize("int8", [False, True])
def test_a_nan_of_one_sequence_reaches_no_other(int8: bool) -> None:
    """Neither in its batch nor where its memory is used again. FA3 makes 0 of its own outputs."""
    case = Case((9000, 30, 700), queries=4, int8=int8)
    step = with_powers_of_two(draw(case, "cuda"))
    workspace = Workspace(8, 128, 9064, step.q_NQD.dtype, DEVICE, WORKSPACE_BYTES)
    pages = step.pages

    def run(first: int) -> torch.Tensor:
        lengths = case.lengths[first:]
        table_BP = pages.table_BP[first:].contiguous()
        workspace.plan(pages.lengths_B, (4,) * len(lengths), lengths, table_BP, pages.size)
        return attend(step.q_NQD[first * 4 :], step.codes, workspace, fa3(step.scale))

    clean, others = run(0), run(1)
    slots = pages.slots(0)[8000:8200]
    if step.codes.token_scales_HS is not None:
        step.codes.token_scales_HS[:, slots] = 0x7FC0 << 16
    else:
        step.codes.k_SHD.view(torch.uint8)[slots] = 0x7F
        step.codes.v_SHD.view(torch.uint8)[slots] = 0x7F
    out = run(0)
    assert not torch.equal(out[:4], clean[:4]) and torch.equal(out[4:], clean[4:])
    assert torch.equal(run(1), others)


def test_control_fa3_in_fp8_is_off() -> None:
    load = inputs_of.Load(1, 131072, queries=64, v_mean=1.0, softmax="flat")
    inputs = inputs_of.draw(load, "cuda")
    layer = kernels.layer_of("unit", inputs)
    caches = kernels.stored(layer, inputs)
    wanted = inputs_of.exact(kernels.meant(inputs, layer, caches))
    assert abs(inputs_of.bias(benchmark.stock_fa3(inputs)(caches), wanted)) > 50 * BIAS
