"""The engines of the KV cache benchmark without a GPU: speed, logprobs, updates, weights."""

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import measuring
from benchmarks.benchmark import Measurement, Run
from benchmarks.engines import kv_weights, models, serving, stock_push, weights
from benchmarks.engines.keywords import is_stock
from benchmarks.kv import cases as kv
from benchmarks.kv import logprobs as kv_logprobs
from benchmarks.kv import updates as kv_updates

TINY = models.Shape(hidden=256, intermediate=384, layers=2, heads=2, kv_heads=1, vocab=4096)


def find(name: str) -> kv.Case:
    (case,) = [case for case in kv.CASES if case.name == name]
    return case


def measure(name: str, folder: Path) -> list[Measurement]:
    shared = folder / "shared"
    shared.mkdir(exist_ok=True)
    return kv.measure(find(name), Run(folder, shared, folder / "log", {"layers": None}))


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
        wanted = {name for name, _ in kv_weights.shared(TINY, "cpu", form or "bf16")}
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
    monkeypatch.setitem(models.MODELS, kv.MODEL, TINY)
    monkeypatch.setattr(kv_logprobs, "CUT_LAYERS", 2)
    monkeypatch.setattr(kv_logprobs, "CUT_VOCAB", TINY.vocab)
    monkeypatch.setattr(serving, "DEVICE", "cpu")
    monkeypatch.setattr(measuring, "idle_bytes", lambda: 1 << 30)
    monkeypatch.setattr(measuring, "copy_tb_s", lambda: 4.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # slow where SGLang is loaded
    return started


@pytest.mark.parametrize("name", [c.name for c in kv.CASES if c.kind == "engine"])
def test_speed(name: str, engines: list[FakeEngine], tmp_path: Path) -> None:
    capacity, short, long = measure(name, tmp_path)
    case = find(name)
    stock = is_stock(case.engine)
    assert {r["arm"] for r in (capacity, short, long)} == {case.arm}
    assert [r["case"] for r in (capacity, short, long)] == ["capacity", "128x512", "64x8192"]
    assert [len(long["values"][m]) for m in ("prefill_s", "decode_step_ms")] == [4, 3]
    assert capacity["values"]["kv_tokens"] == [1000.0]
    decode = [(64, 8192, 16), (64, 8192, 272)]
    requests = [(4, 8192, 16), *[(16, 8192, 1)] * 4, (64, 8192, 16), *decode * 3]
    assert engines[0].requests[12:] == requests
    assert engines[0].version == (-1 if stock else 0)
    pushed = [f"the weights of {group}" for group in stock_push.weight_groups([])]
    assert engines[0].pushed == (pushed if stock else [])
    json.dumps(capacity)


def test_capacity_by_hand() -> None:
    shape = models.MODELS["qwen3-8b"]
    free = 139 << 30
    stock, ours = (find(f"engine-{arm}") for arm in ("stock-bf16", "fp8rl-kv8"))
    static = 0.88 * free
    wanted = (static - 16_381_470_720) / (36 * 2 * 8 * 128 * 2)
    assert serving.capacity(stock.keywords, shape, free) == pytest.approx(wanted)
    held = 16_381_470_720 - 6_945_767_424 + 4 * 6_945_767_424 // 128**2
    wanted = (static - held) / (36 * 2 * 8 * 128)
    assert serving.capacity(ours.keywords, shape, free) == pytest.approx(wanted)


def test_a_short_answer_and_missing_scales_are_seen(
    engines: list[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "pending", property(lambda _: True, lambda *_: None), False)
    with pytest.raises(RuntimeError, match="did not measure the KV scales"):
        measure("engine-fp8rl-kv8", tmp_path)
    monkeypatch.setattr(FakeEngine, "short", True)
    with pytest.raises(RuntimeError, match="a request for 16 tokens with 15"):
        measure("engine-fp8rl", tmp_path)


def test_logprobs_become_errors(
    engines: list[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        kv_weights, "trainer_scales", lambda *a: given.append(a) or torch.ones(2, 2, 1)
    )
    cases = [case for case in kv.CASES if case.kind == "logprobs"]
    for number, case in enumerate(cases):
        reference = case == kv.REFERENCE
        monkeypatch.setattr(FakeEngine, "shift", 0.0 if reference else 0.5)
        found = measure(case.name, tmp_path)
        assert bool(found) is reference and engines[number].version == 1
    assert len(given) == 2  # one scheme, two sets of weights
    arms = [case.arm for case in cases for _ in kv_weights.PLANTED]
    assert [measurement["arm"] for measurement in found] == arms
    errors = found[0]["values"]
    assert errors["logprob_error"] == pytest.approx([0.5] * kv_logprobs.SEQUENCES)
    # decode gave -2.5, and prefill over BF16 KV -1
    assert errors["logprob_error_decode"] == pytest.approx([1.5] * kv_logprobs.SEQUENCES)
    assert set(found[-1]["values"]) == {"logprob_error_decode"}


def test_distances() -> None:
    assert kv_logprobs.distances([[1.0, 2.0]], [[1.5, 1.0]]) == [0.75]
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        kv_logprobs.distances([[1.0, 2.0]], [[1.5]])


def test_updates_are_taken_in_turn(engines: list[FakeEngine], tmp_path: Path) -> None:
    with_scales, without = measure("update", tmp_path)
    assert with_scales["case"] == "update, with KV scales"
    assert without["case"] == "update, without KV scales"
    assert len(with_scales["values"]["update_wall_ms"]) == kv_updates.UPDATES
    blocks = 2 * kv_updates.UPDATES // kv_updates.BLOCK
    assert engines[0].version == blocks * (kv_updates.WARM_UP + kv_updates.BLOCK) - 1


def test_scales_that_are_not_in_force_are_seen(
    engines: list[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FakeEngine, "scales", property(lambda _: torch.ones(2, 2, 1), lambda *_: 0), False
    )
    with pytest.raises(RuntimeError, match="the scales of update 0 are not in force"):
        measure("update", tmp_path)


def test_shared_weights_are_a_whole_model_in_the_memory_of_one_layer() -> None:
    shape = replace(TINY, layers=5)
    named = kv_weights.shared(shape, "cpu")
    wanted = {p.name: p.shape for p in models.parameters(shape)}
    assert {name: tuple(tensor.shape) for name, tensor in named} == wanted
    assert len({tensor.data_ptr() for _, tensor in named}) == 11 + 3


def test_planted_weights() -> None:
    shape = replace(TINY, kv_heads=2)
    plain, again, beyond = (
        dict(kv_weights.module(shape, "cpu", name).named_parameters())
        for name in (kv_weights.PLANTED[0], *kv_weights.PLANTED)
    )
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    changed = {name.split(".")[-2] for name in plain if not torch.equal(plain[name], beyond[name])}
    assert changed == {"q_norm", "k_norm"}
    assert beyond["model.layers.1.self_attn.k_norm.weight"][5] > 448
    heads = plain["model.layers.0.self_attn.v_proj.weight"].unflatten(0, (2, -1)).float()
    first, second = heads.std((1, 2)).tolist()
    assert first / second == pytest.approx(2**kv_weights.V_OCTAVES, rel=0.05)


def test_trainer_scales_come_from_the_same_weights() -> None:
    pytest.importorskip("transformers", minversion="5.0")
    shape = replace(TINY, heads=4, kv_heads=2)
    sequences = serving.prompts_of(8, 2, 32, shape.vocab)
    for planted, least in ((kv_weights.PLANTED[0], 0.0), (kv_weights.PLANTED[1], 2.0)):
        made = kv_weights.module(shape, "cpu", planted)
        scales = kv_weights.trainer_scales(made, shape, sequences)
        assert scales.shape == (2, 2, 2) and scales.dtype == torch.float32
        assert bool((scales[:, 0] > least).all())
        assert bool((scales[:, 1, 0] > 3 * scales[:, 1, 1]).all())  # V's heads differ
