"""Prefill over values: the plan, the workspace and the reference kernel beside float64."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_fp8rl.ops import paged_prefill
from sgl_fp8rl.ops.paged_prefill import Workspace, attend, reference
from tests.attention_oracle import Case, Step, draw, errors, exact, with_powers_of_two

ERROR = 5e-3
"""Relative. Healthy: 2.3e-3 in BF16, 4e-4 in FP16: values and out are rounded to them."""
CPU = torch.device("cpu")


def prefill(
    case: Case, extends: Sequence[int], size: int = 1 << 20, step: Step | None = None
) -> tuple[torch.Tensor, torch.Tensor, Workspace]:
    """Out and float64 of the last ``extends`` tokens of each sequence; ``size`` in bytes."""
    step = with_powers_of_two(step or draw(case, "cpu"))
    ends = [(b + 1) * case.queries for b in range(len(extends))]
    rows = torch.cat([torch.arange(e - n, e) for e, n in zip(ends, extends, strict=True)])
    q_NQD = step.q_NQD[rows]
    longest = max(case.lengths) + case.page
    workspace = Workspace(case.heads, case.dim, longest, q_NQD.dtype, CPU, size)
    pages = step.pages
    workspace.plan(pages.lengths_B, extends, case.lengths, pages.table_BP, pages.size)
    out = attend(
        q_NQD, step.codes, workspace, reference(step.scale, case.window, step.cap, step.sinks_Q)
    )
    return out, exact(step, case.window)[rows], workspace


@given(
    st.lists(st.tuples(st.integers(9, 90), st.integers(0, 8)), min_size=1, max_size=6),
    st.sampled_from([1, 16, 64]),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([None, 0, 7]),
    st.integers(14, 18),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_any_batch_is_attended_to_as_by_float64(
    sequences: list[tuple[int, int]],
    page: int,
    heads: int,
    int8: bool,
    window: int | None,
    log_size: int,
    seed: int,
) -> None:
    """Workspaces of 16 KiB, which hold one head of one sequence, to 256 KiB."""
    lengths = tuple(length for length, _ in sequences)
    extends = [min(length, 1 + extend) for length, extend in sequences]
    shape = {"heads": heads, "group": 2, "dim": 16, "queries": 9, "page": page}
    case = Case(lengths, **shape, int8=int8, window=window)
    out, wanted, workspace = prefill(case, extends, 1 << log_size, draw(case, "cpu", seed))
    assert errors(out, wanted)[0] < ERROR
    for group in workspace.groups:
        held = len(group.pages_P) * page
        is_alone = len(group.lengths_k) == 1
        assert is_alone or held * heads <= workspace.row, "one that is too long is alone"
        assert held <= workspace.row


def test_sequences_that_fit_are_attended_to_together() -> None:
    case = Case((50, 60, 70, 20), heads=2, dim=16, queries=3, page=16)
    *_, workspace = prefill(case, (3, 1, 2, 3), size=2 * 2 * 16 * 2 * 144)
    assert [group.lengths_k.tolist() for group in workspace.groups] == [[50, 60], [70, 20]]
    assert [group.rows for group in workspace.groups] == [slice(0, 4), slice(4, 9)]
    assert [group.starts_q.tolist() for group in workspace.groups] == [[0, 3, 4], [0, 2, 5]]
    assert [group.starts_k.tolist() for group in workspace.groups] == [[0, 64, 128], [0, 80, 112]]


def test_heads_take_turns_where_a_sequence_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_prefill, "REFERENCE_ROWS", 3)  # and its rows
    case = Case((90, 30), heads=3, group=2, dim=16, queries=7, page=16, int8=True, cap=30, sink=2)
    out, wanted, _ = prefill(case, (7, 5), size=2 * 2 * 16 * 2 * 96)  # two heads of it
    assert errors(out, wanted)[0] < ERROR


def test_a_longer_sequence_than_one_head_holds_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"sequence of 300 tokens.* holds 256.*--context-length"):
        Workspace(2, 16, 300, torch.float16, CPU, 256 * 2 * 2 * 16)


def test_tokens_behind_the_plan_get_zero() -> None:
    case = Case((20, 30), heads=2, dim=16, queries=4, page=16)
    step = with_powers_of_two(draw(case, "cpu"))
    workspace = Workspace(2, 16, 64, torch.bfloat16, CPU, 1 << 16)
    workspace.plan(step.pages.lengths_B, (4, 4), case.lengths, step.pages.table_BP, 16)
    padded = torch.cat([step.q_NQD, step.q_NQD[:3]])
    out = attend(padded, step.codes, workspace, reference(step.scale))
    assert errors(out[:8], exact(step))[0] < ERROR
    assert not out[8:].any()


@pytest.mark.parametrize("int8", [False, True])
def test_a_nan_of_one_sequence_reaches_no_other(int8: bool) -> None:
    """Neither in its batch nor where its memory is used again."""
    case = Case((90, 30), heads=2, dim=16, queries=2, page=16, int8=int8)
    step = with_powers_of_two(draw(case, "cpu"))
    clean, *_ = prefill(case, (2, 2), step=step)
    slot = int(step.pages.table_BP[0, 2]) * 16
    if int8:
        packed = step.codes.token_scales_HS
        assert packed is not None
        packed[:, slot] = packed[:, slot] & 0xFFFF | 0x7FC0 << 16  # of V alone
    else:
        step.codes.k_SHD.view(torch.uint8)[slot] = 0x7F
        step.codes.v_SHD.view(torch.uint8)[slot] = 0x7F
    out, _, workspace = prefill(case, (2, 2), step=step)
    assert bool(out[:2].isnan().all()) and torch.equal(out[2:], clean[2:])
    written = len(workspace.groups[0].pages_P) * 16 * case.heads
    read = workspace.v_WD[:written]
    assert bool(read.isfinite().all()), "a kernel multiplies what it masks by 0"
