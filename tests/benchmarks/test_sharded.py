"""The benchmark of sharded trainers without GPUs: two ranks over gloo, an engine of a few lines."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch._C._distributed_c10d import _get_work_registry_size

from benchmarks import measuring, sharded, update
from benchmarks.engines import models, weights
from benchmarks.sharded_stock import gathered_buckets, parameters
from tests.benchmarks.loading_engine import LoadingEngine
from tests.trainer_bridge import ranks

SHAPE = models.Shape(256, 128, 2, 2, 1, experts=4, experts_per_token=2, vocab=511)
RANKS, UPDATES = 2, 2
COLLECTIVE_TIMEOUT_S = 30.0


class WholeModel(LoadingEngine):
    """Answers if it has every tensor of the checkpoint, whole."""

    def generate(self, **payload: Any) -> list[dict[str, Any]]:
        wanted = weights.hf_named(weights.bf16_module(SHAPE, "meta"))
        assert {n: t.shape for n, t in self.held[0].items()} == {n: t.shape for n, t in wanted}
        return super().generate(**payload)


def take_update(module: Any, engine: Any, version: int) -> Any:
    """Stands for ``trainer_bridge.update``; every rank calls it."""
    whole = [(name, parameter.full_tensor()) for name, parameter in parameters(module)]
    if engine is not None:
        named = [
            (name, cut(tensor))
            for parameter, tensor in whole
            for name, cut in weights.split(module, parameter, tensor)
        ]
        engine.held = [dict(named)] * RANKS
        engine.version = version
    seconds = {"write": 0.001, "total": 0.001}
    return SimpleNamespace(bytes=8, mapped_bytes=8, gpu_seconds=0.001, seconds=seconds)


def train(rank: int, folder: str, case: sharded.Case) -> None:
    import trainer_bridge

    torch.set_num_threads(1)
    sharded.DEVICE, sharded.BACKEND = "cpu", "gloo"
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda: None
    torch.cuda.empty_cache = lambda: None
    torch.cuda.current_device = lambda: 0
    measuring.free_bytes = lambda device=None: 100 << 30
    trainer_bridge.update = take_update
    engines = [WholeModel(RANKS)] if rank == 0 else None
    found = sharded.train(rank, RANKS, f"file://{folder}/store", case, SHAPE, UPDATES, engines)
    torch.save(found, f"{folder}/{rank}")


def measured(case: sharded.Case, folder: Path) -> list[Any]:
    """What the first of two ranks found."""
    ranks.forkserver()  # says what it imports, before torch starts it
    mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
        train, (str(folder), case), nprocs=RANKS, start_method="forkserver"
    )
    found: list[Any] = torch.load(folder / "0", weights_only=True)
    return found


def test_stock_is_sent_every_whole_tensor_on_each_rank(tmp_path: Path) -> None:
    pytest.importorskip("sglang")
    case = sharded.Case("stock-bf16", "tiny", buckets=(1 << 20, 1 << 30))
    found = measured(case, tmp_path)
    assert [each["case"] for each in found] == ["buckets of 0.000976562 GiB", "buckets of 1 GiB"]
    for each in found:
        assert {metric: len(values) for metric, values in each["values"].items()} == {
            "update_wall_ms": UPDATES,
            "trainer_gpus": 1,
            "peak_extra_gib": 3,
        }


def gather(rank: int, folder: Path) -> None:
    """A rank that sends nothing of what it gathers."""
    sharded.DEVICE = "cpu"
    for _ in gathered_buckets(sharded.sharded(SHAPE, torch.bfloat16, RANKS), 1 << 20):
        pass
    (folder / str(rank)).write_text(str(_get_work_registry_size()))


def test_torch_keeps_nothing_of_what_a_rank_gathered_and_did_not_send(tmp_path: Path) -> None:
    ranks.run(gather, tmp_path, RANKS, COLLECTIVE_TIMEOUT_S)
    assert [(tmp_path / str(rank)).read_text() for rank in range(RANKS)] == ["0"] * RANKS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ours_is_given_the_shards(tmp_path: Path, dtype: torch.dtype) -> None:
    (found,) = measured(sharded.Case("fp8rl", "tiny", dtype=dtype), tmp_path)
    assert found["case"] == f"from {str(dtype).removeprefix('torch.')} shards"
    assert found["values"]["update_write_ms"] == [1.0] * UPDATES
    assert found["values"]["update_gpu_ms"] == [1.0] * UPDATES


@pytest.mark.parametrize(
    ("place", "gpus"), [(sharded.SAME, [0]), (sharded.OTHERS, [2]), (sharded.EACH, [0, 1])]
)
def test_engines_are_placed(place: str, gpus: list[int]) -> None:
    found = sharded.Case("stock-bf16", "tiny", place, buckets=(1,)).engines(2, SHAPE)
    assert [each["base_gpu_id"] for each in found] == gpus
    ranks = 1 if place == sharded.EACH else 2
    assert {each.get("tp_size", 1) for each in found} == {ranks}


def test_engines_that_differ_are_not_measured() -> None:
    engines = [LoadingEngine(), LoadingEngine()]
    for engine, norm in zip(engines, (1.0, 2.0), strict=True):
        engine.held = [{"model.norm.weight": torch.full((256,), norm)}]
    assert sharded.logprobs(engines[:1])[0] == [1.0] * 255
    with pytest.raises(RuntimeError, match="do not serve the same"):
        sharded.logprobs(engines)


@pytest.mark.parametrize(
    ("place", "mapped", "seconds", "error"),
    [
        (sharded.SAME, 4, {}, "4 bytes were gathered"),
        (sharded.SAME, 8, {"quantize": 0.002}, "codes travelled"),
        (sharded.EACH, 8, {}, "codes travelled"),
        (sharded.EACH, 8, {"quantize": 0.002}, None),
    ],
)
def test_the_name_of_a_case_says_what_travels(
    place: str, mapped: int, seconds: dict[str, float], error: str | None
) -> None:
    result = SimpleNamespace(bytes=8, mapped_bytes=mapped, gpu_seconds=0.001, seconds=seconds)
    found = update.Measured([1.0], [result], [0.0])
    case = sharded.Case("fp8rl", "tiny", place)
    if error is None:
        assert sharded.values_of(found, case, [[0.0]] * 2)["update_quantize_ms"] == [2.0]
        return
    with pytest.raises(RuntimeError, match=error):
        sharded.values_of(found, case, [[0.0]] * 2)
