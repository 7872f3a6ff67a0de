"""What is told of an engine's layers."""

import pytest
import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)
from torch import nn

from sgl_fp8rl.engine.quant_config import LayerFormat, list_layers
from tests.experts_fakes import E, Experts, H, I, T


@pytest.mark.usefixtures("publish")
def test_experts_tell_how_many_a_token_takes() -> None:
    """Those whose products are chosen here, and no other layer."""
    layers = {"mlp": Experts(), "sglangs": Experts(activation="gelu"), "head": nn.Linear(4, 2)}
    shape = (E, 2 * I, H)
    assert list_layers(nn.ModuleDict(layers)) == [
        LayerFormat("mlp", "fp8", None, shape, T),
        LayerFormat("sglangs", "fp8", None, shape, None),
        LayerFormat(
            "head",
            "bf16",
            "router or other layer that the model builds without quantization",
            (2, 4),
            None,
        ),
    ]
