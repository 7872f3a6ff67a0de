"""The benchmark of logprob mitigations without an engine: cases, trainer, rows and the page's
table."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import (
    mitigations,
    mitigations_arm,
    mitigations_cases,
    mitigations_engines,
    processes,
    readme,
    result_rows,
    serving,
)
from server_args import matches
from sgl_fp8rl.sensitivity import tokens
from sgl_fp8rl.sensitivity.groups import fp8_groups
from tests.benchmarks.facts import FACTS

TINY: dict[str, Any] = {"model": "tiny", "layers": None, "checkpoint": None, "prompts": None}
BF16_HEAD = 0.02
"""Mean |difference| of logprobs to a whole BF16 forward, whose logits are rounded; 0.002 here."""


@pytest.fixture(scope="module")
def model() -> Any:
    return mitigations_engines.trainer_of(TINY, "cpu")


# ---- one engine ----------------------------------------------------------------------------------


def test_keywords() -> None:
    for case in mitigations_cases.CASES:
        on_gpu = case.keywords("cuda")
        assert on_gpu["quantization"] == "fp8rl" and on_gpu["max_total_tokens"] >= 32 * (512 + 144)
        assert "attention_backend" not in case.keywords("cpu")
    assert mitigations_cases.find("fp8").keywords("cuda")["attention_backend"] == "flashinfer"
    kv8 = mitigations_cases.find("fp8-kv8").keywords("cuda")
    assert kv8["kv_cache_dtype"] == "fp8_e4m3" and "attention_backend" not in kv8


def test_which_layers_stay_bf16(model: Any) -> None:
    names = [group.name for group in fp8_groups(model)]

    def left(bf16: str, listed: list[str]) -> list[str]:
        patterns = mitigations_cases.ignored_layers(bf16, 4, listed)
        return [name for name in names if any(matches(p, name) for p in patterns)]

    assert len(names) == 16
    assert left("none", []) == [] and left("all", []) == names
    assert left("ends", []) == [n for n in names if ".layers.0." in n or ".layers.3." in n]
    assert left("list", names[5:7]) == names[5:7]


class FakeEngine:
    """Answers ``layers`` only."""

    def __init__(self, formats: dict[str, str]) -> None:
        self.formats = formats

    def fp8rl_control(self, message: dict[str, Any]) -> dict[str, Any]:
        assert message == {"op": "layers"}
        return {"layers": [{"name": n, "format": f} for n, f in self.formats.items()]}


def test_an_engine_with_other_formats_is_refused(model: Any) -> None:
    groups = fp8_groups(model)
    formats = {group.name: "fp8" for group in groups} | {groups[2].name: "bf16", "lm_head": "bf16"}
    engine = FakeEngine(formats)
    assert mitigations_engines.assert_left(engine, groups, (groups[2].name,)) == 1
    with pytest.raises(RuntimeError, match=groups[2].name):
        mitigations_engines.assert_left(engine, groups, ())
    with pytest.raises(RuntimeError, match=groups[3].name):
        mitigations_engines.assert_left(engine, groups, (groups[2].name, groups[3].name))


def test_the_trainers_logprobs(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = SimpleNamespace(prompt_tokens=[[5, 6, 7], [8]], tokens=[[9, 10], [11, 12, 13]])
    got = mitigations_engines.response_logprobs(model, rollout)
    assert got.shape == (2, 3) and got[0, 2] == 0 and bool((got[1] < 0).all())
    for prompt, response, row in zip(rollout.prompt_tokens, rollout.tokens, got, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + response])).logits[0].float()
        logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        wanted = logprobs.gather(-1, torch.tensor(response)[:, None])[:, 0]
        assert (row[: len(response)] - wanted).abs().mean() < BF16_HEAD
    monkeypatch.setattr(mitigations_engines, "LOGITS_AT_ONCE", 1)
    torch.testing.assert_close(mitigations_engines.response_logprobs(model, rollout), got)


def test_prompts(model: Any, tmp_path: Path) -> None:
    work = mitigations_cases.WORK["cpu"]
    drawn = mitigations_engines.prompts_of(TINY, model, work)
    assert [len(prompt) for prompt in drawn] == [work.prompt] * work.sequences
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": [1, 2]}\n{"prompt": [3]}\n{"prompt": [4, 5, 6]}\n')
    given = TINY | {"prompts": str(path)}
    cycled = mitigations_engines.prompts_of(given, model, work)
    assert cycled[:4] == [[1, 2], [3], [4, 5, 6], [1, 2]] and len(cycled) == work.trained_sequences
    other = mitigations_engines.prompts_like([[1, 2], [3]])
    assert other == [[2, 3], [1]]


def test_the_load_fits_the_context(model: Any) -> None:
    load = serving.Load(4, 512, 128)
    assert mitigations_engines.fitting(load, model) == load
    short = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=128))
    )
    cut = mitigations_engines.fitting(load, short)
    assert (cut.length, cut.new) == (32, 32)
    assert cut.length + serving.BEGIN + cut.new < 128


def test_what_precision_says_becomes_rows(model: Any) -> None:
    work = mitigations_cases.WORK["cpu"]
    prompts = mitigations_engines.prompts_of(TINY, model, work)
    said = mitigations_engines.predicted(model, prompts, work)
    assert model.dtype == torch.bfloat16 and said["arithmetic"] == "float32"
    assert said["tokens"] == pytest.approx(work.precision_tokens, abs=tokens.LEAST_RESPONSE)
    assert 0 < len(said["ignored_layers"]) < 16 and said["kl"] <= said["budget_kl"]
    found = mitigations_engines.predictions(
        said, {"model": "m", "arm": "fp8-ignore-list", "layers": 4}
    )
    kls = {report["arm"]: report["values"]["precision_kl"][0] for report in found}
    assert set(kls) == set(mitigations_engines.PREDICTED) <= set(mitigations_cases.NAMES)
    assert kls["fp8-ignore-list"] == said["kl"] < kls["fp8"] < kls["fp8-kv8"]
    assert mitigations_engines.predictions(None, {}) == []


def test_an_arm_writes_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mitigations_engines, "measure", lambda case, job: [case.name, job["model"]])
    assert mitigations_arm.run({"name": "fp8-kv8", "model": "m"}) == {"reports": ["fp8-kv8", "m"]}


# ---- all of them ---------------------------------------------------------------------------------


def test_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mitigations, "HAS_GPU", True)
    assert mitigations.arguments([]).cases == list(mitigations_cases.NAMES)
    assert mitigations.arguments([]).model == "qwen3-8b"
    for words in (["--cases", "no-such"], ["--checkpoint", str(tmp_path)], ["--model", "gpt"]):
        with pytest.raises(SystemExit):
            mitigations.arguments(words)
    monkeypatch.setattr(mitigations, "HAS_GPU", False)
    with pytest.raises(SystemExit):
        mitigations.arguments([])
    assert "no GPU here" in capsys.readouterr().err
    assert mitigations.arguments(["--output", "x"]).model == "tiny"


def fake_case(script: Path, job: Any, limit_s: float, environ: Any) -> processes.Outcome:
    """What a process of this case may report."""
    name = job["name"]
    if name == "fp8-deterministic":
        return processes.Outcome(None, "exit status 1: ValueError: no such backend", "")
    k3 = {"bf16": 1e-5, "fp8": 4e-4, "fp8-ignore-list": 2e-4}.get(name, 3e-4)
    common = {"arm": name, "model": "tiny, random weights", "layers": 4}
    reports = [
        common
        | {
            "case": "rollout 4x16+24",
            "values": {
                "mismatch_kl_k3": [k3, 2 * k3, 3 * k3],
                "mismatch_ess": [0.999] * 3,
                "logprob_error": [0.01] * 3,
                "bf16_layers": [float(name.startswith("bf16")) * 16],
            },
        },
        common
        | {
            "case": "decode 4x32",
            "values": {"decode_step_ms": [8.0 if name == "fp8" else 10.0] * 3},
        },
    ]
    if name == "fp8-ignore-list":
        reports.append(
            common | {"arm": "fp8", "case": "precision", "values": {"precision_kl": [5e-4]}}
        )
    return processes.Outcome({"reports": reports}, None, "")


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(processes, "run_job", fake_case)
    monkeypatch.setattr(mitigations, "facts", lambda command: FACTS | {"command": command})
    monkeypatch.setattr(mitigations, "host", lambda: "h")
    path = tmp_path / "mitigations.json"
    mitigations.main(["--output", str(path), "--model", "tiny"])
    return path


def test_rows_of_every_case(measured: Path) -> None:
    found = json.loads(measured.read_text())["rows"]
    by = {(row["arm"], row["metric"]): row for row in found}
    assert by["fp8", "mismatch_kl_k3"]["median"] == 8e-4
    assert by["fp8", "mismatch_kl_k3"]["unit"] == "nats"
    assert by["bf16", "mismatch_kl_k3"]["ratios"]["fp8, rollout 4x16+24"] == 40.0
    assert by["bf16-fp32-head", "decode_step_ms"]["ratios"]["fp8, decode 4x32"] == 0.8
    assert by["fp8", "precision_kl"]["process"] == "fp8-ignore-list"
    assert by["fp8-deterministic", "failure"]["sentence"].endswith("no such backend")
    assert len({result_rows.identity(row) for row in found}) == len(found)


def test_cases_of_several_calls_stay(measured: Path) -> None:
    before = json.loads(measured.read_text())["rows"]
    mitigations.main(
        ["--output", str(measured), "--model", "tiny", "--cases", "fp8", "fp8-ignore-list"]
    )
    assert json.loads(measured.read_text())["rows"] == before


def test_files_of_one_host_are_merged(measured: Path, tmp_path: Path) -> None:
    parts = [tmp_path / "a.json", tmp_path / "b.json"]
    tiny = ["--model", "tiny"]  # the default of a machine with a GPU is another
    mitigations.main(["--output", str(parts[0]), *tiny, "--cases", "fp8", "fp8-ignore-list"])
    rest = [name for name in mitigations_cases.NAMES if name not in ("fp8", "fp8-ignore-list")]
    mitigations.main(["--output", str(parts[1]), *tiny, "--cases", *rest])
    whole = tmp_path / "whole.json"
    mitigations.main(["--output", str(whole), "--merge", *map(str, parts)])
    assert json.loads(whole.read_text()) == json.loads(measured.read_text()) | {
        "benchmark": "whole"
    }


def test_the_table_of_the_page(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "RESULTS", measured.parent)
    text = "a\n<!-- measured: mitigations -->\nNo figures yet.\n<!-- end -->\nb\n"
    once = readme.BLOCK.sub(readme.filled, text)
    assert "| tiny, random weights | k3 (nats) |" in once
    assert (
        "| FP8 | 8.0e-04 (4.0e-04 to 1.2e-03) | 0.0100 | 0.9990 | 5.0e-04 | 0 | 8.00 ms |  |"
        in once
    )
    assert "| BF16 | 2.0e-05 (1.0e-05 to 3.0e-05) |" in once and "| 10.00 ms | 1.25x |" in once
    assert "FP8, deterministic on tiny, random weights fails: exit status 1" in once
    assert "Medians of 3 rollouts" in once and once.endswith("<!-- end -->\nb\n")
    assert readme.BLOCK.sub(readme.filled, once) == once
    measured.unlink()
    assert readme.BLOCK.sub(readme.filled, text) == text
