"""``sgl-fp8rl export`` without an engine: files, the config, and what is refused."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_fp8rl.formats import BLOCK_FP8, BLOCK_FP8_UE8M0
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.protocol.checkpoint_headers import INDEX
from sgl_fp8rl.tools import cli, export

MATRIX, HEAD, NORM = "model.layers.0.mlp.down_proj.weight", "lm_head.weight", "model.norm.weight"


def checkpoint(folder: Path, **config: Any) -> Path:
    """Three tensors in two shards, a tokenizer, and files that an export must not carry along."""
    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=draw).bfloat16()
        for name, shape in {MATRIX: (256, 128), HEAD: (64, 256), NORM: (256,)}.items()
    }
    files = {MATRIX: "a.safetensors", HEAD: "b.safetensors", NORM: "b.safetensors"}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, folder / file)
    save_file(tensors, folder / "consolidated.safetensors")  # not in the index: not the weights
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny", **config}))
    for name in ("tokenizer.json", ".hidden", "pytorch_model.bin"):
        (folder / name).write_text(name)
    return folder


class FakeEngine:
    """Would quantize one matrix."""

    format = BLOCK_FP8.name

    def fp8rl_control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        if message == {"op": "layers"}:
            bf16 = ("lm_head", "model.layers.0.self_attn.qkv_proj")
            layers = [{"name": name, "format": "bf16"} for name in bf16]
            down = {"name": MATRIX.removesuffix(".weight"), "format": self.format}
            return {"layers": [*layers, down]}
        assert message["op"] == "export_layout"
        assert message["manifest"]["tensors"].keys() == {MATRIX, HEAD, NORM}
        return {"formats": {self.format: [MATRIX]}, "dtype": "bfloat16"}


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the engine that is asked was started with."""
    started: list[Any] = []

    @contextmanager
    def fake(*arguments: Any, **options: Any) -> Iterator[FakeEngine]:
        started.append((*arguments, options))
        yield FakeEngine()

    monkeypatch.setattr(export, "dummy_engine", fake)
    return started


def test_a_checkpoint(options: list[Any], tmp_path: Path) -> None:
    source, output = checkpoint(tmp_path / "in"), tmp_path / "new" / "out"
    arguments = ["export", str(source), str(output), "--tp", "2"]
    assert cli.main([*arguments, "--ignored-layers", "a", "re:b"]) == 0
    wanted_options = {
        "fp8rl_format": "block-fp8",
        "fp8rl_ragged": "bf16",
        "fp8rl_ignored_layers": ("a", "re:b"),
    }
    assert options == [(str(source), 2, wanted_options)]

    given = {**load_file(source / "a.safetensors"), **load_file(source / "b.safetensors")}
    encoded = BLOCK_FP8.encode(given.pop(MATRIX))
    wanted = given | {MATRIX + suffix: part for suffix, part in encoded.items()}
    files = {path.name: load_file(path) for path in output.glob("*.safetensors")}
    index = json.loads((output / INDEX).read_text())
    assert index["weight_map"] == {name: file for file, held in files.items() for name in held}
    found = {name: tensor for held in files.values() for name, tensor in held.items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
    written = {path.name for path in output.iterdir()}
    shards = {"a.safetensors", "b.safetensors"}
    assert written == {*shards, INDEX, "config.json", "tokenizer.json"}
    config = json.loads((output / "config.json").read_text())
    assert config["model_type"] == "tiny"
    names = config["quantization_config"].pop("modules_to_not_convert")
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    # those of the checkpoint, of the engine, and the parts of the engine's stacked layers
    parts = {f"model.layers.0.self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj")}
    assert set(names) == {"lm_head", "model.layers.0.self_attn.qkv_proj"} | parts


@pytest.mark.parametrize("is_known", [True, False], ids=["powers of two", "of tests alone"])
def test_a_checkpoint_in_another_format(
    is_known: bool,
    options: list[Any],
    other_format: WeightFormat,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fmt = BLOCK_FP8_UE8M0 if is_known else other_format
    monkeypatch.setattr(FakeEngine, "format", fmt.name)
    source, output = checkpoint(tmp_path / "in"), tmp_path / "out"
    if is_known:
        assert cli.main(["export", str(source), str(output), "--format", fmt.name]) == 0
        assert options[0][-1]["fp8rl_format"] == fmt.name
    else:
        assert f"1 {fmt.name} and 1 other" in export.run(source, output, format_=fmt.name)
    found = load_file(output / "a.safetensors")
    for suffix, part in fmt.encode(load_file(source / "a.safetensors")[MATRIX]).items():
        assert torch.equal(found[MATRIX + suffix].view(torch.uint8), part.view(torch.uint8))
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == ("fp8" if is_known else "int8")
    assert config.get("scale_fmt") == ("ue8m0" if is_known else None)


def test_what_is_refused(
    options: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint(tmp_path / "in")
    quantized = checkpoint(tmp_path / "fp8", quantization_config={})
    (tmp_path / "there").mkdir()
    out = str(tmp_path / "out")
    for arguments, said in (
        ((str(source), str(tmp_path / "there")), "exists"),
        ((str(tmp_path / "nowhere"), out), "config.json"),
        ((str(quantized), out), "is quantized"),
    ):
        with pytest.raises(SystemExit) as exit_:
            cli.main(["export", *arguments])
        assert str(exit_.value.code).startswith("sgl-fp8rl export: ")
        assert said in str(exit_.value.code)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp8", "in", "there"]
    assert options == []


def test_a_failure_leaves_nothing(options: list[Any], tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in")
    tensors = load_file(source / "a.safetensors")
    tensors[MATRIX][3, 4] = torch.inf
    save_file(tensors, source / "a.safetensors")
    with pytest.raises(ValueError, match=f"{MATRIX} holds NaN or Inf"):
        export.run(source, tmp_path / "out")
    assert options
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
