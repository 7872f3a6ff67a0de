"""The KV cache benchmark without a GPU: inputs, hooks, and engines of a few lines."""

import gc
import importlib
import inspect
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import attention_inputs as inputs_of
from benchmarks import attention_kernels as kernels
from benchmarks import (
    kernels_xqa,
    kv,
    kv_arm,
    kv_attention,
    kv_cases,
    kv_engines,
    kv_weights,
    measuring,
    models,
    processes,
    serving,
    stock_push,
    weights,
)
from sgl_fp8rl.ops.reference import FP8_DTYPE

LOAD = inputs_of.Load(2, 128)
BEYOND = replace(LOAD, beyond=True)
BF16_ERROR = 0.01
"""Of attention over unquantized values with BF16 q and out; 0.002 here."""
FP8_ERROR = 0.15
"""Of attention over codes; 0.07 to 0.09 here with calibrated scales, 0.12 with scales of 1."""
SATURATED = 4.0
"""By so much at least is the error larger where K is beyond 448 and scales are 1; 8.7 here."""
TINY = models.Shape(hidden=256, intermediate=384, layers=2, heads=2, kv_heads=1, vocab=4096)


# ---- attention without an engine -----------------------------------------------------------------


def test_inputs_are_what_they_say() -> None:
    plain, beyond = inputs_of.draw(LOAD, "cpu"), inputs_of.draw(BEYOND, "cpu")
    assert torch.equal(plain.k_SHD, inputs_of.draw(LOAD, "cpu").k_SHD)
    assert plain.amax_3H().max() < 448
    k_H = beyond.amax_3H()[0]
    assert bool((k_H[inputs_of.BEYOND_HEADS] > 448).all()) and k_H[2:].max() < 448
    channels = plain.k_SHD.float().square().mean((0, 1)).sqrt()
    assert channels[list(inputs_of.OUTLIER_CHANNELS["k"])].min() > 2 * channels.median()
    # rotation keeps lengths, so tokens are as long as RMS-norm makes them
    pair = plain.k_SHD[..., [5, 69]].float().norm(dim=-1)
    assert pair.std() > 0.1
    assert BEYOND.name == "2x128, K beyond 448" and LOAD.cache_bytes(1) == 2 * 2 * 128 * 1024


def test_exact_is_attention() -> None:
    drawn = inputs_of.draw(LOAD, "cpu")
    k, v = (x.view(2, 128, 8, 128).double().transpose(1, 2) for x in (drawn.k_SHD, drawn.v_SHD))
    wanted = torch.nn.functional.scaled_dot_product_attention(drawn.q_BHGD.double(), k, v)
    torch.testing.assert_close(inputs_of.exact(drawn), wanted)
    none = inputs_of.errors(wanted, wanted)
    assert none == {"kv_error": [0.0, 0.0], "kv_error_max": [0.0, 0.0]}
    half = inputs_of.errors(wanted / 2, wanted)
    assert half["kv_error"] == pytest.approx([0.5] * 2) == half["kv_error_max"]


def a_run(load: inputs_of.Load) -> Any:
    """What FlashInfer's wrapper computes of q and the caches as they are."""

    def run(q: torch.Tensor, caches: kernels.Caches) -> torch.Tensor:
        drawn = SimpleNamespace(
            load=load,
            q_BHGD=q.view(load.batch, 8, 4, 128),
            k_SHD=caches[0].to(torch.bfloat16),
            v_SHD=caches[1].to(torch.bfloat16),
        )
        return inputs_of.exact(drawn).to(q.dtype).flatten(1, 2)  # type: ignore[arg-type]

    return run


def error_of(load: inputs_of.Load, scheme: str) -> float:
    drawn = inputs_of.draw(load, "cpu")
    layer = kernels.layer_of(scheme, drawn)
    attend = kernels.attend_fa2(drawn, layer, a_run(load))
    got = attend(kernels.stored(layer, drawn))
    assert got.shape == (2, 4096) and got.dtype == torch.bfloat16
    return max(inputs_of.errors(got, inputs_of.exact(drawn))["kv_error"])


