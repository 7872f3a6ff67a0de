"""Tiles of experts: where they come from, which pair a batch takes, which files are refused."""

import importlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)
from hypothesis import example, given
from hypothesis import strategies as st

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.gemm import expert_tiles, table
from sgl_fp8rl.engine.gemm.expert_tiles import FILES, ExpertShape, Pair, Tiles
from sgl_fp8rl.engine.gemm.grouped_experts import ROWS_OF_EXPERT
from sgl_fp8rl.engine.gemm.tune_cache import Machine
from tests.sgl_fp8rl.conftest import Publish

MACHINE = Machine("NVIDIA H200", 132, {"torch": "2.11.0", "triton": "3.6.0"})
SHAPE, OTHER = ExpertShape(128, 2048, 768, 8), ExpertShape(128, 2048, 384, 8)


def config(block: int = 16, **options: Any) -> dict[str, Any]:
    sizes = {"BLOCK_SIZE_M": block, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}
    return {**sizes, "num_warps": 4, "num_stages": 3, **options}


def pair(m: int, block: int = 16, **options: Any) -> Pair:
    return Pair(m, config(block, USE_TMA=True), config(block, **options), 20.0, 30.0)


PAIRS = [pair(1), pair(64), pair(512, 64, BLOCK_SIZE_N=128)]


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch, publish: Publish) -> None:
    """One without tiles of the user's."""
    monkeypatch.delenv("SGLANG_MOE_CONFIG_DIR", raising=False)


# ---- one batch


@example([16, 64], 40)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=9, unique=True), st.integers(1, 6000))
def test_a_batch_takes_the_nearest(ms: list[int], M: int) -> None:
    """As SGLang among its own: of two as near the smaller."""
    ms.sort()
    tiles = Tiles.of([Pair(m, config(num_stages=m), config()) for m in ms])
    assert tiles.at(M)[0]["num_stages"] == min(ms, key=lambda m: abs(m - M))


def test_without_measured_tiles_it_takes_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    down = [None]

    def configs(*args: Any, **options: Any) -> Any:
        asked.append((*args, options))
        return config(32), (down[0], 64)

    monkeypatch.setattr(compat, "try_get_optimal_moe_config", configs, raising=False)
    assert expert_tiles.tiles(None, SHAPE, 5) == (config(32), config(32))  # one for both
    options = {"block_shape": [128, 128], "return_down_config": True}
    assert asked == [((128, 1536, 2048), (128, 2048, 768), 8, "fp8_w8a8", 5, options)]
    down[0] = config(32, BLOCK_SIZE_N=128)  # type: ignore[call-overload]
    assert expert_tiles.tiles(None, SHAPE, 5) == (config(32), down[0])
    assert expert_tiles.tiles(Tiles.of(PAIRS), SHAPE, 5) == (PAIRS[0].up, PAIRS[0].down)
    assert len(asked) == 2


