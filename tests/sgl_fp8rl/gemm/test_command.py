"""``sgl-fp8rl tune``: what it measures, keeps and prints."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)
import torch

from sgl_fp8rl import compat
from sgl_fp8rl.gemm import command
from sgl_fp8rl.gemm.candidates import STOCK
from sgl_fp8rl.gemm.kept import Machine
from sgl_fp8rl.gemm.table import FILES, Entry
from sgl_fp8rl.gemm.tune import Attempt
from tests.sgl_fp8rl.gemm import fakes
from tests.sgl_fp8rl.gemm.fakes import Bench, stock_and

RENDERED = """\
     N x K  M up to    us  DeepGEMM us  ratio  floor us  kernel
512 x 1024       64  20.0         40.0   2.00       1.3  deep_gemm_split_n parts=2
512 x 1024      128  50.0         50.0   1.00       1.6  deep_gemm"""


def test_the_table_that_is_printed() -> None:
    entries = [
        Entry(64, "deep_gemm_split_n", {"parts": 2}, 20.0, 40.0),
        Entry(128, STOCK, {}, 50.0, 50.0),
    ]
    assert command.render({(512, 1024): entries}, bytes_per_us=500_000.0) == RENDERED


def test_a_shape_that_was_not_measured_is_printed() -> None:
    assert "1.00" in command.render({(512, 1024): [Entry(64, STOCK, {}, 0.0, 0.0)]}, 1.0)


def test_shapes_are_tuned_kept_and_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    us = stock_and(flashinfer_sm90=50.0, triton=1.0, deep_gemm_split_n=2.0)
    bench = Bench(us, triton=fakes.clipping, deep_gemm_split_n=fakes.raising)
    machine = Machine.of("NVIDIA H200", 132)
    old = {(128, 128): [Entry(64, STOCK, {}, 1.0, 1.0)]}
    FILES.save(FILES.path(machine, str(tmp_path)), machine, old)

    def plan(_shape: Any, rows: Any) -> list[Attempt]:
        assert max(rows) == 16384
        return [Attempt(m, kind, {}) for m in (8, 16) for kind in bench.candidates.values()]

    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    stock = SimpleNamespace(_DO_COMPILE_ALL=True)
    monkeypatch.setattr(compat, "deep_gemm_warmup", stock, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    monkeypatch.setattr(command, "BUCKETS", (8, 16, 16384))
    monkeypatch.setattr(command, "plan", plan)
    monkeypatch.setattr(command, "Operands", lambda n, k, *_: bench.operands(n, k))
    monkeypatch.setattr(command, "copy_bytes_per_us", lambda: 1e6)
    command.run([(256, 128)], str(tmp_path))
    kept = FILES.own(machine, str(tmp_path))
    assert kept.keys() == {(256, 128), (128, 128)}
    assert [(x.m, x.kernel) for x in kept[256, 128]] == [
        (8, "flashinfer_sm90"),
        (16, "flashinfer_sm90"),
        (16384, STOCK),
    ]
    out, err = capsys.readouterr()
    assert "256 x 128       16  50.0        100.0   2.00" in out
    assert (
        "passed over 2 times: deep_gemm_split_n: RuntimeError: no kernel image is available" in out
    )
    assert "passed over" in out and "triton: its error" in out
    assert str(FILES.path(machine, str(tmp_path))) in out
    assert "8/8" in err
