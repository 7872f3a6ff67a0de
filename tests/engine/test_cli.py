"""``sgl-fp8rl layers`` of a real model, and what ``tune`` needs of SGLang after it."""

import json
from pathlib import Path

import pytest

from sgl_fp8rl import cli, compat
from sgl_fp8rl.gemm import expert_tiles
from sgl_fp8rl.gemm.expert_tiles import ExpertShape
from sgl_fp8rl.gemm.kept import Machine
from tests.engine import models

pytestmark = pytest.mark.engine


def test_layers_of_a_model_with_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = models.make_checkpoint("qwen3_moe", tmp_path / "model")
    capsys.readouterr()
    assert cli.main(["layers", str(checkpoint), "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    experts = {x["name"]: x for x in layers if len(x["shape"]) == 3}
    assert len(experts) == 2, "one a decoder layer"
    assert all(x["format"] == "fp8" for x in experts.values())
    assert all(x["top_k"] is None for x in layers), "a CPU runs SGLang's kernels"

    # `tune` asks, in this process, which tiles an engine would take: SGLang answers from the
    # arguments that the engine has published.
    monkeypatch.delenv("SGLANG_MOE_CONFIG_DIR", raising=False)
    machine = Machine("no card", 1, {})
    assert expert_tiles.find([ExpertShape(4, 256, 128, 2)], machine, str(tmp_path)) == {}
    assert not compat.get_exec().deterministic.enable_deterministic_inference
