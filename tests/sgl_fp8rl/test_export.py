"""``sgl-fp8rl export`` without an engine: files, the config, and what is refused."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_fp8rl.engine.control import export as engine_export
from sgl_fp8rl.engine.control import host, scheduler
from sgl_fp8rl.engine.control.export import _assemble
from sgl_fp8rl.formats import BLOCK_FP8, BLOCK_FP8_UE8M0
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.protocol.checkpoint_headers import INDEX
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver.checkpoint_files import CheckpointWriter
from sgl_fp8rl.receiver.routes.routes import Route, RouteTable
from sgl_fp8rl.tools import cli, export
from tests.sgl_fp8rl.receiver.fake_host import Exchange, FakeHost

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
        assert message["op"] == "export_layout"
        assert message["manifest"]["tensors"].keys() == {MATRIX, HEAD, NORM}
        layers = ["lm_head", "model.layers.0.self_attn.qkv_proj"]
        return {"formats": {self.format: [MATRIX]}, "dtype": "bfloat16", "layers": layers}


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
    (shard,) = output.glob("*.safetensors")
    found = load_file(shard)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
    written = {path.name for path in output.iterdir()}
    assert written == {shard.name, INDEX, "config.json", "tokenizer.json"}
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
        with pytest.raises(ValueError, match="drop --ignored-layers, --tp, --format"):
            export.run("http://127.0.0.1:1", tmp_path / "other", format_=fmt.name)
    else:
        monkeypatch.setattr(export, "QUANTIZED", fmt)
        assert f"1 {fmt.name} and 1 other" in export.run(str(source), output)
    found = load_file(next(output.glob("*.safetensors")))
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
        (("http://127.0.0.1:1", out), "cannot be reached"),
        (("http://127.0.0.1:1", out, "--tp", "2"), "--tp"),
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
        export.run(str(source), tmp_path / "out")
    assert options
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_shards(tmp_path: Path) -> None:
    """What is added together stays together; the index names every tensor and all bytes."""
    writer = CheckpointWriter(tmp_path, shard_bytes=1000)
    for number in range(3):
        writer.add({f"{number}.{part}": torch.full((300,), number).byte() for part in "ab"})
    writer.finish()
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 1800
    files = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    for number, file in enumerate(files):
        found = load_file(tmp_path / file)
        mine = [name for name, f in index["weight_map"].items() if f == file]
        assert sorted(found) == sorted(mine) == [f"{number}.a", f"{number}.b"]
        assert {int(tensor[0]) for tensor in found.values()} == {number}
    assert {path.name for path in tmp_path.iterdir()} == {INDEX, *files}


def test_ranks_are_joined() -> None:
    whole = BLOCK_FP8.encode(torch.randn(256, 256, generator=torch.Generator().manual_seed(1)))
    upper, lower = ((0, 128), (0, 256)), ((128, 256), (0, 256))

    def rank(region: Any) -> dict[str, list[Any]]:
        regions = {s: BLOCK_FP8.companion_region(s, region) if s else region for s in whole}
        boxes = {s: whole[s][slice(*r[0]), slice(*r[1])] for s, r in regions.items()}
        return {s: [(regions[s], b.dtype, b.flatten().view(torch.uint8))] for s, b in boxes.items()}

    ranks = [rank(upper), rank(lower), rank(lower), {}]  # one box twice, and a rank without any
    joined = _assemble("w", (256, 256), ranks)
    assert joined.keys() == {"w" + suffix for suffix in whole}
    for suffix, tensor in whole.items():
        assert torch.equal(joined["w" + suffix].view(torch.uint8), tensor.view(torch.uint8))
    with pytest.raises(ValueError, match="32768 of 65536"):
        _assemble("w", (256, 256), [rank(upper), rank(upper)])


def test_an_engine_names_the_whole_path_of_its_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who asks may be in another folder."""
    monkeypatch.setattr(host, "gather", lambda value, group: [value])
    monkeypatch.setattr(scheduler.export, "write", lambda *_: {"layers": []})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()

    def named(path: str) -> Any:
        server_args = SimpleNamespace(model_path=path, revision=None)
        ours = SimpleNamespace(is_fully_idle=lambda: True, server_args=server_args)
        ours.tp_group = SimpleNamespace(cpu_group=None)
        weights: Any = SimpleNamespace(status={})
        return scheduler._export(scheduler.ControlRequest(ours, weights, {"folder": "x"}))["model"]

    assert named("./model") == str(tmp_path / "model")
    assert named("org/model") == "org/model"


def test_what_an_engine_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each refusal and each fault is an answer: an exception would end the server."""
    alone = FakeHost(0, Exchange(1), lambda _: None)
    box = ((0, 2),)
    table = RouteTable({"w": (2,)}, {"w": [Route("w", box, "p", box)]}, {"p": torch.ones(2)})
    weights: Any = SimpleNamespace(
        state=State.SERVING, reason="", table=table, model=torch.nn.Module()
    )

    def answer() -> Any:
        folder = tempfile.mkdtemp(dir=tmp_path)  # empty and private
        return engine_export.write(weights, folder, alone), Path(folder)

    reply, folder = answer()
    assert reply == {"layers": [], "format": "block-fp8"}
    (shard,) = folder.glob("*.safetensors")
    assert torch.equal(load_file(shard)["w"], torch.ones(2))

    def is_full(*_: Any) -> None:
        raise OSError("no space left")

    for step, said in (("add", "w cannot be exported: no space left"), ("finish", "no space left")):
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointWriter, step, is_full)
            assert said in answer()[0]["error"]
    table.fallback["norm"] = "it is computed"
    assert "norm cannot be read back (it is computed)" in answer()[0]["error"]
    weights.state, weights.reason = State.QUARANTINED, "a failed update"
    assert "quarantined, not committed: a failed update" in answer()[0]["error"]
