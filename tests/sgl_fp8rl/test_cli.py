"""``sgl-fp8rl layers``: what it prints, and what a real engine answers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sgl_fp8rl.tools import cli
from tests.engine.models import make_checkpoint

LAYERS: list[dict[str, Any]] = [
    {"name": name, "format": kept, "reason": why, "shape": [384, 256], **padded}
    for name, kept, why, padded in (
        ("lm_head", "bf16", "output head", {"unpadded": None, "padding_bytes": 0}),
        ("o_proj", "block-fp8", None, {"unpadded": [320, 256], "padding_bytes": 64 * 256}),
    )
]


def test_layers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, int]] = []

    def read(model: str, tp_size: int) -> list[dict[str, Any]]:
        asked.append((model, tp_size))
        return LAYERS

    monkeypatch.setattr(cli, "read_layers", read)
    assert cli.main(["layers", "some/model", "--tp", "2", "--json"]) == 0
    assert asked == [("some/model", 2)]
    assert json.loads(capsys.readouterr().out) == {"layers": LAYERS}
    assert cli.main(["layers", "some/model"]) == 0
    shown = capsys.readouterr().out
    assert all(fact in shown for fact in ("output head", "320x256 padded, 0.02 MB more", "1 of 2"))


def test_a_path_without_a_model_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(model: str, tp_size: int) -> Any:
        raise OSError("Repo id must be in the form ...")

    monkeypatch.setattr("sgl_fp8rl.tools.layers.dummy_engine", start)
    with pytest.raises(SystemExit, match="sgl-fp8rl layers /absent: Repo id"):
        cli.main(["layers", "/absent"])


def test_layers_without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(SystemExit, match="SGLang"):
        cli.main(["layers", "some/model"])


@pytest.mark.engine
@pytest.mark.full
def test_layers_of_a_real_engine(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3_ragged", tmp_path / "model")
    (model / "model.safetensors").unlink()  # only shapes are needed
    layers_ = [sys.executable, "-m", "sgl_fp8rl.tools.cli", "layers", str(model), "--json"]
    child = subprocess.run(layers_, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr
    layers = {layer["name"]: layer for layer in json.loads(child.stdout)["layers"]}
    down = layers["model.layers.1.mlp.down_proj"]
    assert (down["format"], down["reason"], down["shape"]) == ("block-fp8", None, [256, 512])
    output = layers["model.layers.1.self_attn.o_proj"]
    assert (output["format"], output["shape"], output["unpadded"]) == (
        "block-fp8",
        [256, 256],
        [256, 192],
    )
    assert layers["lm_head"]["format"] == "bf16"
    assert len(layers) == 2 * 4 + 2
