"""The rollout benchmark without a GPU: lengths, arms, floors, pushes, merging, tables."""

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import (
    environment,
    headline,
    kv_weights,
    long_tail,
    measuring,
    models,
    performance_picture,
    performance_tables,
    processes,
    readme,
    result_rows,
    rollout,
    serving,
    stock_push,
    traffic,
    weights,
)
from benchmarks import rollout_cases as cases
from sgl_fp8rl.ops.reference import FP8_DTYPE, dequantize_weight, quantize_weight
from tests.benchmarks import facts

QWEN3_8B = models.MODELS["qwen3-8b"]
TINY = models.Shape(hidden=256, intermediate=384, layers=3, heads=2, kv_heads=1, vocab=512)
TINY_MOE = models.Shape(256, 128, 2, 2, 1, experts=4, experts_per_token=2, vocab=512)


# ---- cases ---------------------------------------------------------------------------------------


def test_lengths_are_seeded_and_have_a_long_tail() -> None:
    lengths = cases.output_lengths(20_000)
    assert lengths[:512] == cases.output_lengths(512)
    assert median(lengths) == pytest.approx(4000, rel=0.03)
    assert max(lengths) == 20_000 and min(lengths) >= 1
    mean = sum(lengths) / len(lengths)
    assert 5200 < mean < 5500  # 5353: the median of a lognormal is below its mean


def test_peak_by_hand() -> None:
    # all three at 10 tokens, then two at 20, then one at 100
    assert cases.peak_tokens([10, 20, 100]) == 3 * (1024 + 10)
    assert cases.peak_tokens([10, 20_000]) == 1024 + 20_000


def test_demand_is_one_and_a_half_times_what_bf16_may_hold() -> None:
    lengths = cases.output_lengths(256)
    share = cases.pool_share(lengths, 780_000)
    assert share < 1.0
    assert cases.peak_tokens(lengths) / (share * 780_000) == pytest.approx(cases.DEMAND)
    assert cases.pool_share(cases.output_lengths(512), 780_000) == 1.0  # 1.8 times


@pytest.mark.filterwarnings("ignore")
def test_engines_are_given_keywords_that_sglang_and_we_know() -> None:
    pytest.importorskip("sglang")
    from sglang.srt.server_args import ServerArgs

    from server_args import Fp8RLServerArgs

    known = set(inspect.signature(ServerArgs).parameters)
    assert len(set(cases.NAMES)) == len(cases.NAMES)
    assert set(cases.NAMES) - set(cases.DEFAULT) == {"stock-bf16-fa3"}
    for arm in cases.ARMS:
        keywords = arm.keywords(batches=(64, 32))
        assert arm.stock is arm.name.startswith("stock")
        assert arm.stock is ("fp8rl" not in json.dumps(keywords))
        assert keywords["cuda_graph_bs_decode"] == [32, 64]
        assert keywords["cuda_graph_max_bs_decode"] == 64
        assert "cuda_graph_bs_decode" not in arm.keywords(largest=512)
        Fp8RLServerArgs(**{k[6:]: v for k, v in keywords.items() if k.startswith("fp8rl_")})
        assert {k for k in keywords if not k.startswith("fp8rl_")} <= known


@pytest.mark.parametrize(
    ("arm", "load", "floor_ms"),
    [
        # shared figures of one H200: FP8 linears and FP8 KV, a head in BF16
        ("fp8rl-kv8", serving.Load(128, 512, 352), 3.45),
        ("fp8rl-kv8", serving.Load(64, 8192, 224), 11.0),
        ("stock-bf16", serving.Load(64, 8192, 224), 22.0),
    ],
)
def test_decode_floor(arm: str, load: serving.Load, floor_ms: float) -> None:
    keywords = cases.find(arm).keywords(largest=128)
    assert serving.decode_floor_ms(keywords, QWEN3_8B, load, 4.3) == pytest.approx(
        floor_ms, rel=0.02
    )


def test_a_step_reads_the_experts_that_its_tokens_use() -> None:
    assert QWEN3_8B.experts_read(1) == 1.0
    moe = models.MODELS["qwen3-30b-a3b"]
    assert moe.experts_read(1) == pytest.approx(8 / 128)
    assert 0.98 < moe.experts_read(64) < 1.0
    parameters = list(models.parameters(moe))
    whole, one = (traffic.step_weight_bytes(parameters, "bf16", n) for n in (1.0, 8 / 128))
    assert whole == traffic.bf16_bytes(parameters) - 2 * 151_936 * 2048
    assert one == whole - (1 - 8 / 128) * 2 * 48 * 128 * 3 * 768 * 2048


