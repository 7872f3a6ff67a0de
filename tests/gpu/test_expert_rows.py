"""Rows sorted by expert and summed again: kernels against references and loops."""

import pytest
import torch

from sgl_fp8rl.ops import expert_rows, expert_rows_triton
from sgl_fp8rl.ops.activation import Quantized, quantize_tokens
from sgl_fp8rl.ops.expert_rows import Places
from tests.activation_oracle import rows
from tests.experts_fakes import align

Tensor = torch.Tensor
MAX_SUM_ERROR = 0.004
"""Of a sum of rows, relative to its largest term: half a BF16 ulp is 2**-9. Seen: 0.0019."""


def routes(M: int, E: int, T: int) -> tuple[Tensor, Tensor]:
    """Weights FP32 and experts int32, [M, T]; the first half of the experts has most rows."""
    generator = torch.Generator().manual_seed(M)
    liking = torch.rand(M, E, generator=generator)
    liking[:, : E // 2] *= 2
    chosen = liking.topk(T)
    return chosen.values, chosen.indices.int()


def sorted_by_both(
    tokens: Quantized, places: Places, T: int, device: str
) -> tuple[expert_rows.SortedRows, expert_rows.SortedRows]:
    """What kernel and reference make of them, with the same places."""
    reference = expert_rows.sort_rows(tokens, places, T)
    there = (type(given)(*(part.to(device) for part in given)) for given in (tokens, places))
    mine = expert_rows_triton.sort_rows(*there, T)
    assert torch.equal(mine.place_R.cpu(), reference.place_R)
    assert torch.equal(mine.expert_P.cpu(), reference.expert_P)
    return mine, reference


@pytest.mark.parametrize(
    ("M", "E", "T", "K"),
    [(1, 8, 3, 128), (1, 8, 3, 2048), (37, 8, 3, 384), (37, 8, 3, 2048), (120, 8, 8, 128)],
)
def test_rows_lie_with_those_of_their_expert(M: int, E: int, T: int, K: int, device: str) -> None:
    x = rows(M, K, seed=K)
    _, ids = routes(M, E, T)
    places = Places(*align(ids, 128, E))
    tokens = quantize_tokens(x, by_row=True)
    mine, reference = sorted_by_both(tokens, places, T, device)
    size = len(reference.expert_P)
    assert mine.rows.scales_Mk.stride() == reference.rows.scales_Mk.stride() == (1, size)
    assert size % 128 == 0

    seen = mine.rows.codes_MK.cpu().view(torch.uint8), mine.rows.scales_Mk.cpu()
    theirs = reference.rows.codes_MK.view(torch.uint8), reference.rows.scales_Mk
    want = tokens.codes_MK.view(torch.uint8), tokens.scales_Mk
    place_R = reference.place_R.long()
    token_R = torch.arange(M * T) // T
    assert torch.equal(reference.expert_P[place_R], ids.flatten())
    for got, other, source in zip(seen, theirs, want, strict=True):
        assert torch.equal(got[place_R], source[token_R])
        assert torch.equal(other[place_R], source[token_R])
    assert len(set(mine.place_R.tolist())) == M * T
    used = int(places.used_1)
    assert (reference.expert_P[used:] == -1).all() and (reference.expert_P[:used] >= 0).all()


@pytest.mark.parametrize("H", [128, 384, 2048])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_a_tokens_rows_are_summed(H: int, factor: float, device: str) -> None:
    M, E, T = 37, 8, 3
    weights, ids = routes(M, E, T)
    places = Places(*align(ids, 128, E))
    place_R = expert_rows.sort_rows(quantize_tokens(rows(M, 128), by_row=True), places, T).place_R
    y = torch.full((len(places.row_P) // 128 * 128, H), torch.nan, dtype=torch.bfloat16)
    y[place_R.long()] = rows(M * T, H, spread=1)
    out = torch.empty(M, H, dtype=torch.bfloat16)
    assert expert_rows.sum_rows(y, place_R, weights, factor, out) is out
    mine = expert_rows_triton.sum_rows(
        y.to(device), place_R.to(device), weights.to(device), factor, out.to(device)
    ).cpu()
    terms = y.double()[place_R.long()].view(M, T, H) * weights.double().unsqueeze(-1) * factor
    bound = MAX_SUM_ERROR * terms.abs().sum(1)
    for got in (out, mine):
        assert ((got.double() - terms.sum(1)).abs() <= bound).all()
    wrong = terms[:, [0, 0, 2]].sum(1)
    assert ((mine.double() - wrong).abs() > bound).any(), "control: another row shows"


def test_rows_without_an_expert_count_for_nothing(device: str) -> None:
    """Padding's, whose experts SGLang sets to -1: their places are never written."""
    M, E, T, H = 37, 8, 3, 256
    weights, ids = routes(M, E, T)
    ids[5], ids[9, 1] = -1, -1
    places = Places(*align(ids, 128, E))
    tokens = quantize_tokens(rows(M, H), by_row=True)
    mine, reference = sorted_by_both(tokens, places, T, device)
    assert torch.equal(reference.place_R < 0, ids.flatten() < 0)
    y = torch.full((len(reference.expert_P), H), torch.nan, dtype=torch.bfloat16)
    y[reference.place_R[reference.place_R >= 0].long()] = 1.0
    out = torch.empty(M, H, dtype=torch.bfloat16)
    want = torch.where(ids >= 0, weights, 0.0).sum(1, keepdim=True).expand(M, H)
    kernel = expert_rows_triton.sum_rows(
        y.to(device), mine.place_R, weights.to(device), 1.0, out.to(device)
    )
    for got in (expert_rows.sum_rows(y, reference.place_R, weights, 1.0, out), kernel.cpu()):
        assert torch.allclose(got.float(), want, rtol=MAX_SUM_ERROR)


def test_scales_by_column_are_refused() -> None:
    _, ids = routes(8, 8, 3)
    with pytest.raises(ValueError, match="quantize with by_row=True"):
        expert_rows.sort_rows(quantize_tokens(rows(8, 256)), Places(*align(ids, 128, 8)), 3)
