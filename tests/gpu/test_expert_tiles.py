"""SGLang's Triton kernel with tiles of ours: values, and what ``sgl-fp8rl tune`` makes of a GPU.

Values are tested in Triton's interpreter as well, where the sort of routes is a loop.
"""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.gemm import expert_tiles, experts
from sgl_fp8rl.engine.gemm.expert_tiles import ExpertShape, Tiles
from sgl_fp8rl.engine.gemm.tune_cache import Machine
from sgl_fp8rl.engine.tuning import expert_bench_inputs, expert_tune
from sgl_fp8rl.engine.tuning.bench_inputs import cuda_graph_us
from sgl_fp8rl.engine.tuning.expert_bench_inputs import GEMMS, ExpertBenchInputs
from sgl_fp8rl.engine.tuning.tune import ERROR_BOUND
from sgl_fp8rl.formats import BLOCK_FP8
from sgl_fp8rl.tools import tune as command
from tests import experts_fakes
from tests.activation_oracle import rows
from tests.gpu.conftest import INTERPRETED

pytest.importorskip("sglang")

TINY = ExpertShape(4, 256, 128, 3)
SMALL = ExpertShape(16, 512, 256, 4)
TOKENS = [1, 64, 1024]
HEALTHY = 1e-5
"""Of FP32 sums rounded to BF16: 2e-6 in the interpreter."""
MAX_ERROR = 0.01
"""As in test_experts.py, between tiles that sum in another order."""
TILES: dict[str, dict[str, Any]] = {
    "16": {},
    "wide": {"BLOCK_SIZE_N": 256, "num_warps": 8},
    "32": {"BLOCK_SIZE_M": 32, "GROUP_SIZE_M": 16},
    "tma": {"USE_TMA": True},
    "narrow": {"BLOCK_SIZE_K": 64},
}


def config(**options: Any) -> dict[str, Any]:
    sizes = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}
    return {**sizes, "num_warps": 4, "num_stages": 3, **options}


@pytest.fixture(autouse=True)
def _as_in_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = SimpleNamespace(enable_deterministic_inference=False)
    of_sglang = compat.SYMBOLS["try_get_optimal_moe_config"].partition(":")[0]
    configs = importlib.import_module(f"{of_sglang}.fused_moe_triton_config")
    for path in (compat.SYMBOLS["get_exec"].replace(":", "."), f"{configs.__name__}.get_exec"):
        monkeypatch.setattr(path, lambda: SimpleNamespace(deterministic=flags))
    if INTERPRETED:
        align = compat.SYMBOLS["moe_align_block_size"].replace(":", ".")
        monkeypatch.setattr(align, experts_fakes.align)
    monkeypatch.delenv("SGLANG_MOE_CONFIG_DIR", raising=False)


@pytest.fixture
def inputs(device: str, monkeypatch: pytest.MonkeyPatch) -> ExpertBenchInputs:
    monkeypatch.setattr(expert_bench_inputs, "ROTATED_BYTES", 0)
    return ExpertBenchInputs(TINY, device, cuda_graph_us)


@pytest.mark.parametrize("name", GEMMS)
@pytest.mark.parametrize("tiles", TILES)
def test_products_are_those_of_float64(name: str, tiles: str, inputs: ExpertBenchInputs) -> None:
    """On normal activations and on such with outliers."""
    for m in (1, 21):
        assert inputs.error(name, config(**TILES[tiles]), m) <= HEALTHY


def test_control_blocks_of_channels_with_two_scales_show(inputs: ExpertBenchInputs) -> None:
    """The kernel takes the first one's for both, and says nothing."""
    assert inputs.error("gate_up", config(BLOCK_SIZE_K=256), 21) > ERROR_BOUND


@pytest.mark.parametrize("name", GEMMS)
def test_control_the_next_expert_shows(
    name: str, inputs: ExpertBenchInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    align = compat.moe_align_block_size

    def shifted(ids_MT: torch.Tensor, block: int, experts: int) -> tuple[torch.Tensor, ...]:
        sorted_ids, expert_ids, used = align(ids_MT, block, experts)
        return sorted_ids, (expert_ids + 1) % experts, used

    monkeypatch.setattr(compat, "moe_align_block_size", shifted)
    assert inputs.error(name, config(), 21) > ERROR_BOUND


# ---- on a GPU


@pytest.mark.skipif(INTERPRETED, reason="it times kernels")
@torch.no_grad()
def test_tune_measures_keeps_and_an_engine_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compiled in processes of their own; no time is asserted but that no pick lost."""
    monkeypatch.setattr(expert_tune, "tokens_of", lambda shape: TOKENS)
    command.run([], [SMALL], str(tmp_path))
    out, err = capsys.readouterr()
    assert "side by side" not in err
    machine = Machine.here(0)
    pairs = expert_tiles.FILES.own(machine, str(tmp_path))[SMALL]
    assert [pair.m for pair in pairs] == TOKENS
    made = ExpertBenchInputs(SMALL, "cuda", cuda_graph_us)
    for pair in pairs:
        assert pair.us is not None and pair.stock_us is not None, "SGLang's tiles run here"
        assert 0 < pair.us <= pair.stock_us
        for name, given in zip(GEMMS, (pair.up, pair.down), strict=True):
            assert made.error(name, given, pair.m) <= ERROR_BOUND
        assert f"{pair.us:.1f}" in out
    tiles = expert_tiles.find([SMALL], machine, str(tmp_path))[SMALL]
    assert tiles == Tiles.of(pairs)
    layer = layer_of(made, tiles)
    for m in TOKENS:
        x, topk = rows(m, SMALL.hidden, spread=1).cuda(), routes(m)
        got = experts.experts(layer, x, *topk)
        want = experts.experts(layer_of(made, None), x, *topk)
        assert float((got.double() - want.double()).norm() / want.double().norm()) <= MAX_ERROR
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = experts.experts(layer, x, *topk)
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, got), "a captured graph computes as an eager call"


def layer_of(made: ExpertBenchInputs, tiles: Tiles | None) -> Any:
    """A layer with these weights."""
    (w13, s13), (w2, s2) = (made._weights[name].sets[0] for name in GEMMS)
    return SimpleNamespace(
        quant_method=SimpleNamespace(is_compiled=False, tiles=tiles, format=BLOCK_FP8),
        w13_weight=w13,
        w2_weight=w2,
        w13_weight_scale_inv=s13,
        w2_weight_scale_inv=s2,
        moe_runner_config=SimpleNamespace(inplace=False, routed_scaling_factor=None),
    )


def routes(m: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator("cuda").manual_seed(m)
    shape = m, SMALL.experts
    chosen = torch.rand(shape, generator=random, device="cuda").topk(SMALL.top_k)
    return chosen.values / chosen.values.sum(-1, keepdim=True), chosen.indices.int()
