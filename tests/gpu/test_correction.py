"""Corrections on a GPU are the CPU's, which an oracle checks."""

import math
import re

import pytest
import torch

from trainer_bridge.correction import PRESETS, CorrectionConfig, correct_logprobs
from trainer_bridge.correction.config import LEVELS, REJECTIONS

REL = 1e-12
"""Of the largest of its kind, float64 sums in another order; healthy below 1e-14."""
FLOAT32_REL = 2e-7
BIN = 0.01
"""A percentile is a histogram's bin; logarithms may differ by an ulp between devices."""
EVERYTHING = CorrectionConfig(
    "geometric",
    (0.9, 1.2),
    rollout_is_batch_normalize=True,
    rollout_rs={
        **{option: (0.2, 4.0) for option in REJECTIONS if option.endswith("k1")},
        **{option: 0.15 for option in REJECTIONS if not option.endswith("k1")},
    },
    veto_threshold=0.4,
)
CONFIGS = {
    **PRESETS,
    "everything": EVERYTHING,
    **{f"{level} band": CorrectionConfig(level, (0.9, 1.05)) for level in LEVELS},
    "mean of tokens": CorrectionConfig("token", 1.1, rollout_is_batch_normalize=True),
    "veto": CorrectionConfig(None, veto_threshold=0.6),
    "weights that are not applied": CorrectionConfig("token", bypass_mode=True),
}
SHAPES = {"narrow": (4, 5), "odd": (3, 40), "long": (2, 17_000)}

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_batch(shape: tuple[int, int], device: str, spread: float = 0.2) -> Batch:
    """Ragged rows, one empty, one with a hole; values outside the mask are NaN."""
    B, T = shape
    generator = torch.Generator().manual_seed(B * T)
    rollout_BT = -2 - 3 * torch.rand(shape, generator=generator)
    trainer_BT = rollout_BT + spread * torch.randn(shape, generator=generator)
    lengths_B = torch.tensor([T, 0, *((T * 2) // 3 + row for row in range(B - 2))])
    mask_BT = torch.arange(T) < lengths_B[:, None]
    mask_BT[0, T // 2] = False
    trainer_BT.masked_fill_(~mask_BT, math.nan)
    trainer, rollout, mask = (x.to(device) for x in (trainer_BT, rollout_BT, mask_BT))
    return trainer, rollout, mask


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_gpu_corrects_as_a_cpu_does(
    config: CorrectionConfig, shape: tuple[int, int], device: str
) -> None:
    versions_BT = torch.arange(math.prod(shape)).view(shape) // 50 + 7
    batch = make_batch(shape, "cpu")
    expected = correct_logprobs(*batch, config, versions_BT=versions_BT)
    moved = (tensor.to(device) for tensor in batch)
    found = correct_logprobs(*moved, config, versions_BT=versions_BT.to(device))
    assert found.weights_BT.device.type == device
    torch.testing.assert_close(
        found.weights_BT.cpu(), expected.weights_BT, rtol=FLOAT32_REL, atol=0
    )
    assert torch.equal(found.mask_BT.cpu(), expected.mask_BT)
    assert torch.equal(found.old_logprobs_BT.cpu(), expected.old_logprobs_BT)
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        tolerance = BIN if re.search(r"ratio_p\d\d", name) else REL
        assert found.metrics[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
