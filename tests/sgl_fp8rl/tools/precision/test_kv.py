"""K and V as an FP8 KV cache gives them back."""

import math

import pytest
import torch
from transformers.modeling_utils import AttentionInterface

from sgl_fp8rl.ops.reference import FP8_MAX
from sgl_fp8rl.tools.precision import kv, tokens
from tests import kv_oracle, oracle
from tests.sgl_fp8rl.tools.precision.conftest import TEXTS, Load, replay_of


def test_read_back_is_what_the_oracle_has() -> None:
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0)).bfloat16() * 50
    scale = torch.tensor(0.125)
    got = kv.read_back(x, scale)
    assert got.dtype == x.dtype and got.shape == x.shape
    codes, _ = kv_oracle.encode(x.float().numpy().flatten(), 0.125)
    wanted = torch.from_numpy(oracle.decode(codes) * 0.125).bfloat16()
    assert torch.equal(got.flatten(), wanted)
    assert got.abs().max() == FP8_MAX * 0.125  # what is larger is cut off


def test_attention_of_each_layer_reads_under_its_own_scales(load: Load) -> None:
    model = load("qwen3")
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.inference_mode():
        before = model(ids).logits
        fine = kv.layer_scales(model, tokens.batches_of(TEXTS, model.device))
        original = AttentionInterface.get_interface  # hooked by the calibrator, for good
        assert fine.shape == (2, 2)
        with kv.rounded(fine):
            healthy = model(ids).logits
        coarse = fine.clone()
        coarse[1, 1] = 1e-6  # V of the second layer is cut off
        with kv.rounded(coarse):
            cut = model(ids).logits
        assert torch.equal(model(ids).logits, before)
    assert AttentionInterface.get_interface is original
    error, far = (float((x - before).abs().mean()) for x in (healthy, cut))
    assert 0 < 5 * error < far


def test_scales_are_those_of_an_update(load: Load) -> None:
    """amax of K and V times the margin of 2 over 448, rounded up; padding does not count."""
    model = load("qwen3")
    alone = [kv.layer_scales(model, tokens.batches_of([text], model.device)) for text in TEXTS]
    together = kv.layer_scales(model, tokens.batches_of(TEXTS, model.device))
    torch.testing.assert_close(together, torch.stack(alone).amax(0), rtol=0.02, atol=0)


def test_rounding_changes_a_replay_from_the_first_layer_on(load: Load) -> None:
    model = load("qwen3")
    replay = replay_of(model)
    scales = kv.layer_scales(model, tokens.batches_of(TEXTS, model.device))
    with kv.rounded(scales):
        both = replay.divergence([], first_layer=0).kl
        second = replay.divergence([], first_layer=1).kl
    assert 0 < second < both and math.isfinite(both)
    assert replay.divergence([], first_layer=0).kl == 0.0


def test_the_patch_is_taken_back_after_an_error() -> None:
    original = AttentionInterface.get_interface
    with pytest.raises(KeyError), kv.rounded(torch.ones(1, 2)):
        assert AttentionInterface.get_interface is not original
        raise KeyError
    assert AttentionInterface.get_interface is original