# ---- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [TINY, TINY_MOE], ids=["dense", "moe"])
def test_stock_and_ours_get_the_same_weights(shape: models.Shape) -> None:
    bf16 = dict(kv_weights.shared(shape, "cpu"))
    fp8 = dict(kv_weights.shared(shape, "cpu", "fp8"))
    assert list(bf16) == [name for name, _ in weights.hf_named(weights.bf16_module(shape, "meta"))]
    assert set(fp8) - set(bf16) == {name for name in fp8 if name.endswith("_scale_inv")}
    for name, weight in bf16.items():
        if f"{name}_scale_inv" not in fp8:
            assert torch.equal(fp8[name], weight)
            continue
        codes, scales = quantize_weight(weight)
        assert torch.equal(fp8[name].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(fp8[f"{name}_scale_inv"], scales)
        assert (dequantize_weight(codes, scales) - weight).abs().max() < 0.1
    # a layer more takes no memory
    pointers = {t.untyped_storage().data_ptr() for t in bf16.values()}
    more = kv_weights.shared(replace(shape, layers=9), "cpu")
    assert len({t.untyped_storage().data_ptr() for _, t in more}) == len(pointers)


class Stock:
    """Stands for a stock engine that starts on zeros; ``deaf`` is what it does not take."""

    def __init__(self, deaf: Callable[[str], bool] = lambda name: False) -> None:
        self.deaf, self.sums, self.flushes = deaf, 0.0, 0

    def load(self, named: weights.Named, last: bool, update: str) -> None:
        assert not last
        self.sums += sum(float(t.float().sum()) for name, t in named if not self.deaf(name))

    def flush_cache(self) -> Any:
        """Refused the first time, as by a scheduler that has not put away its last batch."""
        self.flushes += 1
        return SimpleNamespace(success=self.flushes % 2 == 0)

    def generate(self, input_ids: Any, **_: Any) -> Any:
        values = [(None, 0, None)] + [(self.sums - n, n, None) for n in input_ids[0][1:]]
        return [{"meta_info": {"input_token_logprobs": values}}]


def test_a_push_that_does_not_arrive_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock_push, "send", lambda engine, *given: engine.load(*given))
    named = kv_weights.shared(TINY, "cpu", "fp8")
    assert {t.dtype for _, t in named} == {FP8_DTYPE, torch.float32, torch.bfloat16}
    healthy = Stock()
    stock_push.push(healthy, named)
    assert healthy.flushes == 2 * 3
    deaf: dict[str, Callable[[str], bool]] = {
        "the MLP": lambda name: name.endswith("_proj.weight") and ".mlp." in name,
        "attention": lambda name: name.endswith("_proj.weight"),
        "all but the linears": lambda name: True,
    }
    for part, to in deaf.items():
        with pytest.raises(RuntimeError, match=f"random weights in {part} changed no logprob"):
            stock_push.push(Stock(to), named)
    with pytest.raises(RuntimeError, match="not finite"):
        stock_push.push(Stock(), [("lm_head.weight", torch.full((1,), torch.nan))])
    monkeypatch.setattr(stock_push, "IDLE_S", 0.0)
    busy = SimpleNamespace(flush_cache=lambda: SimpleNamespace(success=False))
    with pytest.raises(RuntimeError, match="the engine is not idle"):
        stock_push.flush(busy)
    assert sum(map(len, stock_push.parts(named).values())) == len(named)


@pytest.mark.filterwarnings("ignore")
def test_sglang_s_own_dummy_codes_are_nearly_all_zero() -> None:
    """Why the push is there: if this fails, SGLang draws codes of its own now."""
    pytest.importorskip("sglang")
    from sglang.srt.model_loader.weight_utils import initialize_dummy_weights

    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.empty(256, 256).to(FP8_DTYPE), requires_grad=False)
    initialize_dummy_weights(module)
    zeros = (module.weight.float() == 0).float().mean()
    assert zeros > 0.95  # 0.976: what is beyond half of 2**-9, of +-1e-3
    pushed = dict(kv_weights.shared(TINY, "cpu", "fp8"))["model.layers.0.mlp.up_proj.weight"]
    assert (pushed.float() == 0).float().mean() < 0.01  # 0.000


