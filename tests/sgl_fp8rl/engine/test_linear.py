"""Backends that move or repack weights are refused: an update would not reach what they read."""

from collections.abc import Callable

import pytest
import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)
import torch
from torch import nn

from sgl_fp8rl.engine.linear import keep_storage


def layer() -> nn.Module:
    """On no CPU, where SGLang's post-processing is left out."""
    return nn.Linear(4, 4, device="meta")


def copies_scales(layer: nn.Module) -> None:
    layer.padded_scale = torch.ones(2)


def repacks(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(torch.empty(2, 8, device="meta"))


def transposes(layer: nn.Module) -> None:
    layer.weight.data = layer.weight.data.t()


def rounds_scales(layer: nn.Module) -> None:
    layer.weight.format_ue8m0 = True  # type: ignore[union-attr]


@pytest.mark.parametrize("post_process", [copies_scales, repacks, transposes, rounds_scales])
def test_a_backend_with_a_layout_of_its_own_is_refused(
    post_process: Callable[[nn.Module], None],
) -> None:
    with pytest.raises(RuntimeError, match=r"mlp\.down.*--fp8-gemm-backend"):
        keep_storage(post_process, layer(), "mlp.down")


def test_other_post_processing_is_run() -> None:
    done: list[nn.Module] = []
    keep_storage(done.append, made := layer(), "mlp.down")
    assert done == [made]
