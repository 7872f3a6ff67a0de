"""AIConfigurator's steps beside those of ``plan``: by a program in its place, or by itself."""

import shutil
from pathlib import Path

import pytest

from benchmarks.engines import models
from sgl_fp8rl import cli
from sgl_fp8rl.plan import aiconfigurator, shape
from sgl_fp8rl.plan.speed import ARMS

# what 0.12.0 prints, cut
OUTPUT = """
  Performance Estimate (static_gen)
  Generation lat.:  1087.572 ms
  TPOT:             8.497 ms
  Power (per GPU):  unavailable (0.0% coverage)
"""
BF16 = ARMS[0]
QWEN = shape.of(models.config(models.MODELS["qwen3-8b"]))


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A program of its name that notes its words; the model's folder."""
    (folder / "bin").mkdir()
    program = folder / "bin" / aiconfigurator.COMMAND
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/words\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
    (folder / "model").mkdir()
    models.save_config(models.MODELS["qwen3-8b"], folder / "model")
    return folder / "model"


def test_its_steps_are_shown_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = installed(tmp_path, monkeypatch, f"cat <<'END'\n{OUTPUT}\nEND")
    assert cli.main(["plan", str(model), "--samples", "64", "--source", "aiconfigurator"]) == 0
    table = capsys.readouterr().out.partition("beside AIConfigurator")[2]
    assert table.count("8.5") == len(ARMS)
    words = (tmp_path / "words").read_text()
    assert "--gemm-quant-mode fp8_block" in words and "--gemm-quant-mode bfloat16" in words
    assert "--kvcache-quant-mode fp8" in words and "--system h200_sxm" in words


def test_what_it_cannot_tell_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = installed(tmp_path, monkeypatch, "echo 'ValueError: no such backend' >&2; exit 1")
    with pytest.raises(aiconfigurator.NoEstimateError, match="no such backend"):
        aiconfigurator.step_ms(model, "h200", BF16, QWEN, 8, 512)


def test_without_it_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models.save_config(models.MODELS["qwen3-8b"], tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit, match=r"pip install aiconfigurator==0\.12\.0"):
        cli.main(["plan", str(tmp_path), "--samples", "4", "--source", "aiconfigurator"])
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(shutil.which(aiconfigurator.COMMAND) is None, reason="it is not installed")
def test_itself(tmp_path: Path) -> None:
    models.save_config(models.MODELS["qwen3-8b"], tmp_path)
    few, many = (aiconfigurator.step_ms(tmp_path, "h200", BF16, QWEN, b, 512) for b in (32, 256))
    assert 1.0 < few < many < 100.0
