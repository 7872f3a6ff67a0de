"""The update benchmark without a GPU: how an arm measures, and what it refuses."""

import gc
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
from tests.benchmarks.loading_engine import LoadingEngine

TINY_MOE = models.Shape(256, 128, 2, 2, 1, experts=4, experts_per_token=2, vocab=512)
PARAMETERS = list(models.parameters(TINY_MOE))


def find(name: str) -> update.Case:
    (case,) = [case for case in update.CASES if case.name == name]
    return case


MAPPED, BUCKET = find("from BF16, mapped"), find("from BF16, bucket")


def test_buckets_keep_the_order_and_close_when_full() -> None:
    named = [(str(n), torch.zeros(4, dtype=torch.uint8)) for n in range(7)]
    for size, wanted in ((8, ["01", "23", "45", "6"]), (4, list("0123456"))):
        planned = list(stock_push.buckets(named, size))
        assert ["".join(name for name, _ in bucket) for bucket, _ in planned] == wanted
        assert [last for _, last in planned] == [False] * (len(wanted) - 1) + [True]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an arm asks of CUDA answers at once, and weights are on the CPU."""
    monkeypatch.setattr(update, "DEVICE", "cpu")
    monkeypatch.setattr(measuring, "copy_tb_s", lambda: 4.0)
    monkeypatch.setattr(measuring, "free_bytes", lambda *_: 100 << 30)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # slow where SGLang is loaded


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("case", update.CASES, ids=lambda case: f"{case.arm}, {case.name}")
def test_a_whole_arm(case: update.Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sglang = pytest.importorskip("sglang")
    engines: list[LoadingEngine] = []
    expandable: list[bool] = []
    streamed: set[int] = set()

    def start(**keywords: Any) -> LoadingEngine:
        engines.append(LoadingEngine())
        return engines[0]

    def take(given: Any, engine: LoadingEngine, version: int, announce: Any = None) -> Any:
        """Stands for ``trainer_bridge.update``."""
        assert (announce is not None) is isinstance(given, Iterator) is case.streamed
        named = weights.hf_named(given) if isinstance(given, torch.nn.Module) else list(given)
        engine.held, engine.version = [{name: t.clone() for name, t in named}], version
        if case.streamed:  # copies of the weights, as gathered tensors are
            assert [(n, t.dtype, t.shape) for n, t in named] == announce
            streamed.update(t.data_ptr() for _, t in named)
        mapped = case.mapped is not False
        payload = traffic.payload_bytes(PARAMETERS, case.source if mapped else "fp8")
        seconds = {"write": 0.001, "total": 0.001}
        return SimpleNamespace(
            bytes=payload, mapped_bytes=payload * mapped, gpu_seconds=0.001, seconds=seconds
        )

    monkeypatch.setattr(sglang, "Engine", start)
    monkeypatch.setattr("trainer_bridge.update", take)
    monkeypatch.setattr(update, "use_expandable_segments", lambda: expandable.append(True))
    monkeypatch.setitem(models.MODELS, "tiny", TINY_MOE)
    case = replace(case, model="tiny", bucket_bytes=case.bucket_bytes and 1 << 19)
    trained: list[torch.Tensor] = []
    renew = weights.renew
    monkeypatch.setattr(weights, "renew", lambda t: (trained.extend(t), renew(t)))
    run = Run(tmp_path, tmp_path / "log", {"layers": None, "updates": 3})
    (measurement,) = update.measure(case, run)
    assert bool(expandable) is (case.mapped is False and not case.streamed)
    assert not streamed & {t.data_ptr() for t in trained}
    place = [measurement[key] for key in ("arm", "model", "case")]
    assert place == [case.arm, "tiny", case.name]
    assert len(measurement["values"]["update_wall_ms"]) == 3
    assert ("update_gpu_ms" in measurement["values"]) is not case.stock
    assert ("quantize_copy_fraction" in measurement["values"]) is (case.mapped is True)
    flushes = engines[0].flushes  # one at the end of each update of several buckets
    assert bool(flushes) is case.stock and len(flushes) % (sum(flushes) or 1) == 0
    assert not case.stock or (flushes[-1] and len(flushes) > sum(flushes))
    sent = stock_push.sum_bytes(list(engines[0].held[0].items()))
    assert sent == traffic.payload_bytes(PARAMETERS, case.source)


def test_a_refusal_of_stock_is_told() -> None:
    engine = LoadingEngine()
    with pytest.raises(RuntimeError, match="refused update 1: full"), stock_push.session(engine):
        engine.refuses = "full"
        stock_push.send_payloads(engine, [], True, "update 1")
    engine.begin_weight_update = lambda: (False, "busy")
    with pytest.raises(RuntimeError, match="refused to begin an update: busy"):
        stock_push.session(engine).__enter__()


class FakeRun:
    """An engine of a few lines: it generates logprobs from the weights that it was given last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free: int = 100 << 30
        monkeypatch.setattr(measuring, "free_bytes", lambda *_: self.free)
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
        mapped = self.mapped if version > 1 else 0
        return SimpleNamespace(
            bytes=traffic.payload_bytes(PARAMETERS, "bf16" if mapped else "fp8"),
            mapped_bytes=mapped,
            gpu_seconds=0.002,
            seconds={"begin": 0.001, "write": 0.002, "total": 0.004},
        )

    def logprobs(self) -> tuple[list[float], list[int] | None]:
        if self.version == 0:
            self.free -= 3 << 30  # what the first generation takes for itself
        return [self.held.item()], [self.version] * 4


