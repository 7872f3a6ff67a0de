"""A block-FP8 checkpoint starts as the BF16 checkpoint that it was made of."""

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from sgl_fp8rl.ops.reference import quantize_weight
from tests.engine import models
from tests.engine.harness import EngineProcess

pytestmark = [pytest.mark.engine, pytest.mark.full]

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def contents(log: Path, checkpoint: Path, tp_size: int) -> list[dict[str, str]]:
    with EngineProcess(log, checkpoint, tp_size) as engine:
        ranks = engine.control({"op": "digest"})["ranks"]
    return [{name: tensor["sha256"] for name, tensor in rank.items()} for rank in ranks]


@pytest.mark.parametrize(("family", "tp_size"), [("qwen3", 1), ("smollm2", 1), ("qwen2_cut", 2)])
def test_fp8_checkpoint(family: str, tp_size: int, tmp_path: Path) -> None:
    """Also where ranks cut its blocks."""
    bf16 = models.make_checkpoint(family, tmp_path / "bf16")
    fp8 = tmp_path / "fp8"
    fp8.mkdir()
    config = json.loads((bf16 / "config.json").read_text())
    (fp8 / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))
    save_file(dict(models.fp8_stream(bf16, quantize_weight)), fp8 / "model.safetensors")
    started = (contents(tmp_path / f"{path.name}.log", path, tp_size) for path in (fp8, bf16))
    assert next(started) == next(started)