def test_tiles_of_sglangs_with_two_scales_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which it has for an H100: its kernel would take the first one's for both."""
    configs = importlib.import_module(compat.try_get_optimal_moe_config.__module__)
    monkeypatch.setattr(configs, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    theirs = configs.get_moe_configs(512, 256, "fp8_w8a8", 128, 128)
    assert theirs[64]["BLOCK_SIZE_K"] == 256, "control: it is so"
    up, down = expert_tiles.stock(ExpertShape(512, 2048, 256, 10), 64)
    assert up == down == {**theirs[64], "BLOCK_SIZE_K": 128}
    assert theirs[64]["BLOCK_SIZE_K"] == 256  # its own is as it was


# ---- files


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = FILES.path(MACHINE, str(tmp_path))
    FILES.save(path, MACHINE, {SHAPE: PAIRS, OTHER: [Pair(1, config(), config())]})
    assert FILES.own(MACHINE, str(tmp_path)) == {SHAPE: PAIRS, OTHER: [Pair(1, config(), config())]}
    assert path.name.startswith("experts-nvidia-h200-132-")
    assert path != table.FILES.path(MACHINE, str(tmp_path))


def of_shape(content: Any) -> Any:
    return content["shapes"]["128x2048x768x8"]


CORRUPTIONS: dict[str, Callable[[Any], Any]] = {
    "another GPU": lambda c: c.update(gpu="NVIDIA H100"),
    "other versions": lambda c: c["versions"].update(triton="3.7.0"),
    "a table of linears": lambda c: c.update(shapes={"512x256": []}),
    "a shape without its experts of a token": lambda c: c.update(
        shapes={"128x2048x768": of_shape(c)}
    ),
    "rows that two products cannot share": lambda c: of_shape(c)[0]["down"].update(BLOCK_SIZE_M=32),
    "blocks of channels with two scales": lambda c: of_shape(c)[0]["up"].update(BLOCK_SIZE_K=256),
    "no blocks": lambda c: of_shape(c)[0]["up"].update(BLOCK_SIZE_N=0),
    "text in place of a size": lambda c: of_shape(c)[0]["up"].update(num_warps="4"),
    "an option of nobody": lambda c: of_shape(c)[0]["up"].update(BLOCK_SIZE_Q=1),
    "a size that is missing": lambda c: of_shape(c)[0]["down"].pop("BLOCK_SIZE_N"),
    "a product that is missing": lambda c: of_shape(c)[0].pop("down"),
    "tokens that do not ascend": lambda c: of_shape(c).reverse(),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_a_file_that_is_not_ours_is_told_of_once(
    corruption: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = FILES.path(MACHINE, str(tmp_path))
    FILES.save(path, MACHINE, {SHAPE: PAIRS})
    assert expert_tiles.find([SHAPE], MACHINE, str(tmp_path)) == {SHAPE: Tiles.of(PAIRS)}
    content = json.loads(path.read_text())
    CORRUPTIONS[corruption](content)
    path.write_text(json.dumps(content))
    shipped = expert_tiles.find([SHAPE], MACHINE, "no such folder")
    assert expert_tiles.find([SHAPE], MACHINE, str(tmp_path)) == shipped != {}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and str(path) in record.getMessage()


def test_the_users_own_go_before_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = [pair(1, 32)]
    monkeypatch.setattr(expert_tiles, "SHIPPED", tmp_path / "package")
    FILES.save(tmp_path / "package" / "nvidia-h200.json", MACHINE, {SHAPE: theirs, OTHER: theirs})

    def found(*shapes: ExpertShape, machine: Machine = MACHINE) -> dict[ExpertShape, Tiles]:
        return expert_tiles.find(shapes, machine, str(tmp_path))

    assert found(SHAPE) == {SHAPE: Tiles.of(theirs)}
    FILES.save(FILES.path(MACHINE, str(tmp_path)), MACHINE, {SHAPE: PAIRS})
    assert found(SHAPE, OTHER) == {SHAPE: Tiles.of(PAIRS), OTHER: Tiles.of(theirs)}
    assert found(SHAPE._replace(top_k=6)) == {}
    newer = replace(MACHINE, versions={"torch": "2.12.0"})
    assert found(SHAPE, machine=newer) == {SHAPE: Tiles.of(theirs)}  # of the GPU, not of versions
    assert found(SHAPE, machine=replace(MACHINE, gpu="NVIDIA H100")) == {}


def test_an_empty_list_is_no_tiles(tmp_path: Path) -> None:
    FILES.save(FILES.path(MACHINE, str(tmp_path)), MACHINE, {OTHER: []})
    assert expert_tiles.find([OTHER], MACHINE, str(tmp_path)) == {}


def test_not_where_the_user_chose_or_runs_are_deterministic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publish: Publish
) -> None:
    """The user's own file neither."""
    FILES.save(FILES.path(MACHINE, str(tmp_path)), MACHINE, {OTHER: PAIRS})
    shapes = [SHAPE, OTHER]
    assert set(expert_tiles.find(shapes, MACHINE, str(tmp_path))) == {SHAPE, OTHER}
    publish(enable_deterministic_inference=True)
    assert expert_tiles.find(shapes, MACHINE, str(tmp_path)) == {}
    publish(enable_deterministic_inference=False)
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", "somewhere")
    assert expert_tiles.find(shapes, MACHINE, str(tmp_path)) == {}


def test_what_the_package_has_is_whole() -> None:
    (path,) = expert_tiles.SHIPPED.glob("*.json")
    machine, found = FILES.read(path)
    assert (machine.slug, machine.sms) == (path.stem, 132)
    for shape, pairs in found.items():
        grouped = ROWS_OF_EXPERT * shape.experts // shape.top_k  # tokens from which on others run
        assert pairs[0].m == 1 and pairs[-1].m == grouped
