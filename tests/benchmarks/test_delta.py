"""The benchmark of deltas, with torch in the place of the kernels, and host memory of the GPU's."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import delta as benchmark
from benchmarks import measuring, result_rows
from benchmarks.benchmark import Run
from benchmarks.engines import models
from benchmarks.tables import links
from sgl_fp8rl.ops import delta, weight_quant_triton
from sgl_fp8rl.protocol.image import Image
from tests.trainer_bridge.test_packer import FakeStatus, compile_in_torch

SMALL = models.Shape(hidden=256, intermediate=256, layers=4, heads=2, kv_heads=2, vocab=512)
FACTS = {"device": "a GPU", "date": "2026-11-26", "commit": "abc1234"}
MOE = replace(SMALL, experts=2, experts_per_token=1)


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = action()
    return 1e3 * (time.perf_counter() - started), result


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    monkeypatch.setattr(benchmark, "busy", lambda part, share: {"busy_ms": [1.0]})
    monkeypatch.setattr(measuring, "timed", timed)
    monkeypatch.setattr(measuring, "copy_tb_s", lambda: 4.0)
    monkeypatch.setattr(weight_quant_triton, "compile_descriptors", compile_in_torch)
    monkeypatch.setattr(weight_quant_triton, "Status", FakeStatus)


@pytest.mark.parametrize("shape", [SMALL, MOE], ids=["dense", "moe"])
def test_every_share_is_measured(
    shape: models.Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(models.MODELS, "small", shape)
    run = Run(tmp_path, tmp_path, tmp_path, {"layers": None, "chunk_mib": 1, "repeats": 2})
    found = benchmark.measure(benchmark.Case("small", 2), run)
    rows = result_rows.rows_of(found)
    assert [m["case"] for m in found[::2]] == ["0.2%", "0.5%", "1.3%"]
    values = {m["case"]: m["values"] for m in found if m["arm"] == "gpu"}
    assert all(len(v["changes_ms"]) == len(v["times_quantize"]) == 2 for v in values.values())
    (of_image,) = values["0.5%"]["of_image"]
    assert of_image == pytest.approx(3 * 0.005, rel=0.05)
    whole = sum(p.numel * (1 if p.fp8 else 2) for p in models.parameters(shape))
    (image_mb,) = values["0.5%"]["image_mb"]
    assert 1e6 * image_mb == pytest.approx(whole, rel=0.01), "half of the layers, twice"
    table = links.delta({"rows": rows, "failures": {}, "environment": FACTS})
    assert table.count("small, ") == 3 and "(" in table
    computed = links.delta_links({"rows": rows, "environment": FACTS})
    assert computed.count("small, ") == 5, "each link, and each share over the fastest"


@pytest.mark.parametrize("fault", ["missed", "other"])
def test_wrong_records_are_not_timed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, part = benchmark.parts_of(SMALL, 1, 1 << 20)
    part.check(0.002)
    change_to = Image.change_to

    def wrong(self: Image, chunk: int, content: torch.Tensor) -> Any:
        change = change_to(self, chunk, content)
        payload = change.payload.clone()
        if fault == "missed":
            payload[-1] ^= 1
        else:  # makes the same bytes, by one record more
            records = payload.numel() // delta.RECORD_BYTES
            pairs, values = payload[: 2 * records], payload[2 * records :]
            behind = sum(pairs[::2].tolist()) + 256 * sum(pairs[1::2].tolist())
            one = torch.tensor([1, 0], dtype=torch.uint8)
            payload = torch.cat([pairs, one, values, content[behind : behind + 1]])
        return change._replace(payload=payload)

    monkeypatch.setattr(Image, "change_to", wrong)
    with pytest.raises(RuntimeError, match="other bytes" if fault == "missed" else "of the CPU"):
        part.check(0.002)
