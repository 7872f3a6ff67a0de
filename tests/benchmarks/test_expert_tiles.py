"""The tiles of experts that are given to stock SGLang, read back by SGLang itself."""

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.engines import expert_tiles
from sgl_fp8rl.engine.gemm.tune_cache import Machine

H200 = "NVIDIA H200"


def test_sglang_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sglang")
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config as stock

    monkeypatch.setattr(Machine, "here", lambda _: Machine.of(H200, 132))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: H200)
    monkeypatch.setattr(stock, "get_device_name", lambda: H200)
    deterministic = SimpleNamespace(enable_deterministic_inference=False)
    monkeypatch.setattr(stock, "get_exec", lambda: SimpleNamespace(deterministic=deterministic))
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", "elsewhere")
    expert_tiles.give_stock(tmp_path)
    read = stock.get_moe_configs.__wrapped__
    for is_down in (False, True):
        found = read(128, 768, "fp8_w8a8", 128, 128, down_moe=is_down)
        assert set(found) >= {1, 64, 4096}
        takes_tma = is_down or "up_moe_use_tma" in inspect.getsource(fused_moe)
        assert all(("USE_TMA" in tile) is takes_tma for tile in found.values())


def test_a_gpu_without_tiles_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "here", lambda _: Machine.of("NVIDIA B200", 148))
    with pytest.raises(RuntimeError, match="no tiles of experts for the NVIDIA B200"):
        expert_tiles.give_stock(tmp_path)
