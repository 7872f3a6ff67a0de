"""What the engine says of its routed experts, and SGLang's capture of them put right."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

ROWS, LAYERS, TOP_K = 4, 3, 2


class Capturer:
    """SGLang 0.5.17's: it hands out a view of the buffer that forward passes write into."""

    def __init__(self) -> None:
        buffer = torch.zeros(ROWS, LAYERS, TOP_K, dtype=torch.int32)
        self.device_cache = SimpleNamespace(buffer=buffer)

    def forward(self, experts: int, tokens: int) -> None:
        self.device_cache.buffer[:tokens] = experts

    def on_forward_end(self, tokens: int, no_copy_to_cpu: bool = True) -> Any:
        if not no_copy_to_cpu:
            return None
        return SimpleNamespace(topk=self.device_cache.buffer[:tokens])


def test_the_next_forward_pass_leaves_a_capture_alone() -> None:

    from sgl_fp8rl.engine.layers.routed_experts import clone_captured_topk

    capturer = Capturer()
    capturer.forward(experts=1, tokens=3)
    stock = capturer.on_forward_end(3)
    ours = clone_captured_topk(Capturer.on_forward_end, capturer, 3)
    capturer.forward(experts=2, tokens=4)
    assert (ours.topk == 1).all()
    assert (stock.topk == 2).all()  # the fault
    assert clone_captured_topk(Capturer.on_forward_end, capturer, 3, no_copy_to_cpu=False) is None
    own = SimpleNamespace(topk=torch.ones(3, LAYERS, TOP_K))  # which is not copied again
    assert clone_captured_topk(lambda capturer: own, Capturer()).topk is own.topk


def test_the_layout_names_the_layers_that_route(monkeypatch: pytest.MonkeyPatch) -> None:

    from sgl_fp8rl.engine import compat
    from sgl_fp8rl.engine.layers import routed_experts

    class FusedMoE(nn.Module):
        def __init__(self, layer_id: int) -> None:
            super().__init__()
            self.layer_id, self.num_experts, self.num_fused_shared_experts = layer_id, 9, 1

    capturer = SimpleNamespace(num_layers=LAYERS, topk_size=TOP_K)
    monkeypatch.setitem(compat.__dict__, "FusedMoE", FusedMoE)
    monkeypatch.setitem(compat.__dict__, "get_global_experts_capturer", lambda: capturer)
    moe = nn.Sequential(FusedMoE(2), nn.Linear(2, 2), FusedMoE(1))
    assert routed_experts.layout(moe) == {
        "decoder_layers": LAYERS,
        "layers": [1, 2],
        "experts": 8,
        "top_k": TOP_K,
    }
    assert routed_experts.layout(nn.Linear(2, 2)) is None  # a dense model
    monkeypatch.setitem(compat.__dict__, "get_global_experts_capturer", lambda: None)
    assert routed_experts.layout(moe) is None  # started without the flag
