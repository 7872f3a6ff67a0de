"""The mitigations benchmark without an engine: cases, trainer, and what ``precision`` predicts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.engines import serving
from benchmarks.mitigations import cases as mitigations
from benchmarks.mitigations import measured
from benchmarks.mitigations import trainer as mitigations_trainer
from server_args import matches
from sgl_fp8rl.sensitivity import tokens
from sgl_fp8rl.sensitivity.groups import fp8_groups

TINY: dict[str, Any] = {"model": "tiny", "layers": None, "checkpoint": None, "prompts": None}


BF16_HEAD = 0.02


def find(name: str) -> mitigations.Case:
    (case,) = [case for case in mitigations.CASES if case.name == name]
    return case


@pytest.fixture(scope="module")
def model() -> Any:
    return mitigations_trainer.trainer_of(TINY, "cpu")


def test_keywords() -> None:
    for case in mitigations.CASES:
        on_gpu = case.keywords("cuda")
        assert on_gpu["quantization"] == "fp8rl" and on_gpu["max_total_tokens"] >= 32 * (512 + 144)
        assert "attention_backend" not in case.keywords("cpu")
    assert find("fp8").keywords("cuda")["attention_backend"] == "flashinfer"
    kv8 = find("fp8-kv8").keywords("cuda")
    assert kv8["kv_cache_dtype"] == "fp8_e4m3" and "attention_backend" not in kv8


def test_which_layers_stay_bf16(model: Any) -> None:
    names = [group.name for group in fp8_groups(model)]

    def left(bf16: str, listed: list[str]) -> list[str]:
        patterns = mitigations.ignored_layers(bf16, 4, listed)
        return [name for name in names if any(matches(p, name) for p in patterns)]

    assert len(names) == 16
    assert left("none", []) == [] and left("all", []) == names
    assert left("ends", []) == [n for n in names if ".layers.0." in n or ".layers.3." in n]
    assert left("list", names[5:7]) == names[5:7]


class FakeEngine:
    """Answers ``layers`` only."""

    def __init__(self, formats: dict[str, str]) -> None:
        self.formats = formats

    def fp8rl_control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        assert message == {"op": "layers"}
        return {"layers": [{"name": n, "format": f} for n, f in self.formats.items()]}


def test_an_engine_with_other_formats_is_refused(model: Any) -> None:
    groups = fp8_groups(model)
    formats = {group.name: "block-fp8" for group in groups} | {
        groups[2].name: "bf16",
        "lm_head": "bf16",
    }
    engine = FakeEngine(formats)
    assert measured.assert_left(engine, groups, (groups[2].name,)) == 1
    with pytest.raises(RuntimeError, match=groups[2].name):
        measured.assert_left(engine, groups, ())
    with pytest.raises(RuntimeError, match=groups[3].name):
        measured.assert_left(engine, groups, (groups[2].name, groups[3].name))


def test_the_trainers_logprobs(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = SimpleNamespace(prompt_tokens=[[5, 6, 7], [8]], tokens=[[9, 10], [11, 12, 13]])
    got = mitigations_trainer.response_logprobs(model, rollout)
    assert got.shape == (2, 3) and got[0, 2] == 0 and bool((got[1] < 0).all())
    for prompt, response, row in zip(rollout.prompt_tokens, rollout.tokens, got, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + response])).logits[0].float()
        logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        wanted = logprobs.gather(-1, torch.tensor(response)[:, None])[:, 0]
        assert (row[: len(response)] - wanted).abs().mean() < BF16_HEAD
    monkeypatch.setattr(mitigations_trainer, "LOGITS_AT_ONCE", 1)
    torch.testing.assert_close(mitigations_trainer.response_logprobs(model, rollout), got)


def test_prompts(model: Any, tmp_path: Path) -> None:
    work = mitigations.WORK["cpu"]
    drawn = mitigations_trainer.prompts_of(TINY, model, work.sequences, work.prompt)
    assert [len(prompt) for prompt in drawn] == [work.prompt] * work.sequences
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": [1, 2]}\n{"prompt": [3]}\n{"prompt": [4, 5, 6]}\n')
    given = TINY | {"prompts": str(path)}
    cycled = mitigations_trainer.prompts_of(given, model, work.trained_sequences, work.prompt)
    assert cycled[:4] == [[1, 2], [3], [4, 5, 6], [1, 2]] and len(cycled) == work.trained_sequences
    other = measured.prompts_like([[1, 2], [3]])
    assert other == [[2, 3], [1]]


def test_the_load_fits_the_context(model: Any) -> None:
    load = serving.Load(4, 512, 128)
    assert measured.fitting(load, model) == load
    short = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=128))
    )
    cut = measured.fitting(load, short)
    assert (cut.length, cut.new) == (32, 32)
    assert cut.length + serving.BEGIN + cut.new < 128


def test_what_precision_says_becomes_rows(model: Any) -> None:
    work = mitigations.WORK["cpu"]
    prompts = mitigations_trainer.prompts_of(TINY, model, work.sequences, work.prompt)
    precision = mitigations_trainer.predicted(model, prompts, work.precision_tokens)
    assert model.dtype == torch.bfloat16 and precision["arithmetic"] == "float32"
    assert precision["tokens"] == pytest.approx(work.precision_tokens, abs=tokens.LEAST_RESPONSE)
    assert 0 < len(precision["ignored_layers"]) < 16 and precision["kl"] <= precision["budget_kl"]
    found = mitigations.predictions(precision, "m")
    kls = {each["arm"]: each["values"]["precision_kl"][0] for each in found}
    assert set(kls) == set(mitigations.PREDICTED) <= {case.name for case in mitigations.CASES}
    assert kls["fp8-ignore-list"] == precision["kl"] < kls["fp8"] < kls["fp8-kv8"]
    assert mitigations.predictions(None, "m") == []
