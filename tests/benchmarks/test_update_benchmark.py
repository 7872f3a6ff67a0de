"""The update benchmark without a GPU: shapes, floors, trainer's weights, how an arm measures."""

import gc
import json
import os
import time
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import arms, cases, measuring, models, result_rows, stock_push, traffic, weights
from sgl_fp8rl.ops.reference import FP8_DTYPE, dequantize_weight, quantize_weight

TINY_DENSE = models.Shape(hidden=256, intermediate=384, layers=2, heads=2, kv_heads=1, vocab=512)
TINY_MOE = replace(TINY_DENSE, intermediate=128, experts=4, experts_per_token=2)
TINY = pytest.mark.parametrize("shape", [TINY_DENSE, TINY_MOE], ids=["dense", "moe"])


@pytest.mark.parametrize(
    ("model", "count", "hf_tensors"),
    [
        ("qwen3-8b", 8_190_735_360, 36 * 11 + 3),
        ("qwen3-30b-a3b", 30_532_122_624, 48 * (3 * 128 + 9) + 3),
    ],
)
def test_the_shapes_are_those_of_the_published_models(
    model: str, count: int, hf_tensors: int
) -> None:
    shape = models.MODELS[model]
    assert sum(p.numel for p in models.parameters(shape)) == count
    with torch.device("meta"):
        assert len(weights.hf_named(weights.bf16_module(shape, "meta"))) == hf_tensors


@pytest.mark.parametrize("model", models.MODELS)
def test_the_module_has_the_parameters_of_transformers(model: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    shape = replace(models.MODELS[model], layers=2)
    config = transformers.AutoConfig.for_model(**models.config(shape))
    with torch.device("meta"):
        real = transformers.AutoModelForCausalLM.from_config(config)
    ours = weights.bf16_module(shape, "meta")
    assert {n: p.shape for n, p in ours.named_parameters()} == {
        n: p.shape for n, p in real.named_parameters()
    }


def test_floors_by_hand() -> None:
    dense = list(models.parameters(models.MODELS["qwen3-8b"]))
    # q and o, k and v, three of the MLP, in 36 layers; the rest stays BF16
    fp8 = 36 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 12288 * 4096)
    rest = 8_190_735_360 - fp8
    scales = 4 * fp8 // (128 * 128)
    mapped = traffic.update_traffic(dense, "bf16", "fp8", bucket=None)
    assert mapped == 2 * fp8 + fp8 + scales + 4 * rest == 25_818_869_760
    payload = traffic.payload_bytes(dense, "bf16")
    assert payload == traffic.bf16_bytes(dense) == 16_381_470_720
    assert traffic.floor_ms(mapped, 4.3) == pytest.approx(6.0044, abs=1e-4)
    bucket = traffic.update_traffic(dense, "bf16", "fp8", bucket="bf16")
    assert traffic.floor_ms(bucket, 4.3) == pytest.approx(13.6237, abs=1e-4)
    bucket = traffic.update_traffic(dense, "bf16", "fp8", bucket="fp8")
    assert bucket == 2 * fp8 + 3 * (fp8 + scales) + 8 * rest
    assert traffic.floor_ms(bucket, 4.3) == pytest.approx(10.3939, abs=1e-4)

    assert traffic.payload_bytes(dense, "fp8") == fp8 + scales + 2 * rest
    from_fp8 = traffic.update_traffic(dense, "fp8", "fp8", bucket=None)
    assert from_fp8 == 2 * (fp8 + scales) + 4 * rest == 18_874_798_080
    stock = traffic.update_traffic(dense, "bf16", "bf16", bucket="bf16")
    assert traffic.floor_ms(stock, 4.3) == pytest.approx(15.2386, abs=1e-4)

    moe = list(models.parameters(models.MODELS["qwen3-30b-a3b"]))
    mapped = traffic.update_traffic(moe, "bf16", "fp8", bucket=None)
    assert traffic.floor_ms(mapped, 4.3) == pytest.approx(21.4509, abs=1e-4)


def test_what_is_counted_as_fp8_is_what_the_reference_makes() -> None:
    named = weights.fp8_named(TINY_MOE, "cpu")
    assert stock_push.sum_bytes(named) == traffic.payload_bytes(models.parameters(TINY_MOE), "fp8")
    ragged = models.Parameter("w", (3, 129, 300), fp8=True)
    codes, scales = quantize_weight(torch.ones(ragged.shape, dtype=torch.bfloat16))
    assert codes.nbytes + scales.nbytes == traffic.payload_bytes([ragged], "fp8")


