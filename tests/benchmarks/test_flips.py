"""What counts as changed between two images of a model."""

import pytest
import torch
from torch import nn

from benchmarks.flips import changes, image
from sgl_fp8rl.ops.delta import RECORD_BYTES


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.ModuleDict(
        {"proj": nn.Linear(256, 128, bias=False), "lm_head": nn.Linear(128, 64, bias=False)}
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return made


def test_each_part_is_counted_by_itself(model: nn.Module) -> None:
    before = image(model)
    assert set(changes(before, image(model)).values()) == {0.0}
    with torch.no_grad():
        model.get_parameter("proj.weight")[5, 7] *= -1.0  # another code, the same scale
        model.get_parameter("lm_head.weight")[0, :3] += 1.0
    found = changes(before, image(model))
    assert found["codes_changed"] == found["codes_changed_most"] == 1 / (128 * 256)
    assert found["lm_head_changed"] == 3 / (64 * 128)
    codes, scales = 128 * 256, 2 * 4
    assert found["fp8_sent"] == pytest.approx(RECORD_BYTES / (codes + scales))
    assert found["scales_changed"] == 0.0


def test_a_new_largest_value_moves_a_scale(model: nn.Module) -> None:
    before = image(model)
    with torch.no_grad():
        model.get_parameter("proj.weight")[0, 0] = 10.0
    found = changes(before, image(model))
    assert found["scales_changed"] == 1 / 2
    assert found["codes_changed"] > 0.1


def test_a_step_below_the_rounding_changes_nothing(model: nn.Module) -> None:
    before = image(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 2.0**-12)
    assert set(changes(before, image(model)).values()) == {0.0}
