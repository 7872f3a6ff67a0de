"""Attention of a decode step over 8-bit codes: right at every length, the same in any batch.

Against float64 over the same codes, with V that has a mean, as real models' has: sums of 14 bits,
as the FP8 tensor cores of Hopper keep them, lose a part of the output that grows with the context.
"""

from dataclasses import replace

import pytest
import torch

from benchmarks.kv import attention_inputs
from benchmarks.kv import attention_kernels as kernels
from sgl_fp8rl.ops.paged_decode import Codes, Pages
from sgl_fp8rl.ops.paged_decode_cuda import Workspace, attend
from tests.attention_oracle import Case, Step, draw, errors, exact
from tests.gpu.conftest import Record

ERROR, BIAS = 5e-3, 1e-3
"""Relative, of all outputs of a step. Healthy: 0.0018 and 0.0003 (H200): P is rounded to FP16 and
out to BF16. FlashInfer's XQA with FP8 products: up to 0.2 and -0.2."""
MEANS = (0.0, 0.1, 0.3, 1.0)
LOADS = ((256, 512), (64, 8192), (16, 30016), (4, 131072), (1, 8192))
UNEQUAL = (1, 31, 33, 700, 1024, 1025, 3000, 9000)

LONG = [
    Case((context,) * batch, mean=mean, softmax=softmax)
    for batch, context in LOADS
    for mean, softmax in [*((mean, "peaked") for mean in MEANS), (1.0, "flat"), (0.3, "needle")]
]
SHAPES = [
    Case(UNEQUAL, heads=2, group=group, dim=dim, page=page, int8=int8)
    for dim in (64, 96, 128, 192, 256)
    for group in (1, 4, 8, 16)
    for page in (1, 64)
    for int8 in (False, True)
]
SEVERAL = [
    Case((8, 500, 1026, 5000), heads=2, group=group, queries=queries, int8=int8)
    for group, queries in ((4, 4), (2, 8), (4, 2))
    for int8 in (False, True)
]
MANY = [
    Case((9, 500, 1026, 5000), heads=2, group=group, queries=queries, dim=dim, int8=int8)
    for dim, group, queries in (
        *((128, group, queries) for group in (4, 8, 16) for queries in (4, 8)),
        *((dim, 16, 8) for dim in (64, 96, 192, 256)),
        (64, 5, 5),
        (96, 8, 3),
    )
    for int8 in (False, True)
] + [Case((9, 1026, 5000), heads=2, group=8, queries=8, window=1500, cap=50.0, sink=4.0)]
"""Up to 128 columns, whole blocks of them and parts."""
WINDOWS = [
    Case(UNEQUAL[3:], heads=2, queries=queries, window=window)
    for window in (0, 127, 1500, 20000)
    for queries in (1, 2)
]
CAPS = [
    Case(UNEQUAL, heads=2, dim=dim, cap=cap, int8=int8)
    for dim in (64, 128, 256)
    for cap in (30.0, 50.0)
    for int8 in (False, True)
] + [Case((8, 1026, 5000), heads=2, group=2, queries=8, window=1500, cap=50.0)]
SINKS = [
    Case(UNEQUAL, heads=2, dim=dim, sink=sink, int8=int8)
    for dim in (64, 128, 256)
    for sink in (-2.0, 4.0, 12.0)
    for int8 in (False, True)
] + [Case((8, 1026, 5000), heads=2, group=2, queries=8, window=1500, sink=4.0, cap=50.0)]
"""Below the largest score of a query, near it, and above."""


def attention(step: Step, window: int | None = None, made_for: int = 0) -> torch.Tensor:
    """``made_for``: columns of the workspace, where they are more than the step's."""
    sequences, query_heads = len(step.pages.lengths_B), step.q_NQD.shape[1]
    slots, heads, dim = step.codes.k_SHD.shape
    columns = query_heads // heads * (len(step.q_NQD) // sequences)
    is_int8 = step.codes.token_scales_HS is not None
    workspace = Workspace(
        slots,
        sequences,
        heads,
        max(columns, made_for),
        dim,
        step.q_NQD.device,
        is_int8=is_int8,
        is_capped=bool(step.cap),
    )
    for scratch in (workspace.sums, workspace.stats):
        scratch.fill_(torch.nan)
    workspace.plan(step.pages.lengths_B)
    given = step.q_NQD, step.codes, step.pages, workspace, step.scale
    return attend(*given, window, step.cap, step.sinks_Q)


def alone(step: Step, sequence: int, query: int, queries: int) -> Step:
    """One query token of one sequence, as a step of its own."""
    pages, at = step.pages, sequence * queries + query
    row = slice(sequence, sequence + 1)
    lengths = pages.lengths_B[row] - (queries - 1 - query)
    mine = Pages(pages.table_BP[row], pages.size, lengths)
    return replace(step, q_NQD=step.q_NQD[at : at + 1], pages=mine)


@pytest.mark.parametrize(
    "case",
    [*LONG, *SHAPES, *SEVERAL, *MANY, *WINDOWS, *CAPS, *SINKS],
    ids=lambda case: case.name,
)
def test_attention_over_codes(case: Case, record_property: Record) -> None:
    step = draw(case, "cuda")
    out = attention(step, case.window)
    found = errors(out, exact(step, case.window))
    record_property(case.name, found)
    assert found[0] < ERROR and abs(found[1]) < BIAS
    assert torch.equal(attention(step, case.window), out)


