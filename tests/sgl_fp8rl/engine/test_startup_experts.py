"""What experts are given at start: compiled products, and an input of their own."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.startup import expert_kernels as startup_experts
from tests.experts_fakes import Experts
from tests.sgl_fp8rl.conftest import Publish

pytestmark = pytest.mark.usefixtures("publish")


def test_grouped_products_are_compiled_once_for_each_shape(
    monkeypatch: pytest.MonkeyPatch, publish: Publish
) -> None:
    layers = [Experts(), Experts(), Experts(top_k=4), Experts(activation="gelu")]
    publish(chunked_prefill_size=512, max_running_requests=64)
    monkeypatch.setattr(compat.deep_gemm_warmup, "_BUILTIN_M_LIST", [64, 2048])
    compiled: list[Any] = []
    monkeypatch.setattr(startup_experts, "compile_grouped", lambda *args: compiled.append(args))
    startup_experts.compile_experts(nn.ModuleList([nn.Linear(1, 1), *layers]))
    assert compiled == [(layers[0], 3, 512), (layers[2], 4, 512)]
    assert [layer.quant_method.is_compiled for layer in layers] == [True, True, True, False]


def test_experts_leave_the_input_that_shared_experts_read() -> None:
    """DeepSeek's run them on another stream; its engine on a CPU has none, and other models have no
    shared experts beside."""
    blocks = [
        SimpleNamespace(shared_experts=nn.Linear(1, 1), alt_stream=object()),
        SimpleNamespace(shared_experts=nn.Linear(1, 1), alt_stream=None),
        SimpleNamespace(alt_stream=object()),
    ]
    model = nn.Module()
    for index, fields in enumerate(blocks):
        block: Any = nn.Module()
        block.experts = Experts()
        for name, value in vars(fields).items():
            setattr(block, name, value)
        model.add_module(str(index), block)
    startup_experts.keep_inputs(model)
    kept = [not block.experts.moe_runner_config.inplace for block in model.children()]  # type: ignore[union-attr]
    assert kept == [True, False, False]