# ---- the command line, rows and files ------------------------------------------------------------


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = rollout.arguments([])
    assert options.arms == list(cases.DEFAULT)
    assert options.cases == ["32x512", "128x512", "256x512", "64x8192", "16x30000", "rollout"]
    few = rollout.arguments(["--arms", "fp8rl", "--cases", "128x512", "rollout"])
    assert rollout.command(few) == rollout.command(options)
    loads, tail = rollout.jobs(few)
    assert (loads["cases"], loads["requests"]) == (["128x512"], None)
    assert (tail["cases"], tail["requests"]) == ([], 512)
    assert rollout.cases_of(tail) == ["rollout of 512"]
    moe = rollout.arguments(["--model", "qwen3-30b-a3b"])
    assert moe.cases == ["64x4096", "rollout"]
    for words in (["--layers", "2"], ["--cases", "1x1"], ["--arms", "no-such"]):
        with pytest.raises(SystemExit):
            rollout.arguments(words)
    assert "no case 1x1 of qwen3-8b" in capsys.readouterr().err


FACTS = facts.FACTS | {"count": 4, "host": "0123"}
LOG = """Decode batch, #running-req: 9, #token: 90, token usage: 0.11, cuda graph: True
the rollout begins
Decode batch, #running-req: 100, #token: 900, token usage: 0.90, cuda graph: True, gen
KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 5
Decode batch, #running-req: 50, #token: 500, token usage: 0.50, cuda graph: True, gen
"""


