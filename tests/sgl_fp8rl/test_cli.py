"""``sgl-fp8rl layers`` and ``kv-report``: what they print, and what a real engine answers."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from sgl_fp8rl.tools import cli, kv_report
from tests.engine.models import make_checkpoint
from tests.sgl_fp8rl.kv.test_kv_report import a_reply

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
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "kv.json"
    assert cli.main(["kv-report", address, "--json", str(saved)]) == 0
    table = capsys.readouterr().out
    assert kv_report.render(a_reply(), kv_report.lines_of(a_reply())) in table
    assert json.loads(saved.read_text()).items() >= a_reply().items()
    assert cli.main(["kv-report", str(saved)]) == 0
    assert capsys.readouterr().out == table


def test_kv_report_asks_to_observe(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kv-report", address, "--observe"]) == 0
    assert capsys.readouterr().out.split()[2] == "4096"


def test_kv_report_faults_are_sentences(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "kv.json"
    saved.write_text(json.dumps(a_reply()))
    monkeypatch.delenv("FP8RL_KEY")
    for arguments, fault in (
        ([address], "FP8RL_KEY|key is missing"),
        (["http://127.0.0.1:1"], r"http://127\.0\.0\.1:1\b"),
        ([str(tmp_path), "--observe"], "http://.*--observe"),
        ([str(tmp_path / "none.json")], r"none\.json.*kv-report --json"),
        ([str(saved), "--json", str(tmp_path / "none" / "kv.json")], "No such file or directory"),
    ):
        with pytest.raises(SystemExit, match=fault):
            cli.main(["kv-report", *arguments])


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
