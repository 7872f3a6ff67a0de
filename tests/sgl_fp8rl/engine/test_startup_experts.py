"""What experts are given at start: tiles, the same on all ranks, and compiled products."""

from types import SimpleNamespace
from typing import Any

import pytest
import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)
import torch
from torch import nn

from server_args import Fp8RLServerArgs
from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.control.attached import attach
from sgl_fp8rl.engine.gemm import expert_tiles
from sgl_fp8rl.engine.gemm.expert_tiles import ExpertShape, Pair, Tiles
from sgl_fp8rl.engine.gemm.tune_cache import Machine
from sgl_fp8rl.engine.startup import expert_kernels as startup_experts
from tests.experts_fakes import E, Experts, H, I, T
from tests.sgl_fp8rl.conftest import Publish

SHAPE = ExpertShape(E, H, I, T)
CONFIG = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}
TILES = Tiles.of([Pair(1, CONFIG, CONFIG)])


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


class Rank:
    """One of an engine's ranks; the first one finds tiles for the experts of ``SHAPE``."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int = 0, world_size: int = 1) -> None:
        self.found: list[Any] = []
        self.number = number
        group = SimpleNamespace(
            rank_in_group=number, world_size=world_size, ranks=[4, 5], cpu_group="gloo"
        )
        properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
        patch.setattr(compat, "get_tp_group", lambda: group, raising=False)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: {3: properties}[device])
        patch.setattr(torch.distributed, "broadcast_object_list", self._broadcast)
        patch.setattr(expert_tiles, "find", self._find)

    def _find(self, shapes: Any, machine: Machine, folder: str) -> dict[ExpertShape, Tiles]:
        self.found.append((shapes, machine.gpu, machine.sms, folder))
        return {SHAPE: TILES}

    def _broadcast(self, objects: list[Any], src: int, group: str) -> None:
        assert (src, group) == (4, "gloo") and objects == [None if self.number else {SHAPE: TILES}]
        objects[:] = [{SHAPE: TILES}]


def on_a_gpu(layer: Experts) -> Experts:
    """Its first weight claims to be there."""
    del layer.w13_weight
    layer.w13_weight = SimpleNamespace(device=torch.device("cuda"))  # type: ignore[assignment]
    return layer


@pytest.mark.parametrize(("number", "world_size"), [(0, 1), (0, 2), (1, 2)])
def test_layers_get_the_tiles_that_the_first_rank_found(
    number: int, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer those of its shape; others keep SGLang's, and other engines read nothing."""
    rank = Rank(monkeypatch, number, world_size)
    for other in ([], [Experts()], [on_a_gpu(Experts(activation="gelu"))]):  # the second: a CPU
        startup_experts.assign_tile_configs(nn.ModuleList(other), 3)
        assert rank.found == [] and all(layer.quant_method.tiles is None for layer in other)
    layers = [on_a_gpu(x) for x in (Experts(), Experts(top_k=4), Experts(activation="gelu"))]
    model = nn.ModuleList([nn.Linear(1, 1), *layers])
    weights: Any = SimpleNamespace(options=Fp8RLServerArgs(tune_cache="the user's folder"))
    attach(model, weights)
    startup_experts.assign_tile_configs(model, 3)
    assert [layer.quant_method.tiles for layer in layers] == [TILES, None, None]
    found = ([SHAPE, SHAPE._replace(top_k=4)], "NVIDIA H200", 132, "the user's folder")
    assert rank.found == ([found] if number == 0 else [])


def test_experts_leave_the_input_that_shared_experts_read() -> None:
    """DeepSeek's run them on another stream; its engine on a CPU has none, and other models have no
    shared experts beside."""
    model, other = nn.Module(), nn.Linear(1, 1)
    for index, fields in enumerate(
        (
            {"shared_experts": other, "alt_stream": object()},
            {"shared_experts": other, "alt_stream": None},
            {"alt_stream": object()},
        )
    ):
        block: Any = nn.Module()
        for name, value in {"experts": Experts(), **fields}.items():
            setattr(block, name, value)
        model.add_module(str(index), block)
    startup_experts.keep_inputs(model)
    kept = [not block.experts.moe_runner_config.inplace for block in model.children()]  # type: ignore[union-attr]
    assert kept == [True, False, False]