@pytest.mark.parametrize(
    "case",
    [*SHAPES[:8], *SEVERAL, *MANY, *WINDOWS, *CAPS, *SINKS],
    ids=lambda case: case.name,
)
def test_the_same_bits_alone(case: Case) -> None:
    step = draw(case, "cuda")
    out = attention(step, case.window)
    for sequence in range(len(case.lengths)):
        for query in range(case.queries):
            if case.lengths[sequence] - (case.queries - 1 - query) <= 0:
                continue
            own = attention(alone(step, sequence, query, case.queries), case.window)
            assert torch.equal(own[0], out[sequence * case.queries + query])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128, 192])
def test_no_kernel_spills_registers(dim: int, int8: bool) -> None:
    """At 256 the one for 16 columns does."""
    for columns in (8, 16, 32, 128):
        made = Workspace(1024, 1, 1, columns, dim, torch.device("cuda"), is_int8=int8).kernels
        assert made.decode.attributes.local_size_bytes == 0


@pytest.mark.parametrize("int8", [False, True])
def test_the_same_bits_in_a_workspace_for_more_columns(int8: bool) -> None:
    for dim in (64, 128):
        step = draw(Case(UNEQUAL, heads=2, dim=dim, int8=int8), "cuda")
        assert torch.equal(attention(step, made_for=64), attention(step))


@pytest.mark.parametrize("case", MANY, ids=lambda case: case.name)
def test_a_token_too_few_is_seen(case: Case) -> None:
    """The control of many columns: each of a block has a last token of its own."""
    step = draw(case, "cuda")
    fewer = replace(step.pages, lengths_B=step.pages.lengths_B - 1)
    wrong = exact(replace(step, pages=fewer), case.window)
    assert errors(attention(step, case.window), wrong)[0] > 2 * ERROR


def test_scales_that_are_wrong_are_seen() -> None:
    """The control of all above: one head's V scale off by a hundredth, or two heads exchanged."""
    step = draw(Case((8192,) * 4), "cuda")
    wanted = exact(step)
    assert step.codes.v_scale_H is not None
    off = step.codes.v_scale_H.clone()
    off[3] *= 1.03
    wrong = replace(step, codes=replace(step.codes, v_scale_H=off))
    assert errors(attention(wrong), wanted)[0] > ERROR
    heads = torch.tensor([1, 0, 2, 3, 4, 5, 6, 7], device="cuda")
    swapped = replace(
        step.codes, k_SHD=step.codes.k_SHD.view(torch.uint8)[:, heads].view(torch.float8_e4m3fn)
    )
    assert errors(attention(replace(step, codes=swapped)), wanted)[0] > ERROR


@pytest.mark.parametrize("case", CAPS, ids=lambda case: case.name)
def test_a_cap_that_is_left_out_is_seen(case: Case) -> None:
    step = draw(case, "cuda")
    bare = attention(replace(step, cap=0.0), case.window)
    assert errors(bare, exact(step, case.window))[0] > 2 * ERROR


@pytest.mark.parametrize("case", SINKS, ids=lambda case: case.name)
def test_sinks_are_of_their_heads(case: Case) -> None:
    step = draw(case, "cuda")
    assert step.sinks_Q is not None
    wanted = exact(step, case.window)
    for wrong in (None, step.sinks_Q.roll(1)):
        out = attention(replace(step, sinks_Q=wrong), case.window)
        assert errors(out, wanted)[0] > 2 * ERROR
    same = replace(step, sinks_Q=step.sinks_Q.float())
    assert torch.equal(attention(same, case.window), attention(step, case.window))


def test_sums_of_14_bits_are_seen() -> None:
    """The defect itself: FlashInfer's XQA sums FP8 products so."""
    inputs = attention_inputs.draw(attention_inputs.Load(2, 32768), "cuda")
    inputs = replace(inputs, v_SHD=(1 + torch.randn_like(inputs.v_SHD)))
    layer = kernels.layer_of("layer", inputs)
    caches = kernels.stored(layer, inputs)
    wanted = attention_inputs.exact(kernels.meant(inputs, layer, caches))
    assert errors(kernels.attend_xqa(inputs, layer)(caches), wanted)[1] < -10 * BIAS


def test_a_plan_that_does_not_fit_takes_longer_splits() -> None:
    """As where many sequences share their pages: there are more tokens than slots."""
    step = draw(Case((9000,)), "cuda")
    pages = Pages(
        step.pages.table_BP.expand(12, -1),
        step.pages.size,
        step.pages.lengths_B.expand(12).contiguous(),
    )
    shared = replace(step, q_NQD=step.q_NQD.repeat(12, 1, 1), pages=pages)
    found = errors(attention(shared), exact(step).repeat(12, 1, 1))
    assert found[0] < ERROR and abs(found[1]) < BIAS


def test_a_graph_reads_the_lengths_and_scales_of_its_replay() -> None:
    step = draw(Case((9000, 1, 500)), "cuda")
    slots, heads, dim = step.codes.k_SHD.shape
    workspace = Workspace(slots, 3, heads, 4, dim, step.q_NQD.device)
    lengths = step.pages.lengths_B.clone()
    first = replace(step.pages, lengths_B=torch.ones_like(lengths))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        workspace.plan(first.lengths_B)
        out = attend(step.q_NQD, step.codes, first, workspace, step.scale)
    first.lengths_B.copy_(lengths)
    assert isinstance(step.codes, Codes) and step.codes.k_scale_H is not None
    step.codes.k_scale_H.mul_(1.1)
    graph.replay()
    assert torch.equal(out, attention(step))
    assert errors(out, exact(step))[0] < ERROR
