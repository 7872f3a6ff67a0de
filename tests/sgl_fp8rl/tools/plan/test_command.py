"""``sgl-fp8rl plan`` from its arguments to what it prints."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engines import models
from benchmarks.tables import sharded
from sgl_fp8rl.protocol.kv_schema import E4M3, INT8
from sgl_fp8rl.tools import cli
from sgl_fp8rl.tools.plan import gains, memory, prediction, schedule, shape, speed
from sgl_fp8rl.tools.plan.unmeasured import EXPERTS, unmeasured
from sgl_fp8rl.tools.plan.workload import Request, Workload, lognormal

QWEN = shape.of(models.config(models.MODELS["qwen3-8b"]))
MOE = shape.of(models.config(models.MODELS["qwen3-30b-a3b"]))
LARGE = sharded.QWEN3_235B
H200 = memory.gpus()["h200"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("qwen3-8b")
    models.save_config(models.MODELS["qwen3-8b"], folder)
    return str(folder)


def plan(*arguments: str) -> None:
    assert cli.main(["plan", *arguments]) == 0


def names(found: list[prediction.Prediction]) -> list[str]:
    return [each.arm.name for each in found]


def test_the_fastest_way_comes_first(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan(model, "--samples", "64", "--json")
    found = json.loads(capsys.readouterr().out)
    seconds = [each["outcome"]["seconds"] for each in found]
    assert seconds == sorted(seconds) and len(found) == len(speed.ARMS)
    assert found[0]["arm"]["name"] == "fp8rl-kv8"
    plan(model, "--samples", "64", "--train-s", "30", "--gpus", "2")
    printed = capsys.readouterr().out
    for said in ("--quantization fp8rl --kv-cache-dtype fp8_e4m3", "An RL step", "NVIDIA H200"):
        assert said in printed
    assert "2 engines" in printed and "Not measured" not in printed
    assert re.search(
        r"An INT8 KV cache \(.*--fp8rl-kv-cache int8\).*: (0\.9\d|1\.00) times", printed
    )
    plan(model, "--samples", "64", "--train-s", "30")
    assert "ms bucket, by a line through Qwen3-8B and Qwen3-30B-A3B. An RL step" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        # 6 ms of kernels (docs/scale.md), and at least 11 of the host
        (["--gpus", "2", "--tp", "2"], "same 2 GPUs: at least 17 ms, 6 for what memory and links"),
        (["--gpus", "2"], "same 2 GPUs: at least 23 ms, 12 for"),
        (["--gpus", "5", "--tp", "2"], "2 engines, each with (1 of 5 GPUs idle)"),
        (["--gpus", "16"], "How long an update takes is not known here. An RL step without it"),
        (["--gpu", "h100"], "How long an update takes is not known here"),
        (["--gpu", "h100"], "prefill, which is bound by arithmetic, takes less"),
        (["--gpu", "h100"], "Error on one H200"),
        (["--tp", "2", "--gpus", "2"], "are lower bounds, for decode steps of Qwen3-32B on two"),
    ],
)
def test_what_is_said_of_more_gpus_and_others(
    model: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(model, "--samples", "64", "--train-s", "30", *arguments)
    assert said in capsys.readouterr().out


def test_flags_are_those_of_sglang() -> None:
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {name for action in parser._actions for name in action.option_strings}
    ours = "--mem-fraction-static --chunked-prefill-size --cuda-graph-max-bs-decode"
    flags = " ".join([ours, "--tp-size --ep-size", *(arm.flags for arm in speed.ARMS)]).split()
    assert {flag for flag in flags if flag.startswith("--")} <= known | {"--fp8rl-kv-cache"}


def test_engines_have_the_fastest_size() -> None:
    """The smallest engine that holds the model is chosen only where no larger one is faster."""
    asked = lognormal(64, 1024, 2000, 0.8, 8000)
    cluster = prediction.Cluster(H200, gpus=8)
    best, *_ = prediction.best_of_arms(prediction.predictions(LARGE, asked, cluster))
    seconds = {}
    for tp in (2, 4, 8):
        each = prediction.predictions(LARGE, asked, replace(cluster, tp=tp))
        seconds[tp] = prediction.best_of_arms(each)[0].outcome.seconds
    assert seconds[4] < 0.8 * seconds[2] and best.tp > 2
    assert best.outcome.seconds == seconds[best.tp] < 1.25 * min(seconds.values())
    assert seconds[8] < seconds[4] or best.tp == 4


def test_a_larger_engine_must_save_more_than_communication_takes() -> None:
    def told(arm: speed.Arm, tp: int, seconds: float) -> prediction.Prediction:
        outcome = schedule.Outcome(seconds, 0, 0, 0, 1, 1, 0, 1)
        return prediction.Prediction(arm, tp, 1, 1, 0.9, 1, outcome, 1)

    stock, *_, ours, _ = speed.ARMS
    for tp, seconds, is_better in ((2, 0.81, False), (2, 0.79, True), (8, 0.52, False)):
        small, large = told(ours, 1, 1.0), told(ours, tp, seconds)
        assert prediction.best_of_arms([small, large]) == [large if is_better else small]
        other = told(stock, tp, seconds)
        assert (prediction.best_of_arms([small, other])[0] is other) == is_better


def test_ratios_are_of_engines_of_one_size() -> None:
    """BF16 does not fit on two GPUs."""
    asked = lognormal(64, 1024, 2000, 0.8, 8000)
    cluster = prediction.Cluster(H200, gpus=8)
    found = prediction.predictions(LARGE, asked, cluster)
    said = [gains.lines(LARGE, asked, cluster, found, tp) for tp in (2, 4)]
    assert [len(each) for each in said] == [3, 4]
    seconds = {(each.arm.name, each.tp): each.outcome.seconds for each in found}
    ratio = seconds["stock-bf16", 4] / seconds["fp8rl", 4]
    assert f"{ratio:.2f} times as fast as stock-bf16 at TP 4" in said[1][0]


def test_batches_that_gain_too_little_are_told() -> None:
    """Reading weights counts in small batches, and reading the KV cache in large ones."""
    asked = Workload([Request(4000, 1, 1)])
    cluster = prediction.Cluster(H200)
    found = prediction.predictions(QWEN, asked, cluster)
    weights, cache, *_ = gains.lines(QWEN, asked, cluster, found, 1)
    assert "with 1 to 512 sequences of 4000 tokens" in weights
    assert "with 8 to 1024 sequences of 4000 tokens" in cache


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ({1, 2, 4, 16, 512, 1024}, "1 to 4 and 16 and 512 to 1024"),
        ({1024}, "1024"),
        (set(gains.BATCHES), "1 to 1024"),
        (set(), ""),
    ],
)
def test_batches_between_that_gain_too_little_are_left_out(batches: set[int], said: str) -> None:
    assert gains.ranges([each in batches for each in gains.BATCHES]) == said


def test_what_does_not_fit_is_said() -> None:
    small = memory.Gpu("half", H200.idle_bytes / 2, H200.engine_bytes, 1.0, "a test")
    asked = Workload([Request(1000, 1000, 1000)] * 8)
    full = prediction.Cluster(small, reserved_bytes=60e9)
    with pytest.raises(schedule.DoesNotFitError, match="the model does not fit: its weights take"):
        prediction.predictions(MOE, asked, full)
    long = Workload([Request(1000, 1000, 10**7)])
    with pytest.raises(schedule.DoesNotFitError, match="a request of up to 10001000 tokens does"):
        prediction.predictions(MOE, long, prediction.Cluster(small))


def test_a_limit_holds_requests_back() -> None:
    """SGLang reserves memory by ``max_new_tokens``, of each request its own."""
    arm = prediction.Cluster(replace(H200, idle_bytes=45e9))
    seconds = []
    for limit in (1000, 4000):
        asked = Workload([Request(1000, 1000, limit)] * 400)
        (best, *_) = prediction.best_of_arms(prediction.predictions(QWEN, asked, arm))
        seconds.append(best.outcome.mean_running)
    assert seconds[1] < 0.9 * seconds[0]


def test_experts_stay_whole_where_blocks_of_them_would_be_cut() -> None:
    asked = lognormal(64, 1024, 2000, 0.8, 8000)
    found = prediction.predictions(MOE, asked, prediction.Cluster(H200, gpus=8))
    ways = {(each.arm.fp8, each.tp): each.ep for each in found}
    assert {tp: ways[True, tp] for tp in (1, 2, 4, 8)} == {1: 1, 2: 1, 4: 4, 8: 8}
    assert {ways[False, tp] for tp in (1, 2, 4, 8)} == {1}
    cut = next(each for each in found if each.ep == 4)
    assert any(what.startswith("expert parallelism") for what in unmeasured(MOE, asked, cut))
    assert not MOE.ragged_sizes(4) and not any("pads" in w for w in unmeasured(MOE, asked, cut))
    assert replace(MOE, experts=126).ragged_sizes(4) == [192]  # which four ranks cannot share


def test_experts_that_no_columns_divide_may_stay_whole() -> None:
    odd = replace(MOE, intermediate=130)
    assert odd.is_divisible(4) and odd.ep(4, fp8=False) == 4
    assert not replace(odd, experts=126).is_divisible(4)
    assert not replace(QWEN, intermediate=130).is_divisible(4)


def test_flags_have_expert_parallelism(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.save_config(models.MODELS["qwen3-30b-a3b"], tmp_path)
    for tp, is_there in (("2", False), ("4", True)):
        plan(str(tmp_path), "--samples", "64", "--gpus", "4", "--tp", tp)
        assert ("--ep-size 4" in capsys.readouterr().out) == is_there


def test_a_trainer_beside_the_engine_leaves_room_for_activations() -> None:
    """As much room as without it, so less of what is free; a longer chunk takes more."""

    def room(reserved: float, chunk: int = 8192, requests: int = 512) -> float:
        fraction = memory.mem_fraction_static(H200, 1, reserved, chunk, requests)
        return (1 - fraction) * (H200.idle_bytes - reserved) / memory.MIB

    # SGLang's default on a whole H200 is 0.903 (0.5.17), with graphs of 256
    assert memory.mem_fraction_static(H200, 1, 0.0, 8192, 256) == pytest.approx(0.903, abs=0.005)
    step = 1e-3 * H200.idle_bytes / memory.MIB  # that it is rounded by
    assert room(60e9) == pytest.approx(room(0.0), abs=step)
    assert room(60e9) == pytest.approx(512 + 1.5 * 8192 + 128 + 2 * 512, abs=step)
    assert room(0.0, chunk=16384) - room(0.0) == pytest.approx(1.5 * 8192, abs=step)
    assert room(0.0, chunk=2048) == pytest.approx(10 * 1024, abs=step)
    assert room(0.0, requests=10**6) == room(0.0, requests=memory.MOST_IN_GRAPH)
    assert memory.mem_fraction_static(H200, 1, H200.idle_bytes, 8192, 512) == 0.0


def test_a_head_that_ranks_share_is_read_by_each() -> None:
    few = replace(QWEN, kv_heads=4)
    held = [few.kv_token_bytes(E4M3, tp) for tp in (1, 4, 8)]
    assert [held[0] / each for each in held] == [1, 4, 4]


def test_a_trainer_beside_the_engine_takes_from_the_kv_cache() -> None:
    arm = speed.ARMS[-1]
    free = [memory.kv_tokens(H200, QWEN, arm, 1, reserved, 0.8) for reserved in (0.0, 40e9)]
    assert free[0] - free[1] == pytest.approx(0.8 * 40e9 / QWEN.kv_token_bytes(INT8), rel=1e-3)


def test_what_lies_outside_of_the_measurements_is_said() -> None:
    asked = Workload([Request(30000, 8000, 8000)] * 2)
    cluster = prediction.Cluster(H200)
    (best, *_) = prediction.best_of_arms(prediction.predictions(QWEN, asked, cluster))
    assert any("30000" in what for what in unmeasured(QWEN, asked, best))
    many = lognormal(2000, 100, 200, 0.5, 1000)
    (best, *_) = prediction.best_of_arms(prediction.predictions(QWEN, many, cluster))
    assert any("1024" in what for what in unmeasured(QWEN, many, best))
    cut = replace(QWEN, intermediate=12160)
    padded = [
        any("pads" in what for what in unmeasured(each, asked, replace(best, tp=tp)))
        for each, tp in ((QWEN, 1), (QWEN, 2), (cut, 1), (cut, 2))
    ]
    assert best.arm.fp8 and padded == [False, False, False, True]  # 95 blocks, by two


def test_experts_other_than_the_measured_ones_are_named() -> None:
    assert (MOE.experts, MOE.hidden, MOE.intermediate, MOE.experts_per_token) == EXPERTS
    asked = Workload([Request(1000, 1000, 1000)] * 8)
    found = prediction.predictions(MOE, asked, prediction.Cluster(H200, gpus=2))
    said = [
        next(what for what in unmeasured(of, asked, replace(found[-1], tp=tp)) if "expert" in what)
        for of, tp in ((MOE, 1), (MOE, 2), (LARGE, 1))
    ]
    assert said[0].startswith("experts in batches other than 64 sequences of 4096 tokens")
    assert "of 128 x 2048 x 384, 8 a token" in said[1]
    assert "of 128 x 4096 x 1536, 8 a token" in said[2]


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
        with pytest.raises(SystemExit, match=r"sgl-fp8rl plan: .*(line 1 of|has no samples)"):
            plan(model, "--lengths", str(log))


def test_a_run_beside_its_prediction(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(model, "--samples", "64", "--json")
    (best, *_) = json.loads(capsys.readouterr().out)
    run = tmp_path / "run.json"
    rows = [
        {"arm": "fp8rl-kv8", "metric": "rollout_s", "median": 2 * best["outcome"]["seconds"]},
        {"arm": "fp8rl-kv8", "metric": "retractions", "median": 0},
        {"arm": "another", "metric": "rollout_s", "median": 1.0},
    ]
    run.write_text(json.dumps({"rows": rows}))
    plan(model, "--samples", "64", "--check", str(run))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[1].endswith("-50.0%") and lines[2].endswith("-")
    one = {"arm": "fp8rl-kv8", "metric": "rollout_s", "median": 1.0}
    changes = {"arm": ["x"]}, {"metric": ["a"]}, {"median": float("nan")}, {"median": 10**400}
    odd = [json.dumps({"rows": [one | change]}) for change in changes]
    for bad in ("{", "{}", '{"rows": []}', '{"rows": [{"median": "x"}]}', *odd):
        run.write_text(bad)
        with pytest.raises(SystemExit, match=r"sgl-fp8rl plan: .*(not a result|no figure)"):
            plan(model, "--samples", "64", "--check", str(run))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--gpus", "0"], "--gpus must be at least 1"),
        (["--samples", "-1"], "--samples must be at least 1"),
        (["--mem-fraction-static", "1.5"], "between 0 and 1"),
        (["--sigma", "-1"], "--sigma"),
        (["--sigma", "nan"], "--sigma must be at least 0 and at most 10"),
        (["--reserved-gib", "-1"], "--reserved-gib must be at least 0"),
        (["--train-s", "inf"], "--train-s must be at least 0"),
        (["--tp", "-1"], "--tp must be at least 1"),
        (["--json", "--check", "run.json"], "--json prints predictions alone"),
        (["--reserved-gib", "139"], "the model does not fit"),
        (["--tp", "4"], "--tp 4 needs more than --gpus 1; give it --gpus 4"),
        (["--tp", "3"], "--tp 3 does not divide the model's 32 heads"),
        (["--response-tokens", "30000"], "--max-response-tokens more than 20000"),
        (["--lengths", "run.jsonl", "--sigma", "1"], "drop --sigma"),
    ],
)
def test_bad_arguments(model: str, arguments: list[str], why: str) -> None:
    with pytest.raises(SystemExit, match=why):
        plan(model, *arguments)
