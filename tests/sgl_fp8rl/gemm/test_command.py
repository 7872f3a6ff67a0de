"""``sgl-fp8rl tune``: what it measures, keeps and prints."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)
import torch

from sgl_fp8rl.engine.gemm import expert_tiles
from sgl_fp8rl.engine.gemm.candidates import STOCK
from sgl_fp8rl.engine.gemm.expert_tiles import ExpertShape, Pair, Tiles
from sgl_fp8rl.engine.gemm.table import FILES, Entry
from sgl_fp8rl.engine.gemm.tune_cache import Machine
from sgl_fp8rl.engine.tuning import expert_tune
from sgl_fp8rl.engine.tuning.tune import Attempt
from sgl_fp8rl.tools import tune as command
from tests.sgl_fp8rl.gemm import expert_fakes, fakes
from tests.sgl_fp8rl.gemm.expert_fakes import SHAPE, config
from tests.sgl_fp8rl.gemm.fakes import Bench, stock_and

pytestmark = pytest.mark.usefixtures("publish")


def cells(table: str) -> list[list[str]]:
    return [re.split(r"  +", line.strip()) for line in table.splitlines()]


def test_the_table_that_is_printed() -> None:
    entries = [
        Entry(64, "deep_gemm_split_n", {"splits": 2}, 20.0, 40.0),
        Entry(128, STOCK, {}, 50.0, 50.0),
    ]
    assert cells(command.render({(512, 1024): entries}, bytes_per_us=500_000.0)) == [
        ["N x K", "M up to", "us", "DeepGEMM us", "ratio", "floor us", "kernel"],
        ["512 x 1024", "64", "20.0", "40.0", "2.00", "1.3", "deep_gemm_split_n splits=2"],
        ["512 x 1024", "128", "50.0", "50.0", "1.00", "1.6", STOCK],
    ]


def test_a_shape_that_was_not_measured_is_printed() -> None:
    assert "1.00" in command.render({(512, 1024): [Entry(64, STOCK, {}, 0.0, 0.0)]}, 1.0)


def test_the_table_of_experts_that_is_printed() -> None:
    pairs = [
        Pair(1, config(), config(USE_TMA=True), 20.0, 30.0),
        Pair(342, config(32), config(32)),
    ]
    header, measured, stock = cells(command.render_experts({SHAPE: pairs}, bytes_per_us=120_000.0))
    assert header[3] == "SGLang us" and header[-1] == "gate_up; down"
    assert measured[:6] == ["4 x 256 x 128, 3", "1", "20.0", "30.0", "1.50", "2.5"]
    up, down = measured[6].split("; ")
    assert up.startswith("16x64x128") and down == f"{up} USE_TMA=1"
    assert stock[:6] == ["4 x 256 x 128, 3", "342", "0.0", "0.0", "1.00", "13.9"]
    assert stock[6].startswith("32x64x128")


def test_few_tokens_read_the_experts_that_they_may_meet() -> None:
    shape = ExpertShape(128, 2048, 768, 8)
    expert, one = 3 * 768 * 2048, 2048 + 8 * (5 * 768 + 2 * 2048)
    assert command.floor_bytes(shape, 1) == pytest.approx(8 * expert + one)
    assert command.floor_bytes(shape, 4096) == pytest.approx(128 * expert + 4096 * one)


class Tuned:
    """A GPU on which tiles of 16 rows with more stages are faster, and SGLang's have 64."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.machine, self.folder = Machine.of("NVIDIA H200", 132), str(folder)
        self.full_at: int | None = None
        stock, fast = config(64), [config(num_stages=n) for n in (1, 2, 3)]
        wrong = {1: expert_fakes.raising, 3: expert_fakes.clipping}
        bench = expert_fakes.Bench(patch, self._us, wrong)
        properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
        patch.delenv("SGLANG_MOE_CONFIG_DIR", raising=False)
        patch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
        patch.setattr(expert_tiles, "stock", lambda shape, m: (stock, stock))
        patch.setattr(expert_tune, "stock", lambda shape, m: (stock, stock))
        patch.setattr(expert_tune, "candidates", lambda shape, m: fast)
        patch.setattr(expert_tune, "tokens_of", lambda shape: [1, 4, 16])
        patch.setattr(expert_tune, "compile_ahead", lambda shape, attempts: None)
        patch.setattr(command, "copy_bytes_per_us", lambda: 1e6)
        made = bench.inputs()
        patch.setattr(command, "ExpertBenchInputs", lambda *_: made)
        self._of = lambda: made._batch.m if made._batch else 0
        self.stock, self.fast = stock, fast[1]

    def _us(self, kernel: str, given: dict[str, Any]) -> float:
        if self._of() == self.full_at:
            raise torch.OutOfMemoryError("no 2 GiB are free")
        return 4.0 if kernel == "align" else 40.0 / (1 + given.get("num_stages", 0))

    def run(self) -> None:
        command.run([], [SHAPE], self.folder)

    @property
    def kept(self) -> expert_tiles.Table:
        return expert_tiles.FILES.own(self.machine, self.folder)


