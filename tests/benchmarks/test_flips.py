"""What counts as changed between two images of a model."""

import pytest
import torch
from torch import nn

from benchmarks.flips import changes, codes_changed_by_layer, image
from benchmarks.tables.flips import flips
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


def test_layers_are_counted_apart() -> None:
    layers = nn.ModuleList(
        nn.ModuleDict({"up": nn.Linear(128, 128), "down": nn.Linear(128, 128)}) for _ in range(2)
    )
    model = nn.ModuleDict({"model": nn.ModuleDict({"layers": layers})})
    before = image(model)
    with torch.no_grad():
        model.get_parameter("model.layers.1.down.weight")[5, 7] *= -1.0
    assert codes_changed_by_layer(before, image(model)) == {"0": 0.0, "1": 1 / (2 * 128 * 128)}


def test_the_table_has_layers_and_steps() -> None:
    row = {"arm": "fp8rl", "model": "13M", "metric": "codes_changed", "unit": "1", "n": 20}
    row |= {"median": 0.002, "min": 0.001, "max": 0.004}
    cases = ("1e-06", "1e-06, layer 0", "1e-06, layer 1", "1e-06, step 20", "1e-05, layer 1")
    rows = [row | {"case": case} for case in cases]
    facts = {"device": "A CPU", "date": "2026-01-01", "commit": "abc1234"}
    found = flips({"rows": rows, "failures": {}, "environment": facts})
    assert "| 1e-06 | 0.20% (0.10% to 0.40%) |" in found
    for line in ("| codes, layer | 0 | 1 |", "| 1e-06 | 0.20% | 0.20% |", "| 1e-05 |  | 0.20% |"):
        assert line in found
    assert "| codes, step | 20 |" in found


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
