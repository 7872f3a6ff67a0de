"""What a replay measures is the model's own forward, text by text."""

from typing import Any

import pytest
import torch

from sgl_fp8rl.tools.precision import fake_quant, tokens
from sgl_fp8rl.tools.precision.divergence import token_divergence
from sgl_fp8rl.tools.precision.groups import Group, fp8_groups
from sgl_fp8rl.tools.precision.replay import Replay
from tests.sgl_fp8rl.tools.precision.conftest import TEXTS, Load, replay_of

FAMILIES = ("qwen3", "qwen3_moe", "gemma2", "phi3")
BATCHING = 0.02
"""Relative difference of a KL to that of the model's forward of each text alone, in FP32; products
of other shapes add in another order. At most 4e-4 here."""


def by_hand(model: Any, groups: list[Group]) -> tuple[float, float]:
    """KL and k3 of the model's own forward, text by text, nothing kept."""
    kls, k3s = [], []
    for text in TEXTS:
        assert text.response is not None
        ids = torch.tensor([text.prompt + text.response])
        with torch.inference_mode():
            ours = model(ids).logits[0]
            with fake_quant.fp8(groups):
                theirs = model(ids).logits[0]
        where = slice(len(text.prompt) - 1, -1)
        kl, k3 = token_divergence(ours[where], theirs[where], torch.tensor(text.response))
        kls.append(kl)
        k3s.append(k3)
    return torch.cat(kls).mean().item(), torch.cat(k3s).mean().item()


@pytest.mark.parametrize("family", FAMILIES)
def test_divergence_is_that_of_whole_forwards(family: str, load: Load) -> None:
    model = load(family, torch.float32)
    replay = replay_of(model)
    assert replay.tokens == sum(len(text.response or []) for text in TEXTS)
    groups = fp8_groups(model)
    for some in ([groups[0]], [groups[-1]], groups):
        got = replay.divergence(some)
        kl, k3 = by_hand(model, some)
        assert got.kl == pytest.approx(kl, rel=BATCHING)
        assert got.k3 == pytest.approx(k3, rel=BATCHING)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_changed_is_no_divergence(family: str, load: Load) -> None:
    assert replay_of(load(family)).divergence([]).kl == 0.0


def test_the_model_is_left_as_it_was(load: Load) -> None:
    model = load("qwen3_moe")
    ids = torch.tensor([[1, 2, 3]])
    before = model(ids).logits
    layers = model.model.layers
    replay_of(model).divergence(fp8_groups(model))
    assert model.model.layers is layers and torch.equal(model(ids).logits, before)
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_nan_in_the_models_own_logits_is_refused(load: Load) -> None:
    model = load("qwen3")
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(ValueError, match=r"logits.*NaN or Inf"):
        Replay(model, tokens.batches_of(TEXTS, model.device))