@TINY
def test_hf_names_share_the_module_s_memory(shape: models.Shape) -> None:
    module = weights.bf16_module(shape, "cpu")
    named = dict(weights.hf_named(module))
    assert sum(t.numel() for t in named.values()) == sum(p.numel() for p in module.parameters())
    last = f"model.layers.1.mlp.{'experts.3.' if shape.experts else ''}up_proj.weight"
    before = {name: tensor.clone() for name, tensor in named.items()}
    weights.renew(module.parameters())
    assert all(not torch.equal(before[name], tensor) for name, tensor in named.items())
    if shape.experts:
        fused = module.get_parameter("model.layers.1.mlp.experts.gate_up_proj")
        assert torch.equal(named[last], fused[3, shape.intermediate :])
    assert named[last].float().std().item() == pytest.approx(weights.STD, rel=0.1)


@TINY
def test_codes_and_scales_belong_together_and_are_renewed(shape: models.Shape) -> None:
    torch.manual_seed(0)
    named = dict(weights.fp8_named(shape, "cpu"))
    codes = {name: t for name, t in named.items() if t.dtype == FP8_DTYPE}
    expected = 2 * (4 + 3 * (shape.experts or 1))
    assert len(codes) == expected
    torch.manual_seed(0)  # the parameters are drawn in the same order
    original = dict(weights.hf_named(weights.bf16_module(shape, "cpu")))
    assert original.keys() == {name for name in named if not name.endswith("_scale_inv")}
    for name, tensor in codes.items():
        scales = named[f"{name}_scale_inv"]
        want_codes, want_scales = quantize_weight(original[name])
        assert torch.equal(tensor.view(torch.uint8), want_codes.view(torch.uint8))
        assert torch.equal(scales, want_scales)
    before = {name: dequantize_weight(t, named[f"{name}_scale_inv"]) for name, t in codes.items()}
    addresses = {name: t.data_ptr() for name, t in named.items()}
    weights.renew(named.values())
    assert addresses == {name: t.data_ptr() for name, t in named.items()}
    for name, tensor in codes.items():
        after = dequantize_weight(tensor, named[f"{name}_scale_inv"])
        assert after.isfinite().all() and after.abs().max() < 0.2
        changed = after != before[name]
        assert changed[before[name] != 0].all()


def test_a_checkpoint_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file

    monkeypatch.setattr(weights, "SHARD_BYTES", 1 << 20)
    named = weights.hf_named(weights.bf16_module(TINY_MOE, "cpu"))
    weights.save(named, tmp_path)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    read = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert len(read) == len(named)
    assert all(torch.equal(read[name], tensor) for name, tensor in named)


def test_buckets_keep_the_order_and_close_when_full() -> None:
    named = [(str(n), torch.zeros(4, dtype=torch.uint8)) for n in range(7)]
    planned = list(stock_push.buckets(named, 8))
    assert [[name for name, _ in bucket] for bucket, _ in planned] == [
        ["0", "1"],
        ["2", "3"],
        ["4", "5"],
        ["6"],
    ]
    assert [last for _, last in planned] == [False, False, False, True]
    assert [last for _, last in stock_push.buckets(named, 4)] == [False] * 6 + [True]


@pytest.mark.filterwarnings("ignore")
def test_stock_arms_speak_sglang_s_own_format() -> None:
    pytest.importorskip("sglang")
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    known = set(signature(ServerArgs).parameters)
    for case in cases.CASES:
        assert (arms.COMMON | case.engine).keys() <= known

    class Engine:
        def __init__(self) -> None:
            self.got: dict[str, torch.Tensor] = {}
            self.flushes: list[bool] = []

        def update_weights_from_tensor(
            self, payloads: list[str], load_format: str, flush_cache: bool
        ) -> tuple[bool, str]:
            assert load_format == "flattened_bucket"
            content = MultiprocessingSerializer.deserialize(payloads[0])
            bucket = FlattenedTensorBucket(
                flattened_tensor=content["flattened_tensor"], metadata=content["metadata"]
            )
            self.got |= dict(bucket.reconstruct_tensors())
            self.flushes.append(flush_cache)
            return not self.flushes[-1] or len(self.flushes) < 4, "full"

    engine = Engine()
    module = weights.bf16_module(TINY_MOE, "cpu")
    named = weights.hf_named(module)
    case = replace(cases.find("stock-bf16", "buckets of 2 GiB"), bucket_bytes=2 << 20)
    send = arms.stock_update(engine, named, case)
    send(0)
    assert engine.got.keys() == dict(named).keys()
    assert all(torch.equal(engine.got[name], tensor) for name, tensor in named)
    assert engine.flushes == [False] * (len(engine.flushes) - 1) + [True]
    with pytest.raises(RuntimeError, match="refused update 1: full"):
        send(1)


