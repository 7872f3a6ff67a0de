"""``sgl-fp8rl layers`` and ``kv-report``: what they print, and what a real engine answers."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.gemm.expert_tiles import ExpertShape
from sgl_fp8rl.tools import cli, kv_report
from sgl_fp8rl.tools import tune as command
from sgl_fp8rl.tools.layers import read_layers, render_layers
from tests.engine.models import make_checkpoint
from tests.sgl_fp8rl.kv.test_kv_report import PNG_SIGNATURE, a_reply

LAYERS: list[dict[str, Any]] = [
    {"name": name, "format": format_, "reason": reason, "shape": shape, "top_k": top_k}
    | {"unpadded": unpadded, "padding_bytes": 64 * 256 if unpadded else 0}
    for name, format_, reason, shape, top_k, unpadded in (
        ("model.embed_tokens", "bf16", "embedding", [512, 256], None, None),
        ("model.layers.0.self_attn.o_proj", "block-fp8", None, [384, 256], None, [320, 256]),
        ("model.layers.0.mlp.down_proj", "block-fp8", None, [256, 384], None, None),
        ("model.layers.0.mlp.experts", "block-fp8", None, [4, 256, 256], 3, None),
        ("lm_head", "bf16", "output head", [512, 256], None, None),
    )
]


def test_layer_table() -> None:
    """A line for each layer, with its facts, and the counts of formats and of the reasons."""
    header, *rows, _, summary = render_layers(LAYERS).splitlines()
    assert [re.split(r"  +", row) for row in (header, *rows)] == [
        ["layer", "shape", "format", "reason or padding"],
        ["model.embed_tokens", "512x256", "bf16", "embedding"],
        ["model.layers.0.self_attn.o_proj", "384x256", "block-fp8", "320x256 padded, 0.02 MB more"],
        ["model.layers.0.mlp.down_proj", "256x384", "block-fp8"],
        ["model.layers.0.mlp.experts", "4x256x256", "block-fp8"],
        ["lm_head", "512x256", "bf16", "output head"],
    ]
    for count in ("3 of 5", "0.02 MB of them padding", "1 embedding", "1 output head"):
        assert count in summary
    assert "0 of 0" in render_layers([])


def test_layers_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, int]] = []

    def read(model: str, tp_size: int, command: str) -> list[dict[str, Any]]:
        asked.append((model, tp_size))
        return LAYERS

    monkeypatch.setattr(cli, "read_layers", read)
    assert cli.main(["layers", "some/model", "--tp", "2", "--json"]) == 0
    assert asked == [("some/model", 2)]
    assert json.loads(capsys.readouterr().out) == {"layers": LAYERS}


def test_what_cannot_be_listed_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(model: str, tp_size: int) -> Any:
        raise OSError("Repo id must be in the form ...")

    with monkeypatch.context() as patch:
        patch.setattr("sgl_fp8rl.tools.layers.dummy_engine", start)
        with pytest.raises(SystemExit, match="sgl-fp8rl layers /absent: Repo id"):
            cli.main(["layers", "/absent"])
        with pytest.raises(SystemExit, match="sgl-fp8rl tune /absent: Repo id"):
            read_layers("/absent", 1, "tune")
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(SystemExit, match="SGLang"):
        cli.main(["layers", "some/model"])


def test_a_subcommand_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main([])
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert all(name in said for name in ("doctor", "layers", "tune", "kv-report"))


def test_tune_takes_the_fp8_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not the BF16 ones, and not the experts that run SGLang's kernels; either kind may be all."""
    stock = compat.deep_gemm_warmup  # imports SGLang, before there seems to be a GPU
    monkeypatch.setattr(stock, "_DO_COMPILE_ALL", True)
    tuned: list[Any] = []
    monkeypatch.setenv("FP8RL_TUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(cli, "read_layers", lambda model, tp_size, command: LAYERS * tp_size)

    def run(*given: Any) -> None:
        assert not stock._DO_COMPILE_ALL
        tuned.append(given)

    monkeypatch.setattr(command, "run", run)
    assert cli.main(["tune", "some/model", "--tp", "2"]) == 0
    linears, experts = [(256, 384), (384, 256)], [ExpertShape(4, 256, 128, 3)]
    assert tuned == [(linears, experts, str(tmp_path))]
    embedding, _, down, stack, _ = LAYERS
    for layers in ([embedding, down, {**stack, "top_k": None}], [stack]):
        monkeypatch.setattr(cli, "read_layers", lambda *_, layers=layers: layers)
        assert cli.main(["tune", "some/model"]) == 0
    assert [given[:2] for given in tuned[1:]] == [(linears[:1], []), ([], experts)]
    monkeypatch.setattr(cli, "read_layers", lambda *_: [embedding])
    with pytest.raises(SystemExit, match="some/model"):
        cli.main(["tune", "some/model"])


@pytest.mark.parametrize("capability", [None, (10, 0)])
def test_tune_needs_hopper(monkeypatch: pytest.MonkeyPatch, capability: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(SystemExit, match="Hopper"):
        cli.main(["tune", "some/model"])


KEY = "a shared secret"


class FakeEngine(BaseHTTPRequestHandler):
    """The control route of a server that has a key."""

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        replies = {"kv": a_reply(), "kv_observe": {"tokens": 4096}}
        status, reply = 200, replies[message["op"]]
        if self.headers["Authorization"] != f"Bearer {KEY}" or self.path != "/fp8rl":
            status, reply = 401, {"error": "the key is missing or wrong"}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_: Any) -> None:
        """Nothing among the test's output."""


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("FP8RL_KEY", KEY)
    with HTTPServer(("127.0.0.1", 0), FakeEngine) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_kv_report_of_an_engine(
    address: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved = tmp_path / "kv.json"
    assert cli.main(["kv-report", address, "--json", str(saved)]) == 0
    table = capsys.readouterr().out
    assert kv_report.render(a_reply(), kv_report.lines_of(a_reply())) in table
    assert json.loads(saved.read_text()).items() >= a_reply().items()
    assert cli.main(["kv-report", str(saved)]) == 0
    assert capsys.readouterr().out == table
    monkeypatch.delenv("FP8RL_KEY")
    with pytest.raises(SystemExit, match=r"FP8RL_KEY|key is missing"):
        cli.main(["kv-report", address])


def test_kv_report_asks_to_observe(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["kv-report", address, "--observe"]) == 0
    assert capsys.readouterr().out.split()[2] == "4096"
    with pytest.raises(SystemExit, match=r"http://.*--observe"):
        cli.main(["kv-report", str(tmp_path), "--observe"])


def test_kv_report_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, picture = tmp_path / "kv.json", tmp_path / "kv.png"
    saved.write_text(json.dumps(a_reply()))
    draw = ["kv-report", str(saved), "--picture", str(picture)]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(SystemExit, match="run pip install matplotlib"):
            cli.main(draw)
        assert not picture.exists()
    pytest.importorskip("matplotlib")
    assert cli.main(draw) == 0
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


def test_kv_report_faults_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"http://127\.0\.0\.1:1\b"):
        cli.main(["kv-report", "http://127.0.0.1:1"])
    with pytest.raises(SystemExit, match=r"none\.json.*kv-report --json"):
        cli.main(["kv-report", str(tmp_path / "none.json")])
    saved = tmp_path / "kv.json"
    saved.write_text(json.dumps(a_reply()))
    with pytest.raises(SystemExit, match="No such file or directory"):
        cli.main(["kv-report", str(saved), "--json", str(tmp_path / "none" / "kv.json")])


LAYERS_THEN_TILES = """
import sys
from sgl_fp8rl.tools import cli
from sgl_fp8rl.engine.gemm import expert_tiles
from sgl_fp8rl.engine.gemm.tune_cache import Machine

code = cli.main(sys.argv[1:])
experts = expert_tiles.ExpertShape(4, 256, 128, 2)
assert expert_tiles.find([experts], Machine("none", 1, {}), ".") == {}
sys.exit(code)
"""
"""``layers``, then what ``tune`` asks of SGLang in the same process: it can answer since the engine
that listed the layers has published its arguments."""


@pytest.mark.engine
@pytest.mark.full
def test_layers_of_a_real_engine(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3_ragged", tmp_path / "model")
    (model / "model.safetensors").unlink()  # only shapes are needed
    layers_ = [sys.executable, "-c", LAYERS_THEN_TILES, "layers", str(model), "--json"]
    child = subprocess.run(layers_, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr
    layers = {layer["name"]: layer for layer in json.loads(child.stdout)["layers"]}
    down = layers["model.layers.1.mlp.down_proj"]
    assert (down["format"], down["reason"], down["shape"]) == ("block-fp8", None, [256, 512])
    output = layers["model.layers.1.self_attn.o_proj"]
    assert (output["format"], output["shape"]) == ("block-fp8", [256, 256])
    assert output["unpadded"] == [256, 192]
    assert layers["lm_head"]["format"] == "bf16"
    assert len(layers) == 2 * 4 + 2