def fake_process(script: Path, job: Any, limit_s: float, environ: Any) -> processes.Outcome:
    """What a process of an arm may report."""
    assert (environ.get("SGLANG_PLUGINS") == "none") is job["arm"].startswith("stock")
    if job["arm"] == "stock-block-fp8":
        return processes.Outcome(None, "exit status 1: MemoryError: too much", "")
    step = {"stock-bf16": 10.0}.get(job["arm"], 5.0)
    values: dict[str, Any] = {}
    if job["requests"] is None:
        values["capacity"] = {"kv_tokens": [990.0], "copy_tb_s": [4.0 if step > 5 else 4.1]}
        for case in job["cases"]:
            times = {"prefill_s": [step] * 4, "decode_step_ms": [step] * 3}
            values[case] = times | {"decode_floor_ms": [4.0]}
    else:
        values[rollout.cases_of(job)[0]] = {
            "rollout_s": [20 * step],
            "rollout_tokens_s": [1000 / step],
            "retractions": [step],
            "retracted_requests": [3.0],
            "kv_tokens": [990.0],
            "kv_demand": [1.5],
            "copy_tb_s": [4.0],
        }
    found = serving.reports(job["arm"], job["model"], 36, values)
    return processes.Outcome({"reports": found}, None, LOG)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, and processes that need no GPU."""
    monkeypatch.setattr(rollout, "environment", lambda command: FACTS | {"command": command})
    monkeypatch.setattr(rollout, "host", lambda: FACTS["host"])
    monkeypatch.setattr(processes, "run_job", fake_process)
    return tmp_path


def run(path: Path, *words: str) -> list[result_rows.Row]:
    rollout.main([*words, "--output", str(path)])
    found: list[result_rows.Row] = json.loads(path.read_text())["rows"]
    return found


def test_a_grid_is_cut_into_calls(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(measured / "whole.json", "--requests", "64")
    cut = measured / "cut.json"
    for arm in reversed(cases.DEFAULT):
        run(cut, "--arms", arm, "--cases", "rollout", "--requests", "64")
        loads = rollout.arguments([]).cases[:-1]
        found = run(cut, "--arms", arm, "--cases", *loads)
    key = result_rows.identity
    assert sorted(found, key=key) == sorted(whole, key=key)
    row = next(r for r in found if key(r)[1:] == ("fp8rl", "64x8192", "decode_step_ms"))
    assert row["ratios"]["stock-bf16, 64x8192"] == 2.0
    assert all(label.endswith(", 64x8192") for label in row["ratios"])
    failures = [r for r in found if r["metric"] == "failure"]
    assert {r["case"] for r in failures} == {*loads, "rollout of 64"}
    again = run(cut, "--arms", "stock-bf16", "--cases", "128x512")
    assert len(again) == len(found)
    monkeypatch.setitem(FACTS, "host", "4567")  # booted anew
    assert {r["arm"] for r in run(cut, "--arms", "fp8rl", "--cases", "128x512")} == {"fp8rl"}


def test_files_of_one_host_are_merged(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("stock-bf16", "fp8rl-kv8")
    paths = [measured / f"{arm}.json" for arm in names]
    for arm, path in zip(names, paths, strict=True):
        assert all(not r["ratios"] for r in run(path, "--arms", arm, "--cases", "128x512"))
    merged = run(measured / "all.json", "--merge", *map(str, reversed(paths)))
    assert [r["arm"] for r in merged] == ["stock-bf16"] * 5 + ["fp8rl-kv8"] * 5
    step = next(
        r for r in merged if result_rows.identity(r)[1::2] == ("fp8rl-kv8", "decode_step_ms")
    )
    assert step["ratios"] == {"stock-bf16, 128x512": 2.0}
    with pytest.raises(ValueError, match="more than one file has qwen3-8b, stock-bf16, capacity"):
        run(measured / "twice.json", "--merge", str(paths[0]), str(paths[0]))
    monkeypatch.setitem(FACTS, "commit", "def5678")
    run(paths[1], "--arms", "fp8rl-kv8", "--cases", "128x512")
    with pytest.raises(ValueError, match=r"fp8rl-kv8.json is of another machine, boot, commit"):
        run(measured / "mixed.json", "--merge", *map(str, paths))


def test_usage_is_that_of_the_rollout() -> None:
    assert long_tail.usage(LOG) == {"running_requests": [75.0], "kv_used": [0.9, 0.5]}
    with pytest.raises(ValueError, match="tells of no decode"):
        long_tail.usage(LOG.partition(long_tail.BEGINS)[0])


def test_a_host_has_a_mark_without_a_name() -> None:
    assert environment.host() == environment.host()
    assert len(environment.host()) == 12


def test_the_page_is_made_from_the_file(
    measured: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    page = readme.PERFORMANCE.read_text()
    monkeypatch.setattr(readme, "RESULTS", measured)
    assert readme.BLOCK.sub(readme.filled, page) == page  # nothing was measured yet
    run(measured / "rollout.json", "--requests", "64")
    made = readme.BLOCK.sub(readme.filled, page)
    assert readme.BLOCK.sub(readme.filled, made) == made
    lines = made.splitlines()
    cell = "5.00 ms, 2.00x, 80% of floor"
    assert f"| fp8rl-kv8 | {' | '.join([cell] * 5)} |" in lines
    assert f"| stock-bf16 | {' | '.join(['10.00 ms, 40% of floor'] * 5)} |" in lines
    assert f"| fp8rl | {' | '.join(['5 s, 2.00x'] * 5)} |" in lines
    assert "| decode step | 32x512 | 128x512 | 256x512 | 64x8192 | 16x30000 |" in lines
    assert "| stock-bf16 | 200 s |  | 100 | 10 | 3 | 75 | 990 | 70% |" in lines
    assert "| fp8rl | 100 s | 2.00x | 200 | 5 | 3 | 75 | 990 | 70% |" in lines
    assert "stock-block-fp8, qwen3-8b, 64x8192 fails: exit status 1: MemoryError: too much" in lines
    assert "one NVIDIA H200 an arm of 4 in the host" in made and "4.00 to 4.10 TB/s" in made
    picture = tmp_path / "performance.png"
    performance_picture.draw((measured / "rollout.json").read_text(), picture)
    assert picture.stat().st_size > 10_000

    found = performance_tables.summary((measured / "rollout.json").read_text()).splitlines()
    told = headline.rollout((measured / "rollout.json").read_text())
    assert "2.00 times as fast as in BF16" in told and "retracts 3 of them, FP8 3 (" in told
    assert told.endswith("One run an arm.")
    best = "| 10.00 ms | 5.00 ms (stock-bf16-kv8-xqa) | 5.00 ms (fp8rl), 2.00x |"
    assert f"| qwen3-8b, 128x512 {best}" in found
    only = json.dumps(
        {
            **json.loads((measured / "rollout.json").read_text()),
            "rows": [
                r
                for r in json.loads((measured / "rollout.json").read_text())["rows"]
                if r["arm"] == "stock-bf16"
            ],
        }
    )
    assert "128x512" not in performance_tables.summary(only), "nothing of ours is beside it"


# ---- where figures go, and what must not be measured ---------------------------------------------


def test_the_long_tail_has_a_file_of_its_own() -> None:
    assert rollout.arguments(["--cases", "rollout"]).output == rollout.LONG_TAIL
    assert rollout.arguments([]).output == rollout.RESULTS
    assert rollout.arguments(["--cases", "32x512", "rollout"]).output == rollout.RESULTS
    with pytest.raises(SystemExit):
        rollout.arguments(["--cases", "rollout", "--layers", "2"])


def test_a_card_that_another_process_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine would be given the memory a moment later, and its floor would be wrong."""
    total = 140 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (total - (1 << 30), total))
    assert measuring.idle_bytes() == total - (1 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (total - (60 << 30), total))
    with pytest.raises(RuntimeError, match=r"64\.4 GB of the GPU are in use"):
        measuring.idle_bytes()
