"""K and V as an FP8 KV cache gives them back."""

from typing import Any

import pytest
import torch

from sgl_fp8rl.tools.precision import fake_quant, tokens
from tests.sgl_fp8rl.tools.precision.conftest import TEXTS, Load, replay_of
from trainer_bridge.kv.kv_calibrator import KVCalibrator


def test_scales_are_those_of_an_update(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """amax of K and V times the margin of 2 over 448, rounded up; padding does not count."""
    model, given = load("qwen3"), list[torch.Tensor]()

    def note(_: Any, scales_L2: Any, dtype: torch.dtype) -> None:
        if scales_L2 is not None:
            given.append(torch.tensor(scales_L2))

    monkeypatch.setattr(fake_quant, "fake_quantize_kv", note)
    for texts in (TEXTS, *([text] for text in TEXTS)):
        with fake_quant.fp8_kv(model, tokens.batches_of(texts, model.device)):
            pass
    together, *alone = given
    assert together.shape == (2, 2)
    torch.testing.assert_close(together, torch.stack(alone).amax(0), rtol=0.02, atol=0)


def test_rounding_changes_a_replay(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer under its own scales."""
    model = load("qwen3")
    replay, batches = replay_of(model), tokens.batches_of(TEXTS, model.device)
    with fake_quant.fp8_kv(model, batches):
        both = replay.divergence([]).kl
    assert both > 0
    assert replay.divergence([]).kl == 0.0

    original = KVCalibrator.scales

    def coarse(calibrator: KVCalibrator) -> torch.Tensor:
        scales_L2H = original(calibrator).clone()
        scales_L2H[1, 1] = 1e-6  # V of the second layer is cut off
        return scales_L2H

    monkeypatch.setattr(KVCalibrator, "scales", coarse)
    with fake_quant.fp8_kv(model, batches):
        assert replay.divergence([]).kl > 5 * both


def test_attention_is_put_back_after_an_error(load: Load) -> None:
    model = load("qwen3")
    replay = replay_of(model)
    with pytest.raises(KeyError), fake_quant.fp8_kv(model, tokens.batches_of(TEXTS, model.device)):
        raise KeyError
    assert replay.divergence([]).kl == 0.0