def test_our_hook_on_fa2() -> None:
    drawn = inputs_of.draw(LOAD, "cpu")
    plain = a_run(LOAD)(drawn.q_BHGD.flatten(1, 2), (drawn.k_SHD, drawn.v_SHD))
    assert max(inputs_of.errors(plain, inputs_of.exact(drawn))["kv_error"]) < BF16_ERROR
    for load in (LOAD, BEYOND):
        for scheme in ("layer", "head"):
            assert BF16_ERROR < error_of(load, scheme) < FP8_ERROR
    assert error_of(BEYOND, "unit") > SATURATED * error_of(BEYOND, "layer")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """FlashInfer's own ``xqa``, on a module in torch: which variant each call was for."""
    pytest.importorskip("flashinfer")
    module = importlib.import_module("flashinfer.xqa")
    fp8: list[bool] = []

    def xqa(run_sm90_fp8_mha: bool, *arguments: Any) -> None:
        (_, kv_heads, window, q_scale, out, out_scale, q, sinks, k, v, *more) = arguments
        _, _, table, longest, lengths, batch, kv_scale, *_ = more
        fp8.append(run_sm90_fp8_mha)
        assert (kv_heads, window, out_scale, sinks, batch) == (8, 0, 1.0, None, 2)
        assert longest == 128 and lengths.tolist() == [[128], [128]]
        assert q.is_contiguous() and q.shape == out.shape == (2, 1, 32, 128)
        caches = [x[table].to(torch.bfloat16).reshape(-1, 8, 128) for x in (k, v)]
        scaled = (q.float() * q_scale * kv_scale).to(torch.bfloat16)
        got = a_run(LOAD)(scaled[:, 0], (caches[0], caches[1]))
        out.copy_((got * kv_scale).view_as(out))

    monkeypatch.setattr(module, "get_xqa_module", lambda *_: SimpleNamespace(xqa=xqa))
    monkeypatch.setattr(module, "get_compute_capability", lambda _: (9, 0))
    for name in ("xqa", "decode", "utils"):
        imported = importlib.import_module(f"flashinfer.{name}")
        monkeypatch.setattr(imported, "get_device_sm_count", lambda _: 132)
        monkeypatch.setattr(imported, "device_support_pdl", lambda _: False)
    monkeypatch.setattr(kernels, "WORKSPACE_BYTES", 9 << 20)
    return fp8


@pytest.mark.filterwarnings("ignore")
def test_our_hook_on_xqa_reaches_both_variants(hopper: list[bool]) -> None:
    for load in (LOAD, BEYOND):
        drawn = inputs_of.draw(load, "cpu")
        wanted = inputs_of.exact(drawn)
        for scheme in ("layer", "head"):
            layer = kernels.layer_of(scheme, drawn)
            caches = kernels.stored(layer, drawn)
            for fp8_mma in (True, False):
                hopper.clear()
                got = kernels.attend_xqa(drawn, layer, fp8_mma=fp8_mma)(caches)
                assert hopper == [fp8_mma]
                assert max(inputs_of.errors(got, wanted)["kv_error"]) < FP8_ERROR
    drawn = inputs_of.draw(LOAD, "cpu")
    caches = kernels.stored(kernels.layer_of("unit", drawn), drawn)
    got = kernels.attend_stock_xqa(drawn)(caches)
    assert max(inputs_of.errors(got, inputs_of.exact(drawn))["kv_error"]) < FP8_ERROR


