"""The reference of a decode step's kernel against the NumPy oracle."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sgl_fp8rl.ops import qk_rope
from sgl_fp8rl.ops.qk_rope import Norms, norm_rope_store
from tests.qk_rope_oracle import Case, assert_equal, assert_near, exact, usual

SHAPES = [(1, 2, 1, 32), (5, 4, 2, 64), (3, 8, 8, 32), (4, 6, 3, 128), (2, 2, 2, 256)]


@pytest.mark.parametrize("rotary", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normed", [True, False], ids=["normed", ""])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_where_fp32_is_exact_every_bit_is_the_oracles(
    shape: tuple[int, int, int, int], normed: bool, rotary: torch.dtype
) -> None:
    made = exact(shape, normed=normed, rotary=rotary, gap=16, seed=sum(shape))
    for case in (made, replace(made, int8=True)):
        assert_equal(case.on("cpu").run(norm_rope_store).left(), case.want())


@pytest.mark.parametrize("normed", [True, False], ids=["normed", ""])
def test_elsewhere_all_but_rare_neighbours_are(normed: bool) -> None:
    made = usual((24, 8, 4, 128), normed=normed)
    assert_near(made.on("cpu").run(norm_rope_store).left(), made.want())


def test_heads_that_are_not_finite_reach_the_cache_as_nan_and_no_other_head() -> None:
    made = exact((3, 4, 2, 32), normed=True)
    made.qkv_THD[0, 4, 7] = torch.inf  # K's first head
    q, k, _, stats, _ = made.on("cpu").run(norm_rope_store).left()
    slot = int(made.slots_T[0])
    assert (k[slot, 0, [7, 23]] == 0x7F).all()
    assert not (k[slot, 1] == 0x7F).any()
    assert stats[3] < 0x7F800000 and bool(torch.isfinite(torch.tensor(q)).all())


def unrounded(x_THD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    x = x_THD.float()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight_D


def rounded_before_the_weight(
    x_THD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    one = torch.ones_like(weight_D)
    return unrounded(x_THD, one, eps).to(torch.bfloat16) * weight_D


@pytest.mark.parametrize("normed", [unrounded, rounded_before_the_weight])
def test_control_a_norm_that_rounds_elsewhere_is_seen(
    normed: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = usual((24, 8, 4, 128), normed=True)
    monkeypatch.setattr(qk_rope, "_normed", normed)
    with pytest.raises(AssertionError, match=r"of q differ|q differ by more"):
        assert_near(made.on("cpu").run(norm_rope_store).left(), made.want())


SPOILS: dict[str, Callable[[Case, Norms], dict[str, Any]]] = {
    "eps": lambda made, norms: {"norms": replace(norms, eps=norms.eps * 0.9)},
    "weights swapped": lambda made, norms: {"norms": Norms(norms.k_D, norms.q_D, norms.eps)},
    # GPT-J's order of cosines
    "interleaved": lambda made, norms: {
        "cos_sin_PD": made.cos_sin_PD.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
    },
    "positions": lambda made, norms: {"positions_T": made.positions_T.flip(0)},
    "scales swapped": lambda made, norms: {"scale_2H": made.scale_2H.flip(0)},
}


@pytest.mark.parametrize("name", SPOILS)
def test_control_a_wrong_argument_is_seen(name: str) -> None:
    made = exact((5, 4, 2, 64), normed=True)
    assert made.norms is not None
    spoilt = replace(made, **SPOILS[name](made, made.norms))
    with pytest.raises(AssertionError, match="differ"):
        assert_equal(spoilt.on("cpu").run(norm_rope_store).left(), made.want())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"qkv": lambda x: x.float()}, r"projection.*float32.*bfloat16"),
        ({"qkv": lambda x: x[:, 32:]}, "projection.* 2 KV heads"),
        ({"qkv": lambda x: x[:, :-1]}, r"projection.*\[tokens"),
        ({"qkv": lambda x: x.T.contiguous().T}, "projection.*last stride"),
        ({"positions": lambda x: x.int()}, r"positions.*int32.*int64"),
        ({"positions": lambda x: x[1:]}, r"positions.*\[2\].*\[3\]"),
        ({"cos_sin": lambda x: x.double()}, r"cosines.*float64.*float32"),
        ({"cos_sin": lambda x: x[:, :16]}, r"\[positions, 32\]"),
        ({"norms": lambda x: replace(x, k_D=x.k_D.float())}, r"norm.*float32.*bfloat16"),
        ({"norms": lambda x: replace(x, q_D=x.q_D[:16])}, r"norm.*bfloat16 \[32\]"),
        ({"slots": lambda x: x.int()}, r"slots.*int32.*int64"),
        ({"cache": lambda x: replace(x, stats_C=x.stats_C[:4])}, r"statistics.*int64 \[5\]"),
        (
            {"cache": lambda x: replace(x, k_SHD=x.k_SHD[..., :24], v_SHD=x.v_SHD[..., :24])},
            "head dim.* 24",
        ),
    ],
)
def test_what_does_not_fit_is_a_sentence(change: dict[str, Any], sentence: str) -> None:
    got = exact((3, 4, 2, 32), normed=True).on("cpu")
    for name, changed in change.items():
        setattr(got, name, changed(getattr(got, name)))
    with pytest.raises(ValueError, match=sentence):
        got.run(norm_rope_store)
    assert not got.k_cache.box.view(torch.uint8).any()
