"""Whole engines that are timed, without a GPU: capacity, prefill and decode, and their weights."""

import gc
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import measuring, rollout
from benchmarks.benchmark import Measurement, Run
from benchmarks.engines import models, serving, stock_push, weights
from benchmarks.engines.keywords import is_stock

TINY = models.Shape(hidden=256, intermediate=384, layers=2, heads=2, kv_heads=1, vocab=4096)
CASES = ("128x512", "64x8192")


def measure(arm: str, folder: Path) -> list[Measurement]:
    run = Run(folder, folder / "log", {"layers": None}, CASES)
    return rollout.measure(rollout.find(arm), run)


class FakeEngine:
    """Stands for ``sglang.Engine``: its prompts' logprobs are off by what it was given."""

    short = False
    measures = True
    """Whether a first prefill finds scales."""

    def __init__(self, **keywords: Any) -> None:
        self.keywords = keywords
        config = json.loads((Path(keywords["model_path"]) / "config.json").read_text())
        assert config["num_hidden_layers"] == 2
        self.ours = keywords.get("quantization") == "fp8rl"
        self.fp8_kv = self.ours and "kv_cache_dtype" in keywords
        self.pending, self.version = False, -1
        self.requests: list[tuple[int, int, int]] = []
        self.pushed: list[str] = []

    def load(self, named: weights.Named, last: bool, update: str, ranks: int) -> None:
        """Stands for SGLang's own update."""
        form = self.keywords.get("quantization")
        wanted = {name for name, _ in weights.shared(TINY, "cpu", form or "bf16")}
        assert not self.ours and {name for name, _ in named} < wanted
        self.pushed.append(update)

    def take(self, named: weights.Named, *, version: int) -> None:
        """Stands for ``trainer_bridge.update``."""
        assert {name for name, _ in named} == {p.name for p in models.parameters(TINY)}
        assert version == self.version + 1
        self.version, self.pending = version, self.fp8_kv

    def get_server_info(self) -> dict[str, Any]:
        return {"max_total_num_tokens": 1000}

    def fp8rl_control(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["op"] == "layout":
            return {"kv_cache": {"layers": 2} if self.fp8_kv else None}
        return {"pending": self.pending}

    def generate(self, input_ids: Any, sampling_params: Any, **more: Any) -> list[Any]:
        assert not self.ours or self.version >= 0
        each = sampling_params if isinstance(sampling_params, list) else [sampling_params]
        assert more["return_logprob"] and len(each) == len(input_ids)
        self.pending = self.pending and not self.measures
        if input_ids != [stock_push.PROBE]:
            self.requests.append((len(input_ids), len(input_ids[0]), each[0]["max_new_tokens"]))
        replies = []
        for ids, one in zip(input_ids, each, strict=True):
            output = [(-2.0, 1000, None)] * (one["max_new_tokens"] - self.short)
            given = [(-1.0 - len(self.pushed), token, None) for token in ids]
            replies.append(
                {"meta_info": {"output_token_logprobs": output, "input_token_logprobs": given}}
            )
        return replies

    def flush_cache(self) -> Any:
        return SimpleNamespace(success=True)

    def shutdown(self) -> None: ...


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """The engines that were started; updates reach them, and nothing needs a GPU."""
    import trainer_bridge

    started: list[FakeEngine] = []

    def start(**keywords: Any) -> FakeEngine:
        started.append(FakeEngine(**keywords))
        return started[-1]

    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(Engine=start))
    monkeypatch.setattr(
        trainer_bridge, "update", lambda given, engine, **more: engine.take(given, **more)
    )
    monkeypatch.setattr(stock_push, "send", lambda engine, *given: engine.load(*given))
    monkeypatch.setitem(models.SHAPES, "qwen3-8b", TINY)
    monkeypatch.setattr(serving, "DEVICE", "cpu")
    monkeypatch.setattr(measuring, "idle_bytes", lambda: 1 << 30)
    monkeypatch.setattr(measuring, "copy_tb_s", lambda: 4.0)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # slow where SGLang is loaded
    return started


@pytest.mark.parametrize("arm", [arm.name for arm in rollout.ARMS if arm.by_default])
def test_speed(arm: str, engines: list[FakeEngine], tmp_path: Path) -> None:
    capacity, short, long = measure(arm, tmp_path)
    stock = is_stock(rollout.find(arm).engine)
    assert {r["arm"] for r in (capacity, short, long)} == {arm}
    assert [r["case"] for r in (capacity, short, long)] == ["capacity", *CASES]
    assert [len(long["values"][m]) for m in ("prefill_s", "decode_step_ms")] == [4, 3]
    assert capacity["values"]["kv_tokens"] == [1000.0]
    decode = [(64, 8192, 16), (64, 8192, 16 + rollout.NEW)]
    requests = [(4, 8192, 16), *[(16, 8192, 1)] * 4, (64, 8192, 16), *decode * 3]
    assert engines[0].requests[12:] == requests
    assert engines[0].version == (-1 if stock else 0)
    pushed = [f"the weights of {group}" for group in stock_push.weight_groups([])]
    assert engines[0].pushed == (pushed if stock else [])
    json.dumps(capacity)


@pytest.mark.parametrize(
    ("arm", "what", "error"),
    [
        ("fp8rl-kv8", "measures", "did not measure the KV scales"),
        ("fp8rl", "short", "a request for 16 tokens with 15"),
    ],
)
def test_an_engine_that_is_not_sound_is_not_timed(
    arm: str,
    what: str,
    error: str,
    engines: list[FakeEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeEngine, what, not getattr(FakeEngine, what))
    with pytest.raises(RuntimeError, match=error):
        measure(arm, tmp_path)
