"""The table's figures are those of the rows, and the picture is drawn."""

import json
from pathlib import Path

import pytest

from examples.grpo import report

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def a_step(arm: str, step: int, kl: float, update_s: float) -> report.Row:
    values = {"reward": 0.5, "mismatch_kl_k3": kl, "ess": 0.99, "update_s": update_s}
    values |= {"update_bytes": 1000, "mapped_bytes": 0 if step == 0 else 900}
    return {"arm": arm, "step": step, "tokens_per_s": 1234.4, "step_s": 1.0, **values}


@pytest.fixture
def log(tmp_path: Path) -> report.Log:
    log = report.Log(tmp_path / "out" / "grpo.jsonl")
    log.add("environment", **report.environment(1_246_720, "CPU", {"seed": 0, "ranks": 2}))
    for arm, kl in {"fp8": 1e-4, "bf16": 1e-5}.items():
        log.add("engine", arm=arm, layers=[{"format": arm}, {"format": "bf16"}])
        log.add("evaluation", arm=arm, when="before", reward=0.25)
        for step, update_s in enumerate([0.5, 0.02, 0.03]):
            log.add("step", **a_step(arm, step, kl * (step + 1), update_s))
        log.add("evaluation", arm=arm, when="after", reward=0.75)
    return log


def test_jsonl_is_the_rows_and_starts_with_the_environment(log: report.Log, tmp_path: Path) -> None:
    lines = (tmp_path / "out" / "grpo.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == log.rows
    assert log.rows[0]["kind"] == "environment"
    assert log.rows[0]["versions"].keys() >= {"sglang", "torch", "sgl-fp8rl"}


def test_table(log: report.Log) -> None:
    fp8, bf16 = report.summaries(log.rows)
    assert (fp8["before"], fp8["after"]) == (0.25, 0.75)
    assert fp8["mismatch_kl_k3"] == pytest.approx(2e-4)
    assert bf16["mismatch_kl_k3"] == pytest.approx(2e-5)
    assert fp8["update_s"] == 0.03  # the median; the first update is the slow one
    assert fp8["mapped"] == 0.9  # the first update went through the bucket
    lines = report.table(log.rows).splitlines()
    line = next(line for line in lines if line.startswith("fp8"))
    cells = ["fp8", "0.25", "0.75", "2.0e-04", "0.9900", "30", "90%", "mapped", "1234", "1.0"]
    assert line.split() == cells
    assert any("2 FSDP2 ranks on CPU" in line for line in lines)


def test_live_lines(log: report.Log, capsys: pytest.CaptureFixture[str]) -> None:
    log.add("step", **a_step("fp8", 7, 3e-4, 0.04))
    out = capsys.readouterr().out
    assert "step   7" in out
    assert "3.0e-04" in out
    assert "40 ms, 90% mapped" in out
    log.add("step", **a_step("fp8", 0, 3e-4, 0.0062))
    assert "6.2 ms, bucket" in capsys.readouterr().out
    log.add("pretraining", step=1, loss=5.0)
    log.add("pretraining", step=25, loss=1.25)
    assert capsys.readouterr().out == "demonstrations  step  25  loss 1.250 nats a token\n"
    log.add("engine", arm="fp8", layers=[{"format": "fp8"}, {"format": "bf16"}])
    assert "1 of 2 matrices in FP8" in capsys.readouterr().out
    environment = report.environment(126_000_000, "NVIDIA H200", {"ranks": 1})
    log.add("environment", **environment)
    assert "Qwen3 with 126.0 M parameters, 1 FSDP2 rank on NVIDIA H200" in capsys.readouterr().out
    assert {"flashinfer-python"} == environment["versions"].keys() - log.rows[0]["versions"].keys()


def test_draw(log: report.Log, tmp_path: Path) -> None:
    report.draw(log.rows, tmp_path / "grpo.png")
    content = (tmp_path / "grpo.png").read_bytes()
    assert content.startswith(PNG_SIGNATURE)
    assert len(content) > 20_000  # 61 kB was measured
