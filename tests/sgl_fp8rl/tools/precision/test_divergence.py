"""KL and k3 against plain sums in exact arithmetic."""

import math
from decimal import Context, Decimal, localcontext

import pytest
import torch

from sgl_fp8rl.tools.precision.divergence import Divergence, token_divergence

RELATIVE = 1e-9
"""1e-12 here at a KL of 1e-2; what cancels in expm1(d) - d grows as the KL falls."""
RELATIVE_SMALL = 1e-4
"""At a KL of 1e-12; 2e-6 here."""


def token_kl(reference: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    tokens = torch.zeros(len(reference), dtype=torch.long)
    return token_divergence(reference, changed, tokens)[0]


def exact_kl(reference: list[float], changed: list[float]) -> float:
    """To 60 digits."""
    with localcontext(Context(prec=60)):
        powers = [[Decimal(x).exp() for x in logits] for logits in (reference, changed)]
        p, q = ([power / sum(each) for power in each] for each in powers)
        return float(sum(a * (a / b).ln() for a, b in zip(p, q, strict=True)))


@pytest.mark.parametrize(("noise", "relative"), [(0.1, RELATIVE), (1e-6, RELATIVE_SMALL)])
def test_kl(noise: float, relative: float) -> None:
    generator = torch.Generator().manual_seed(0)
    reference = 3 * torch.randn(4, 40, generator=generator, dtype=torch.float64)
    changed = reference + noise * torch.randn(4, 40, generator=generator, dtype=torch.float64)
    got = token_kl(reference, changed).tolist()
    for row in range(4):
        wanted = exact_kl(reference[row].tolist(), changed[row].tolist())
        assert got[row] == pytest.approx(wanted, rel=relative)


def test_kl_of_the_same_is_zero_whatever_is_added() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    assert token_kl(logits, logits).tolist() == [0.0] * 3
    assert token_kl(logits, logits + 4.0).max() < 1e-12


def test_kl_of_what_became_impossible_is_large_and_finite() -> None:
    sure = torch.tensor([[0.0, 0.0]])
    assert token_kl(sure, torch.tensor([[0.0, -200.0]])).item() == pytest.approx(
        100 - math.log(2), rel=1e-9
    )


def test_means_and_their_error() -> None:
    found = Divergence.of_tokens(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0.0, 3.0, 3.0]))
    assert (found.kl, found.k3) == (3.0, 2.0)
    # variance 7 of three tokens
    assert found.kl_error == pytest.approx(math.sqrt(7 / 3))
    assert Divergence.of_tokens(torch.ones(1), torch.ones(1)).kl_error == 0.0


def test_k3_estimates_the_kl() -> None:
    generator = torch.Generator().manual_seed(2)
    reference = torch.randn(1, 30, generator=generator)
    changed = reference + 0.3 * torch.randn(1, 30, generator=generator)
    every = torch.arange(30)
    _, k3 = token_divergence(reference.expand(30, -1), changed.expand(30, -1), every)
    assert bool((k3 >= 0).all())
    mean = (reference.double().softmax(-1)[0] * k3).sum().item()
    assert mean == pytest.approx(token_kl(reference, changed).item(), rel=1e-9)
