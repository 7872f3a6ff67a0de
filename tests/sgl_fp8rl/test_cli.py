"""``sgl-fp8rl layers``: its table, and what a real engine answers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sgl_fp8rl import cli
from tests.engine.models import make_checkpoint

LAYERS: list[dict[str, Any]] = [
    {"name": "model.embed_tokens", "format": "bf16", "reason": "embedding", "shape": [512, 256]},
    {"name": "model.layers.0.mlp.down_proj", "format": "fp8", "reason": None, "shape": [256, 384]},
    {"name": "model.layers.0.mlp.experts", "format": "fp8", "reason": None, "shape": [4, 256, 256]},
    {"name": "lm_head", "format": "bf16", "reason": "output head", "shape": [512, 256]},
]

TABLE = """\
layer                         shape      format  reason
model.embed_tokens            512x256    bf16    embedding
model.layers.0.mlp.down_proj  256x384    fp8
model.layers.0.mlp.experts    4x256x256  fp8
lm_head                       512x256    bf16    output head

2 of 4 in FP8; not FP8: 1 embedding; 1 output head"""


def test_layer_table() -> None:
    assert cli.render_layers(LAYERS) == TABLE


def test_no_layers() -> None:
    assert cli.render_layers([]).endswith("0 of 0 in FP8")


def test_layers_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, int]] = []

    def read(model: str, tp_size: int) -> list[dict[str, Any]]:
        asked.append((model, tp_size))
        return LAYERS

    monkeypatch.setattr(cli, "read_layers", read)
    assert cli.main(["layers", "some/model", "--tp", "2", "--json"]) == 0
    assert asked == [("some/model", 2)]
    assert json.loads(capsys.readouterr().out) == {"layers": LAYERS}


def test_a_subcommand_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main([])
    assert exit_.value.code == 2
    assert "{doctor,layers}" in capsys.readouterr().err


def test_layers_without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(SystemExit, match="needs SGLang"):
        cli.main(["layers", "some/model"])


@pytest.mark.engine
def test_layers_of_a_real_engine(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3_ragged", tmp_path / "model")
    (model / "model.safetensors").unlink()  # only shapes are needed
    layers_ = [sys.executable, "-m", "sgl_fp8rl.cli", "layers", str(model), "--json"]
    child = subprocess.run(layers_, cwd=tmp_path, capture_output=True, text=True, timeout=290)
    assert child.returncode == 0, child.stderr
    layers = {layer["name"]: layer for layer in json.loads(child.stdout)["layers"]}
    down = layers["model.layers.1.mlp.down_proj"]
    assert (down["format"], down["reason"], down["shape"]) == ("fp8", None, [256, 512])
    output = layers["model.layers.1.self_attn.o_proj"]
    assert output["format"] == "bf16"
    assert "no multiple of 128" in output["reason"]
    assert layers["lm_head"]["format"] == "bf16"
    assert len(layers) == 2 * 4 + 2
