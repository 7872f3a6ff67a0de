"""The update benchmark without a GPU: how an arm measures, and what it refuses."""

import gc
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import measuring, update
from benchmarks.benchmark import Run
from benchmarks.engines import models, stock_push, traffic, weights

TINY_MOE = models.Shape(256, 128, 2, 2, 1, experts=4, experts_per_token=2, vocab=512)


def find(name: str) -> update.Case:
    (case,) = [case for case in update.CASES if case.name == name]
    return case


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
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    class Engine:
        def __init__(self) -> None:
            self.got: dict[str, torch.Tensor] = {}
            self.flushes: list[bool] = []
            self.sessions: list[str] = []

        def begin_weight_update(self) -> tuple[bool, str]:
            self.sessions.append("begun")
            return len(self.sessions) < 4, "busy"

        def end_weight_update(self) -> tuple[bool, str]:
            self.sessions.append("ended")
            return True, ""

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
    case = replace(find("buckets of 2 GiB"), bucket_bytes=2 << 20)
    send = update.stock_update(engine, named, case)
    send(0)
    assert engine.got.keys() == dict(named).keys()
    assert all(torch.equal(engine.got[name], tensor) for name, tensor in named)
    assert engine.flushes == [False] * (len(engine.flushes) - 1) + [True]
    assert engine.sessions == ["begun", "ended"]
    with pytest.raises(RuntimeError, match="refused update 1: full"):
        send(1)
    with pytest.raises(RuntimeError, match="refused to begin an update: busy"):
        send(2)