@pytest.mark.filterwarnings("ignore")
def test_xqa_in_our_parts_is_held_to_what_it_is_in_its_own(
    hopper: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_xqa, "DEVICE", "cpu")
    monkeypatch.setattr(kv_attention, "APART_BYTES", 1)
    pair = kernels_xqa.pair(LOAD)
    assert (pair.case, pair.nbytes) == ("XQA decode: 2x128", LOAD.cache_bytes(1))
    assert len(pair.stock) == len(pair.ours) == kv_attention.CALLS
    pair.check()
    hopper.clear()
    pair.ours[0]()
    assert hopper == [True]
    attend = kernels.attend_xqa
    monkeypatch.setattr(
        kernels,
        "attend_xqa",
        lambda *args, **more: lambda caches: attend(*args, **more)(caches) * 2,
    )
    with pytest.raises(RuntimeError, match="in our parts"):
        kernels_xqa.pair(LOAD).check()


@pytest.mark.filterwarnings("ignore")
def test_every_kernel_and_scheme_has_a_report(
    hopper: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_attention, "LOADS", (LOAD, BEYOND))
    monkeypatch.setattr(kv_attention, "DEVICE", "cpu")
    monkeypatch.setattr(kernels, "fa2", lambda inputs, dtype: a_run(inputs.load))
    monkeypatch.setattr(kv_attention, "times_us", lambda attend, caches: [2.0, 1.0, 3.0])
    found = kv_attention.reports(False, 4.0)
    assert [report["arm"] for report in found[:8]] == [
        "stock-fa2-bf16",
        "stock-xqa, unit scales",
        *(f"{k}, {s} scales" for s in kernels.SCHEMES for k in ("fa2", "xqa")),
    ]
    assert found[0]["values"]["attention_floor_us"] == [LOAD.cache_bytes(2) / 4e6]
    assert found[1]["values"]["attention_floor_us"] == [LOAD.cache_bytes(1) / 4e6]
    assert all(("attention_us" in r["values"]) is (r["case"] == LOAD.name) for r in found)
    other = kv_attention.reports(True, 4.0)
    assert [r["arm"] for r in other[:3]] == [f"xqa-bf16-mma, {s} scales" for s in kernels.SCHEMES]
    made = kv.rows_of({"attention": found, "attention-bf16-mma": other})
    row = next(r for r in made if (r["arm"], r["metric"]) == ("fa2, layer scales", "attention_us"))
    assert row["unit"] == "us" and row["n"] == 3 and row["process"] == "attention"
    assert row["ratios"]["stock-fa2-bf16, 2x128"] == 1.0
    assert all(label.endswith(row["case"]) for label in row["ratios"])


def test_codes_are_fp8() -> None:
    drawn = inputs_of.draw(LOAD, "cpu")
    caches = kernels.stored(kernels.layer_of("head", drawn), drawn)
    assert {cache.dtype for cache in caches} == {FP8_DTYPE}
    assert kernels.paged(caches[0]).shape == (4, 8, 64, 128)


# ---- engines -------------------------------------------------------------------------------------


def test_cases_are_what_they_say() -> None:
    assert len(set(kv_cases.NAMES)) == len(kv_cases.NAMES)
    assert kv_cases.CASES.index(kv_cases.REFERENCE) == len(kv_cases.CASES) - 2
    assert [c.arm for c in kv_cases.CASES if c.stock] == [
        "stock-bf16",
        "stock-bf16-kv8-xqa",
        "stock-block-fp8-kv8-xqa",
    ]
    assert set(kv_cases.NAMES) - set(kv_cases.DEFAULT) == {
        "engine-stock-bf16-kv8-xqa",
        "engine-fp8rl-kv8-per-head",
    }
    for case in kv_cases.CASES:
        assert case.stock is (case.part == "engine" and "fp8rl" not in json.dumps(case.engine))
        environ = processes.engine_environment(case.stock)
        assert (environ.get("SGLANG_PLUGINS") == "none") is case.stock


