"""Whole engines that are timed, without a GPU: capacity, prefill and decode, and their weights."""

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
    """Stands for ``sglang.Engine``: its logprobs are off by ``shift`` and by what it was given."""

    shift = 0.0
    short = False
    measured = 1.0
    """The scales that a first prefill finds."""

    def __init__(self, **keywords: Any) -> None:
        self.keywords = keywords
        config = json.loads((Path(keywords["model_path"]) / "config.json").read_text())
        assert config["num_hidden_layers"] == 2
        self.ours = keywords.get("quantization") == "fp8rl"
        self.fp8_kv = self.ours and "kv_cache_dtype" in keywords
        self.pending, self.version = False, -1
        self.scales = torch.ones(2, 2, 1)
        self.requests: list[tuple[int, int, int]] = []
        self.pushed: list[str] = []

    def load(self, named: weights.Named, last: bool, update: str, ranks: int) -> None:
        """Stands for SGLang's own update."""
        form = self.keywords.get("quantization")
        wanted = {name for name, _ in weights.shared(TINY, "cpu", form or "bf16")}
        assert not self.ours and {name for name, _ in named} < wanted
        self.pushed.append(update)

    def take(self, given: Any, *, version: int, kv_scales: torch.Tensor | None = None) -> Any:
        named = given if isinstance(given, list) else weights.hf_named(given)
        assert {name for name, _ in named} == {p.name for p in models.parameters(TINY)}
        assert version == self.version + 1
        self.version, self.pending = version, self.fp8_kv and kv_scales is None
        if kv_scales is not None:
            self.scales = kv_scales.amax(-1, keepdim=True).expand_as(kv_scales).clone()
        nbytes = sum(tensor.nbytes for _, tensor in named)
        return SimpleNamespace(bytes=nbytes, mapped_bytes=nbytes if version else 0)

    def get_server_info(self) -> dict[str, Any]:
        return {"max_total_num_tokens": 1000}

    def fp8rl_control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        if message["op"] == "layout":
            return {"kv_cache": {"layers": 2} if self.fp8_kv else None}
        return {"pending": self.pending, "scales": self.scales.tolist()}

    def generate(self, input_ids: Any, sampling_params: Any, **more: Any) -> list[Any]:
        assert not self.ours or self.version >= 0
        each = sampling_params if isinstance(sampling_params, list) else [sampling_params]
        assert more["return_logprob"] and len(each) == len(input_ids)
        assert all(one["ignore_eos"] for one in each)
        if self.pending:  # the first prefill measures
            self.pending, self.scales = False, torch.full_like(self.scales, self.measured)
        if input_ids != [stock_push.PROBE]:
            self.requests.append((len(input_ids), len(input_ids[0]), each[0]["max_new_tokens"]))
        replies = []
        for ids, one in zip(input_ids, each, strict=True):
            new = one["max_new_tokens"]
            output = [(-2.0 - self.shift, 1000 + n, None) for n in range(new - self.short)]
            meta: dict[str, Any] = {"output_token_logprobs": output}
            if (start := more["logprob_start_len"]) >= 0:
                first = [(None, ids[start], None)]
                error = self.shift + len(self.pushed) + float(self.scales[0, 1, 0]) - 1.0
                meta["input_token_logprobs"] = first + [
                    (-1.0 - error, t, None) for t in ids[start + 1 :]
                ]
            replies.append({"meta_info": meta})
        return replies

    def flush_cache(self) -> Any:
        return SimpleNamespace(success=True)

    def shutdown(self) -> None:
        pass


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
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # slow where SGLang is loaded
    return started


@pytest.mark.parametrize("arm", [arm.name for arm in rollout.ARMS if arm.by_default])
def test_speed(arm: str, engines: list[FakeEngine], tmp_path: Path) -> None:
    capacity, short, long = measure(arm, tmp_path)
    stock = is_stock(rollout.find(arm).engine)
    assert {r["arm"] for r in (capacity, short, long)} == {arm}
    assert [r["case"] for r in (capacity, short, long)] == ["capacity", "128x512", "64x8192"]
    assert [len(long["values"][m]) for m in ("prefill_s", "decode_step_ms")] == [4, 3]
    assert capacity["values"]["kv_tokens"] == [1000.0]
    decode = [(64, 8192, 16), (64, 8192, 16 + rollout.NEW)]
    requests = [(4, 8192, 16), *[(16, 8192, 1)] * 4, (64, 8192, 16), *decode * 3]
    assert engines[0].requests[12:] == requests
    assert engines[0].version == (-1 if stock else 0)
    pushed = [f"the weights of {group}" for group in stock_push.weight_groups([])]
    assert engines[0].pushed == (pushed if stock else [])
    json.dumps(capacity)


def test_capacity_by_hand() -> None:
    shape = models.MODELS["qwen3-8b"]
    free = 139 << 30
    stock, ours = (rollout.find(arm).keywords(largest=128) for arm in ("stock-bf16", "fp8rl-kv8"))
    static = 0.88 * free
    wanted = (static - 16_381_470_720) / (36 * 2 * 8 * 128 * 2)
    assert serving.capacity(stock, shape, free) == pytest.approx(wanted)
    held = 16_381_470_720 - 6_945_767_424 + 4 * 6_945_767_424 // 128**2
    wanted = (static - held) / (36 * 2 * 8 * 128)
    assert serving.capacity(ours, shape, free) == pytest.approx(wanted)


def test_a_short_answer_and_missing_scales_are_seen(
    engines: list[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "pending", property(lambda _: True, lambda *_: None), False)
    with pytest.raises(RuntimeError, match="did not measure the KV scales"):
        measure("fp8rl-kv8", tmp_path)
    monkeypatch.setattr(FakeEngine, "short", True)
    with pytest.raises(RuntimeError, match="a request for 16 tokens with 15"):
        measure("fp8rl", tmp_path)


def test_shared_weights_are_a_whole_model_in_the_memory_of_one_layer() -> None:
    shape = replace(TINY, layers=5)
    named = weights.shared(shape, "cpu")
    wanted = {p.name: p.shape for p in models.parameters(shape)}
    assert {name: tuple(tensor.shape) for name, tensor in named} == wanted
    assert len({tensor.data_ptr() for _, tensor in named}) == 11 + 3