class LoadingEngine:
    """Stands for ``sglang.Engine``: keeps what it is sent, and generates from a part of it."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.weights: dict[str, torch.Tensor] = {}
        self.version: int | None = None
        folder = Path(arguments["model_path"])
        assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2

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
        logprobs = [(value, 0, None) for value in norm[: len(stock_push.PROBE)]]
        meta: dict[str, Any] = {"input_token_logprobs": logprobs}
        if self.version is not None:
            meta["policy_version"] = [self.version] * payload["sampling_params"]["max_new_tokens"]
        return [{"meta_info": meta}]

    def shutdown(self) -> None:
        pass


def take_update(given: Any, engine: LoadingEngine, version: int, announce: Any = None) -> Any:
    """Stands for ``trainer_bridge.update``."""
    assert (announce is not None) is isinstance(given, Iterator)
    named = weights.hf_named(given) if isinstance(given, torch.nn.Module) else list(given)
    engine.take(dict(named))
    engine.version = version
    seconds, payload = {"write": 0.001, "total": 0.001}, stock_push.sum_bytes(named)
    mapped = payload
    if any(way in os.environ["TEST_CASE"] for way in ("bucket", "streamed")):
        mapped, payload = 0, traffic.payload_bytes(models.parameters(TINY_MOE), "fp8")
    return SimpleNamespace(
        bytes=payload, mapped_bytes=mapped, gpu_seconds=0.001, seconds=seconds, version=version
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", update.CASES, ids=lambda case: f"{case.arm}, {case.name}")
def test_a_whole_arm(case: update.Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sglang = pytest.importorskip("sglang")
    import trainer_bridge

    expandable: list[bool] = []
    without_gpu(monkeypatch)
    monkeypatch.setattr(measuring, "copy_tb_s", lambda: 4.0)
    monkeypatch.setattr(measuring, "free_bytes", lambda *_: 100 << 30)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(sglang, "Engine", LoadingEngine)
    monkeypatch.setattr(trainer_bridge, "update", take_update)
    monkeypatch.setattr(update, "use_expandable_segments", lambda: expandable.append(True))
    monkeypatch.setitem(models.MODELS, "tiny", TINY_MOE)
    monkeypatch.setenv("TEST_CASE", case.name)
    run = Run(tmp_path, tmp_path / "log", {"layers": None, "updates": 3})
    (measurement,) = update.measure(replace(case, model="tiny"), run)
    assert bool(expandable) is (case.mapped is False and not case.streamed)
    place = [measurement[key] for key in ("arm", "model", "case")]
    assert place == [case.arm, "tiny", case.name]
    assert len(measurement["values"]["update_wall_ms"]) == 3
    assert ("update_gpu_ms" in measurement["values"]) is not case.stock
    assert ("quantize_copy_fraction" in measurement["values"]) is (case.mapped is True)
    json.dumps(measurement)


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an arm asks of CUDA answers at once, and weights are on the CPU."""
    monkeypatch.setattr(update, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # slow where SGLang is loaded


class FakeRun:
    """An engine of a few lines: it generates logprobs from the weights that it was given last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free: int = 100 << 30
        without_gpu(monkeypatch)
        monkeypatch.setattr(measuring, "free_bytes", lambda *_: self.free)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
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


def measured(fake: FakeRun, case: update.Case) -> dict[str, list[float]]:
    found = update.timed_updates(fake.update, fake.renew, fake.logprobs, updates=10)
    return update.values_of(found, case, list(models.parameters(TINY_MOE)), 4.0)


def test_an_arm_measures_new_weights_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRun(monkeypatch)
    parameters = list(models.parameters(TINY_MOE))
    fake.mapped = traffic.payload_bytes(parameters, "bf16")
    values = measured(fake, find("from BF16, mapped"))
    assert len(set(fake.sent)) == len(fake.sent) == update.WARM_UP + 10 + update.WATCHED
    assert len(values["update_wall_ms"]) == 10
    assert values["update_write_ms"] == [2.0] * 10 and "update_total_ms" not in values
    # the bucket that is kept, without what generation took
    assert values["peak_extra_gib"] == [2.0] * update.WATCHED
    moved = traffic.update_traffic(parameters, "bf16", "fp8", bucket=None)
    assert values["quantize_copy_fraction"] == pytest.approx([moved / 0.002 / 4e12] * 10)
    assert values["update_floor_ms"] == [moved / 4e9]


def test_a_case_that_is_not_what_it_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = find("from BF16, mapped")
    with pytest.raises(RuntimeError, match="'from BF16, mapped' read 0 to 0 bytes in place"):
        measured(FakeRun(monkeypatch), mapped)
    bucket = replace(mapped, name="bucket", mapped=False)
    values = measured(FakeRun(monkeypatch), bucket)
    moved = traffic.update_traffic(models.parameters(TINY_MOE), "bf16", "fp8", bucket="fp8")
    assert "quantize_copy_fraction" not in values and values["update_floor_ms"] == [moved / 4e9]
    fake = FakeRun(monkeypatch)
    fake.mapped = 1
    with pytest.raises(RuntimeError, match="read 1 to 1 bytes"):
        measured(fake, bucket)
    with pytest.raises(RuntimeError, match=r"an update carried \d+ bytes, the model has"):
        measured(FakeRun(monkeypatch), replace(bucket, target="bf16"))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (([-1.0], None), "the updates changed no logprob"),
        (([float("nan")], None), "not finite"),
    ],
)
def test_an_engine_that_kept_the_old_weights_is_seen(
    answer: Any, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRun(monkeypatch)
    monkeypatch.setattr(fake, "logprobs", lambda: answer)
    with pytest.raises(RuntimeError, match=error):
        measured(fake, find("from BF16, bucket"))


def test_an_engine_that_names_another_version_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRun(monkeypatch)
    monkeypatch.setattr(fake, "logprobs", lambda: ([fake.held.item()], [3, 3]))
    last = update.WARM_UP + 10 + update.WATCHED - 1
    with pytest.raises(RuntimeError, match=rf"version \[3, 3\], not with {last}"):
        measured(fake, find("from BF16, bucket"))


def test_least_free_memory_is_seen_between_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [100]
    monkeypatch.setattr(measuring, "free_bytes", lambda *_: free[0])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with measuring.LeastFree() as least:
        free[0] = 40
        deadline = time.monotonic() + 10
        while least.bytes == 100 and time.monotonic() < deadline:
            time.sleep(measuring.POLL_S)
        free[0] = 90
    assert least.bytes == 40


def test_a_stream_brings_copies_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gathered tensors are: new memory each time."""
    named = [("a", torch.ones(2)), ("b", torch.zeros(3))]
    sent: list[list[tuple[str, torch.Tensor]]] = []

    def keep(stream: Any, engine: Any, *, version: int, announce: Any) -> int:
        assert iter(stream) is stream
        assert [name for name, _, _ in announce] == ["a", "b"]
        sent.append(list(stream))
        return version

    monkeypatch.setattr("trainer_bridge.update", keep)
    send = update.streamed_update("an engine", named)
    assert [send(version) for version in range(2)] == [0, 1]
    for stream in sent:
        assert [(n, t.tolist()) for n, t in stream] == [("a", [1, 1]), ("b", [0, 0, 0])]
        assert not {t.data_ptr() for _, t in stream} & {t.data_ptr() for _, t in named}