@pytest.mark.filterwarnings("ignore")
def test_engines_are_given_keywords_that_sglang_and_we_know() -> None:
    pytest.importorskip("sglang")
    from sglang.srt.server_args import ServerArgs

    from server_args import Fp8RLServerArgs
    from sgl_fp8rl.kv_cache import backends

    known = set(inspect.signature(ServerArgs).parameters)
    for case in kv_cases.CASES:
        ours = {k.removeprefix("fp8rl_"): v for k, v in case.keywords.items() if "fp8rl_" in k}
        Fp8RLServerArgs(**ours)
        assert {k for k in case.keywords if "fp8rl_" not in k} <= known
        if "kv_cache_dtype" in case.keywords and not case.stock:
            chosen = backends.choose(case.keywords, (9, 0))
            assert chosen == {
                "attention_backend": "flashinfer",
                "prefill_attention_backend": "flashinfer",
                "decode_attention_backend": "trtllm_mha",
                "page_size": 64,
            }


class FakeEngine:
    """Stands for ``sglang.Engine``: its logprobs are off by ``shift`` and by what it was given."""

    shift = 0.0
    short = False

    def __init__(self, **keywords: Any) -> None:
        self.keywords = keywords
        config = json.loads((Path(keywords["model_path"]) / "config.json").read_text())
        assert config["num_hidden_layers"] == 2
        self.ours = keywords.get("quantization") == "fp8rl"
        self.fp8_kv = self.ours and "kv_cache_dtype" in keywords
        self.pending, self.version = False, -1
        self.scales = torch.ones(2, 3, 1)
        self.requests: list[tuple[int, int, int]] = []
        self.pushed: list[str] = []

    def load(self, named: weights.Named, last: bool, update: str) -> None:
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

    def fp8rl_control(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["op"] == "layout":
            return {"kv_cache": {"layers": 2} if self.fp8_kv else None}
        return {"pending": self.pending, "scales": self.scales.tolist()}

    def generate(self, input_ids: Any, sampling_params: Any, **more: Any) -> list[Any]:
        assert not self.ours or self.version >= 0
        each = sampling_params if isinstance(sampling_params, list) else [sampling_params]
        assert more["return_logprob"] and len(each) == len(input_ids)
        assert all(one["ignore_eos"] for one in each)
        self.pending = False
        if input_ids != [stock_push.PROBE]:
            self.requests.append((len(input_ids), len(input_ids[0]), each[0]["max_new_tokens"]))
        replies = []
        for ids, one in zip(input_ids, each, strict=True):
            new = one["max_new_tokens"]
            output = [(-2.0 - self.shift, 1000 + n, None) for n in range(new - self.short)]
            meta: dict[str, Any] = {"output_token_logprobs": output}
            if more["logprob_start_len"] == 0:
                first = [(None, ids[0], None)]
                meta["input_token_logprobs"] = first + [
                    (-1.0 - self.shift - len(self.pushed), t, None) for t in ids[1:]
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
    monkeypatch.setitem(models.MODELS, kv_cases.MODEL, TINY)
    monkeypatch.setattr(kv_engines, "CUT_LAYERS", 2)
    monkeypatch.setattr(kv_engines, "CUT_VOCAB", TINY.vocab)
    monkeypatch.setattr(serving, "DEVICE", "cpu")
    monkeypatch.setattr(measuring, "idle_bytes", lambda: 1 << 30)
    monkeypatch.setattr(measuring, "copy_tb_s", lambda: 4.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # slow where SGLang is loaded
    return started


def job(case: str, folder: Path, **more: Any) -> dict[str, Any]:
    return {"name": case, "layers": None, "to_score": {}, "folder": str(folder), **more}


@pytest.mark.parametrize("name", [c.name for c in kv_cases.CASES if c.part == "engine"])
def test_speed(name: str, engines: list[FakeEngine], tmp_path: Path) -> None:
    capacity, short, long = kv_arm.run(job(name, tmp_path))["reports"]
    case = kv_cases.find(name)
    assert {r["arm"] for r in (capacity, short, long)} == {case.arm}
    assert [r["case"] for r in (capacity, short, long)] == ["capacity", "128x512", "64x8192"]
    assert [len(long["values"][m]) for m in ("prefill_s", "decode_step_ms")] == [4, 3]
    assert capacity["values"]["kv_tokens"] == [1000.0]
    decode = [(64, 8192, 16), (64, 8192, 272)]
    requests = [(4, 8192, 16), *[(16, 8192, 1)] * 4, (64, 8192, 16), *decode * 3]
    assert engines[0].requests[12:] == requests
    assert engines[0].version == (-1 if case.stock else 0)
    pushed = [f"the weights of {part}" for part in stock_push.parts([])]
    assert engines[0].pushed == (pushed if case.stock else [])
    json.dumps(capacity)


def test_capacity_by_hand() -> None:
    shape = models.MODELS["qwen3-8b"]
    free = 139 << 30
    stock, ours = (kv_cases.find(f"engine-{arm}") for arm in ("stock-bf16", "fp8rl-kv8"))
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
        kv_arm.run(job("engine-fp8rl-kv8", tmp_path))
    monkeypatch.setattr(FakeEngine, "short", True)
    with pytest.raises(RuntimeError, match="a request for 16 tokens with 15"):
        kv_arm.run(job("engine-fp8rl", tmp_path))


def test_logprobs_become_errors(
    engines: list[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raws = {}
    given: list[Any] = []
    monkeypatch.setattr(
        kv_weights, "trainer_scales", lambda *a: given.append(a) or torch.ones(2, 3, 1)
    )
    for number, case in enumerate(c for c in kv_cases.CASES if c.part == "logprobs"):
        monkeypatch.setattr(FakeEngine, "shift", 0.0 if case == kv_cases.REFERENCE else 0.5)
        to_score = kv.sampled(raws) if case == kv_cases.REFERENCE else {}
        report = kv_arm.run(job(case.name, tmp_path, to_score=to_score))
        raws[case.arm] = json.loads(json.dumps(report))["logprobs"]
        assert engines[number].version == 1
    assert len(given) == 2  # one scheme, two sets of weights
    made = kv.logprob_reports(raws)
    assert len(made) == 2 * 5
    first = made[0]
    assert first["values"]["logprob_error"] == pytest.approx([0.5] * kv_engines.SEQUENCES)
    # decode told -2.5, and prefill over BF16 KV -1
    assert first["values"]["logprob_error_decode"] == pytest.approx([1.5] * kv_engines.SEQUENCES)
    assert set(made[-1]["values"]) == {"logprob_error_decode"}
    assert kv.distances([[1.0, 2.0]], [[1.5, 1.0]]) == [0.75]
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        kv.distances([[1.0, 2.0]], [[1.5]])


def test_updates_are_taken_in_turn(engines: list[FakeEngine], tmp_path: Path) -> None:
    with_scales, without = kv_arm.run(job("update", tmp_path))["reports"]
    assert with_scales["case"] == "update, with KV scales"
    assert without["case"] == "update, without KV scales"
    assert len(with_scales["values"]["update_wall_ms"]) == kv_engines.UPDATES
    blocks = 2 * kv_engines.UPDATES // kv_engines.BLOCK
    assert engines[0].version == blocks * (kv_engines.WARM_UP + kv_engines.BLOCK) - 1


def test_scales_that_are_not_in_force_are_seen(
    engines: list[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FakeEngine, "scales", property(lambda _: torch.ones(2, 3, 1), lambda *_: 0), False
    )
    with pytest.raises(RuntimeError, match="the scales of update 0 are not in force"):
        kv_arm.run(job("update", tmp_path))


# ---- weights -------------------------------------------------------------------------------------


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
        assert scales.shape == (2, 3, 2) and scales.dtype == torch.float32
        assert bool((scales[:, 0] > least).all())
        assert bool((scales[:, 1, 0] > 3 * scales[:, 1, 1]).all())  # V's heads differ