def measured(fake: FakeRun, case: update.Case) -> dict[str, list[float]]:
    found = update.timed_updates(fake.update, fake.renew, fake.logprobs, updates=10)
    return update.values_of(found, case, PARAMETERS, 4.0)


@pytest.mark.usefixtures("no_gpu")
def test_an_arm_measures_new_weights_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRun(monkeypatch)
    fake.mapped = traffic.payload_bytes(PARAMETERS, "bf16")
    values = measured(fake, MAPPED)
    assert len(set(fake.sent)) == len(fake.sent) == update.WARM_UP + 10 + update.WATCHED
    assert len(values["update_wall_ms"]) == 10
    assert values["update_write_ms"] == [2.0] * 10 and "update_total_ms" not in values
    # the bucket that is kept, without what generation took
    assert values["peak_extra_gib"] == [2.0] * update.WATCHED
    moved = traffic.update_traffic(PARAMETERS, "bf16", "fp8", bucket=None)
    assert values["quantize_copy_fraction"] == pytest.approx([moved / 0.002 / 4e12] * 10)
    assert values["update_floor_ms"] == [moved / 4e9]


@pytest.mark.usefixtures("no_gpu")
def test_a_case_that_is_not_what_it_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="'from BF16, mapped' read 0 to 0 bytes in place"):
        measured(FakeRun(monkeypatch), MAPPED)
    values = measured(FakeRun(monkeypatch), BUCKET)
    moved = traffic.update_traffic(PARAMETERS, "bf16", "fp8", bucket="fp8")
    assert "quantize_copy_fraction" not in values and values["update_floor_ms"] == [moved / 4e9]
    fake = FakeRun(monkeypatch)
    fake.mapped = 1
    with pytest.raises(RuntimeError, match="read 1 to 1 bytes"):
        measured(fake, BUCKET)
    with pytest.raises(RuntimeError, match=r"an update carried \d+ bytes, the model has"):
        measured(FakeRun(monkeypatch), replace(BUCKET, target="bf16"))


LAST = update.WARM_UP + 10 + update.WATCHED - 1


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("logprobs", "versions", "error"),
    [
        (-1.0, None, "the updates changed no logprob"),
        (float("nan"), None, "not finite"),
        (None, [3, 3], rf"version \[3, 3\], not with {LAST}"),
    ],
)
def test_an_engine_that_serves_something_else_is_seen(
    logprobs: float | None, versions: Any, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRun(monkeypatch)

    def answer() -> Any:
        return [fake.held.item() if logprobs is None else logprobs], versions

    monkeypatch.setattr(fake, "logprobs", answer)
    with pytest.raises(RuntimeError, match=error):
        measured(fake, BUCKET)


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