class LoadingEngine:
    """Stands for ``sglang.Engine``: keeps what it is sent, and generates from a part of it."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.weights: dict[str, torch.Tensor] = {}
        self.version: int | None = None
        folder = Path(arguments["model_path"])
        assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
        assert bool(list(folder.glob("*.safetensors"))) is ("flash_rl" in arguments.values())

    def update_weights_from_tensor(self, payloads: list[str], **_: Any) -> tuple[bool, str]:
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        bucket = FlattenedTensorBucket(**MultiprocessingSerializer.deserialize(payloads[0]))
        self.take(dict(bucket.reconstruct_tensors()))
        return True, ""

    def take(self, named: dict[str, torch.Tensor]) -> None:
        self.weights |= {name: tensor.clone() for name, tensor in named.items()}

    def generate(self, **payload: Any) -> list[dict[str, Any]]:
        norm = self.weights["model.norm.weight"].tolist()
        logprobs = [(value, token, None) for value, token in zip(norm, arms.PROMPT, strict=False)]
        meta: dict[str, Any] = {"input_token_logprobs": logprobs}
        if self.version is not None:
            meta["policy_version"] = [self.version] * payload["sampling_params"]["max_new_tokens"]
        return [{"meta_info": meta}]

    def shutdown(self) -> None:
        pass


def take_update(given: Any, engine: LoadingEngine, version: int) -> Any:
    """Stands for ``trainer_bridge.update``."""
    named = given if isinstance(given, list) else weights.hf_named(given)
    engine.take(dict(named))
    engine.version = version
    seconds, payload = {"write": 0.001, "total": 0.001}, stock_push.sum_bytes(named)
    mapped = payload
    if "bucket" in os.environ["TEST_CASE"]:
        mapped, payload = 0, traffic.payload_bytes(models.parameters(TINY_MOE), "fp8")
    return SimpleNamespace(
        bytes=payload, mapped_bytes=mapped, gpu_seconds=0.001, seconds=seconds, version=version
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: f"{case.arm}, {case.name}")
def test_a_whole_arm(case: cases.Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sglang = pytest.importorskip("sglang")
    import trainer_bridge

    expandable: list[bool] = []
    without_gpu(monkeypatch)
    monkeypatch.setattr(measuring, "copy_tb_s", lambda: 4.0)
    monkeypatch.setattr(measuring, "free_bytes", lambda: 100 << 30)
    monkeypatch.setattr(sglang, "Engine", LoadingEngine)
    monkeypatch.setattr(trainer_bridge, "update", take_update)
    monkeypatch.setattr(arms, "use_expandable_segments", lambda: expandable.append(True))
    monkeypatch.setitem(models.MODELS, "tiny", TINY_MOE)
    monkeypatch.setenv("TEST_CASE", case.name)
    report = arms.run(
        {
            "arm": case.arm,
            "case": case.name,
            "model": "tiny",
            "layers": 2,
            "updates": 3,
            "folder": str(tmp_path),
        }
    )
    assert report["logprob_changed"] is True
    assert report["policy_version"] == (None if case.stock else arms.WARM_UP + 3 + arms.WATCHED - 1)
    assert bool(expandable) is (case.mapped is False)
    made = result_rows.rows_of([{"arm": case.arm, "case": case.name, "model": "tiny"} | report])
    metrics = {row["metric"]: row for row in made}
    assert metrics["update_wall_ms"]["n"] == 3 and metrics["update_wall_ms"]["layers"] == 2
    assert ("update_gpu_ms" in metrics) is not case.stock
    assert ("quantize_tb_s" in metrics) is (case.mapped is True)
    json.dumps(report)


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an arm asks of CUDA answers at once, and weights are on the CPU."""
    monkeypatch.setattr(arms, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # slow where SGLang is loaded


class FakeRun:
    """An engine of a few lines: it generates logprobs from the weights that it was given last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free: int = 100 << 30
        without_gpu(monkeypatch)
        monkeypatch.setattr(measuring, "free_bytes", lambda: self.free)
        self.weight = torch.zeros(1)
        self.held = torch.zeros(1)
        self.version = -1
        self.sent: list[float] = []
        self.mapped = 0

    def renew(self) -> None:
        self.weight.normal_()

    def update(self, version: int) -> Any:
        self.held, self.version = self.weight.clone(), version
        self.sent.append(self.weight.item())
        self.free = min(self.free, 98 << 30)  # the bucket is kept
        seconds = {"begin": 0.001, "write": 0.002, "total": 0.004}
        mapped = self.mapped if version > 1 else 0
        return SimpleNamespace(
            bytes=traffic.payload_bytes(models.parameters(TINY_MOE), "bf16" if mapped else "fp8"),
            mapped_bytes=mapped,
            gpu_seconds=0.002,
            seconds=seconds,
        )

    def logprobs(self) -> tuple[list[float], list[int]]:
        if self.version == 0:
            self.free -= 3 << 30  # what the first generation takes for itself
        return [self.held.item()], [self.version] * 4


def measured(fake: FakeRun, case: cases.Case) -> dict[str, Any]:
    report = arms.measure(fake.update, fake.renew, fake.logprobs, updates=10)
    report |= {"copy_tb_s": 4.0, "start_s": 30.0}
    return arms.finish(report, case, list(models.parameters(TINY_MOE)))


def test_an_arm_measures_new_weights_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRun(monkeypatch)
    parameters = list(models.parameters(TINY_MOE))
    fake.mapped = traffic.payload_bytes(parameters, "bf16")
    report = measured(fake, cases.find("fp8rl", "from BF16, mapped"))
    assert len(set(fake.sent)) == len(fake.sent) == arms.WARM_UP + 10 + arms.WATCHED
    assert report["logprob_changed"] is True
    assert report["policy_version"] == len(fake.sent) - 1
    assert report["mapped_share"] == 1.0
    assert report["parameters"] == sum(p.numel for p in parameters)
    values = report["values"]
    assert len(values["update_wall_ms"]) == 10
    assert values["update_write_ms"] == [2.0] * 10 and "update_total_ms" not in values
    # the bucket that is kept, without what generation took
    assert values["peak_extra_gib"] == [2.0] * arms.WATCHED
    moved = traffic.update_traffic(parameters, "bf16", "fp8", bucket=None)
    assert values["quantize_tb_s"] == pytest.approx([moved / 0.002 / 1e12] * 10)
    assert values["quantize_copy_fraction"] == pytest.approx([moved / 0.002 / 4e12] * 10)
    assert values["update_floor_ms"] == [moved / 4e9]
    json.dumps(report)


def test_a_case_that_is_not_what_it_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = cases.find("fp8rl", "from BF16, mapped")
    with pytest.raises(RuntimeError, match="'from BF16, mapped' read 0 to 0 bytes in place"):
        measured(FakeRun(monkeypatch), mapped)
    bucket = replace(mapped, name="bucket", mapped=False)
    report = measured(FakeRun(monkeypatch), bucket)
    assert report["mapped_share"] == 0.0 and "quantize_tb_s" not in report["values"]
    tiny = list(models.parameters(TINY_MOE))
    assert report["moved_bytes"] == traffic.update_traffic(tiny, "bf16", "fp8", bucket="fp8")
    fake = FakeRun(monkeypatch)
    fake.mapped = 1
    with pytest.raises(RuntimeError, match="read 1 to 1 bytes"):
        measured(fake, bucket)
    with pytest.raises(RuntimeError, match=r"an update carried \d+ bytes, the model has"):
        measured(FakeRun(monkeypatch), replace(bucket, target="bf16"))


def test_an_engine_that_kept_the_old_weights_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRun(monkeypatch)
    monkeypatch.setattr(fake, "logprobs", lambda: ([-1.0], None))
    bucket = cases.find("fp8rl", "from BF16, bucket")
    assert measured(fake, bucket)["logprob_changed"] is False
    monkeypatch.setattr(fake, "logprobs", lambda: ([float("nan")], None))
    with pytest.raises(RuntimeError, match="not finite"):
        measured(fake, bucket)
    monkeypatch.setattr(fake, "logprobs", lambda: ([-1.0], [3, 3]))
    with pytest.raises(RuntimeError, match=r"version \[3, 3\], not with 14"):
        measured(fake, bucket)


def test_least_free_memory_is_seen_between_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [100]
    monkeypatch.setattr(measuring, "free_bytes", lambda: free[0])
    with measuring.LeastFree() as least:
        free[0] = 40
        deadline = time.monotonic() + 10
        while least.bytes == 100 and time.monotonic() < deadline:
            time.sleep(measuring.POLL_S)
        free[0] = 90
    assert least.bytes == 40
