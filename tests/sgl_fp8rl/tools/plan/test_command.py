"""``sgl-fp8rl plan`` from its arguments to what it prints."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engines import models
from sgl_fp8rl.protocol.kv_schema import E4M3
from sgl_fp8rl.tools import cli
from sgl_fp8rl.tools.plan import report, shape, speed
from sgl_fp8rl.tools.plan.schedule import Request, lognormal
from sgl_fp8rl.tools.plan.shape import PlanError

QWEN = shape.of(models.config(models.MODELS["qwen3-8b"]))
MOE = shape.of(models.config(models.MODELS["qwen3-30b-a3b"]))
FREE = speed.idle_bytes(speed.H200)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("qwen3-8b")
    models.save_config(models.MODELS["qwen3-8b"], folder)
    return str(folder)


def plan(*arguments: str) -> None:
    assert cli.main(["plan", *arguments]) == 0


def test_the_fastest_way_comes_first_and_those_without_times_last(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(model, "--samples", "64", "--json")
    found = json.loads(capsys.readouterr().out)
    seconds = [each["outcome"]["seconds"] for each in found if each["outcome"]]
    assert seconds == sorted(seconds) and len(found) == len(speed.ARMS)
    assert found[0]["arm"]["name"] == "fp8rl-kv8" and not found[-1]["outcome"]
    plan(model, "--samples", "64", "--gpus", "2")
    assert "2 engines" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--gpus", "2", "--tp", "2"], "engines of several GPUs: plan predicts no times"),
        (["--gpu", "h100"], "other GPUs than an H200: plan predicts no times"),
    ],
)
def test_no_times_are_told_of_what_was_not_measured(
    model: str, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(model, "--samples", "64", *arguments, "--json")
    assert not any(each["outcome"] for each in json.loads(capsys.readouterr().out))
    plan(model, "--samples", "64", *arguments)
    assert told in capsys.readouterr().out


def test_models_with_experts_have_no_times_and_dense_ones_scaled_ones() -> None:
    asked, cluster = [Request(1000, 1000, 1000)] * 8, report.Cluster(speed.H200, FREE)
    found = report.predictions(MOE, asked, cluster)
    assert not any(each.outcome for each in found)
    printed = report.render(MOE, asked, cluster, found)
    assert "kernels: models with experts: plan predicts no times" in printed
    assert "--mem-fraction-static" in printed and "Figures" not in printed
    half = replace(QWEN, layers=18)
    small, large = (report.predictions(of, asked, cluster) for of in (half, QWEN))
    assert small[0].outcome and large[0].outcome
    assert 0.5 < small[0].outcome.step_ms / large[0].outcome.step_ms < 0.7  # the head is whole
    assert "times are those of Qwen3-8B, scaled" in report.render(half, asked, cluster, small)


def test_flags_are_those_of_sglang() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {name for action in parser._actions for name in action.option_strings}
    ours = "--mem-fraction-static --chunked-prefill-size --cuda-graph-max-bs-decode --tp-size"
    flags = " ".join([ours, *(arm.flags for arm in speed.ARMS)]).split()
    assert {flag for flag in flags if flag.startswith("--")} <= known | {"--fp8rl-kv-cache"}


def test_what_does_not_fit_is_said() -> None:
    small = report.Cluster(speed.H200, FREE / 2)
    asked = [Request(1000, 1000, 1000)] * 8
    with pytest.raises(PlanError, match="the model does not fit: its weights take"):
        report.predictions(MOE, asked, replace(small, free_bytes=FREE / 2 - 60e9))
    with pytest.raises(PlanError, match="a request of up to 10001000 tokens does"):
        report.predictions(MOE, [Request(1000, 1000, 10**7)], small)


def test_a_limit_holds_requests_back() -> None:
    """SGLang reserves memory by ``max_new_tokens``, of each request its own."""
    cluster = report.Cluster(speed.H200, 45e9)
    running = []
    for limit in (1000, 4000):
        best, *_ = report.predictions(QWEN, [Request(1000, 1000, limit)] * 400, cluster)
        assert best.outcome
        running.append(best.outcome.mean_running)
    assert running[1] < 0.9 * running[0]


def test_the_busiest_of_several_engines_is_the_last() -> None:
    asked = [Request(10, length, 100) for length in (1, 90, 2, 3, 80, 4)]
    assert report.busiest(asked, 3) == [asked[1], asked[4]]
    assert sum(len(lognormal(9, 1, 5, 0.5, 9)[first::3]) for first in range(3)) == 9


def test_heads_that_ranks_share_are_held_by_each() -> None:
    few = replace(QWEN, kv_heads=4)
    held = [few.kv_token_bytes(E4M3, tp) for tp in (1, 4, 8)]
    assert [held[0] / each for each in held] == [1, 4, 4]
    assert few.is_divisible(8) and not few.is_divisible(3)
    odd = replace(MOE, intermediate=130)  # experts stay whole there
    assert odd.is_divisible(4) and not replace(QWEN, intermediate=130).is_divisible(4)


def test_lengths_of_a_run(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "run.jsonl"
    log.write_text('{"prompt_tokens": 100, "response_tokens": 50}\n\n' * 3)
    plan(model, "--lengths", str(log), "--json")
    (best, *_) = json.loads(capsys.readouterr().out)
    assert best["outcome"]["peak_running"] == 3
    with pytest.raises(SystemExit, match="an answer of 50 tokens"):
        plan(model, "--lengths", str(log), "--max-response-tokens", "49")
    for bad in ("", "{}\n", '{"prompt_tokens": 0, "response_tokens": 5}', "[1]\n", "null"):
        log.write_text(bad)
        with pytest.raises(
            SystemExit, match=r"sgl-fp8rl plan: .*(is not lines of|has no lines of)"
        ):
            plan(model, "--lengths", str(log))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--gpus", "0"], "--gpus is 0; it must be at least 1"),
        (["--samples", "-1"], "--samples is -1; it must be at least 1"),
        (["--tp", "-1"], "--tp is -1; it must be at least 1"),
        (["--mem-fraction-static", "1.5"], "must be at least 0.01 and at most 0.99"),
        (["--sigma", "-1"], "--sigma"),
        (["--sigma", "nan"], "--sigma is nan; it must be at least 0 and at most 10"),
        (["--reserved-gib", "-1"], "--reserved-gib is -1.0; it must be at least 0"),
        (["--reserved-gib", "139"], "the model does not fit"),
        (["--tp", "4"], "--tp 4 needs more than --gpus 1; give it --gpus 4"),
        (["--tp", "3", "--gpus", "3"], "--tp 3 does not divide the model's 32 heads"),
        (["--lengths", "run.jsonl", "--sigma", "1"], "drop --sigma"),
    ],
)
def test_bad_arguments(model: str, arguments: list[str], why: str) -> None:
    with pytest.raises(SystemExit, match=why):
        plan(model, *arguments)