def test_experts_are_tuned_kept_and_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned, files = Tuned(monkeypatch, tmp_path), expert_tiles.FILES
    other = {SHAPE._replace(top_k=4): [Pair(1, tuned.stock, tuned.stock)]}
    path = files.path(tuned.machine, tuned.folder)
    files.save(path, tuned.machine, other)
    tuned.run()
    us = pytest.approx(4.0 + 2 * 40.0 / 3)
    pairs = [Pair(m, tuned.fast, tuned.fast, us, 84.0) for m in (1, 4, 16)]
    assert tuned.kept == other | {SHAPE: pairs}
    found = expert_tiles.find([SHAPE], tuned.machine, tuned.folder)
    assert found == {SHAPE: Tiles.of(pairs)}
    out, err = capsys.readouterr()
    assert ["4 x 256 x 128, 3", "16", "30.7", "84.0", "2.74"] in [row[:5] for row in cells(out)]
    assert "N x K" not in out
    for name in ("gate_up", "down"):
        for fault in ("error", "out of shared memory"):
            assert re.search(f"3 times.*{name}.*{fault}", out)
    assert str(path) in out and "30/30" in err


def test_what_is_not_measured_yet_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not as the nearest of the few that were, when the rest was cut off."""
    tuned = Tuned(monkeypatch, tmp_path)
    tuned.full_at = 16
    with pytest.raises(torch.OutOfMemoryError):
        tuned.run()
    assert [pair.up for pair in tuned.kept[SHAPE]] == [tuned.fast, tuned.fast, tuned.stock]
    tuned.full_at = None
    tuned.run()
    tuned.full_at = 4
    with pytest.raises(torch.OutOfMemoryError):
        tuned.run()
    assert [pair.up for pair in tuned.kept[SHAPE]] == [tuned.fast] * 3


def test_a_cache_that_cannot_be_written_is_told_of_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tuned = Tuned(monkeypatch, tmp_path / "file")
    (tmp_path / "file").touch()
    monkeypatch.setattr(expert_tune, "measure", None)
    with pytest.raises(OSError, match="file"):
        tuned.run()


def test_shapes_are_tuned_kept_and_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    us = stock_and(flashinfer_sm90=50.0, triton=1.0, deep_gemm_split_n=2.0)
    bench = Bench(us, triton=fakes.clipping, deep_gemm_split_n=fakes.raising)
    machine = Machine.of("NVIDIA H200", 132)
    old = {(128, 128): [Entry(64, STOCK, {}, 1.0, 1.0)]}
    FILES.save(FILES.path(machine, str(tmp_path)), machine, old)

    def list_attempts(_shape: Any, rows: Any) -> list[Attempt]:
        assert max(rows) == 16384
        return [Attempt(m, kind, {}) for m in (8, 16) for kind in bench.candidates.values()]

    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    monkeypatch.setattr(command, "BUCKETS", (8, 16, 16384))
    monkeypatch.setattr(command, "list_attempts", list_attempts)
    monkeypatch.setattr(command, "BenchInputs", lambda n, k, *_: bench.inputs(n, k))
    monkeypatch.setattr(command, "copy_bytes_per_us", lambda: 1e6)
    command.run([(256, 128)], [], str(tmp_path))
    kept = FILES.own(machine, str(tmp_path))
    assert kept.keys() == {(256, 128), (128, 128)}
    assert [(x.m, x.kernel) for x in kept[256, 128]] == [
        (8, "flashinfer_sm90"),
        (16, "flashinfer_sm90"),
        (16384, STOCK),
    ]
    out, err = capsys.readouterr()
    assert ["256 x 128", "16", "50.0", "100.0", "2.00"] in [row[:5] for row in cells(out)]
    assert "top k" not in out and "experts-" not in out
    assert re.search("2 times.*deep_gemm_split_n.*no kernel image is available", out)
    assert re.search("triton.*error", out)
    assert str(FILES.path(machine, str(tmp_path))) in out
    assert "8/8" in err
