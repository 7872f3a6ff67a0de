"""The two tables of GEMMs that ship, from one set of times."""

from pathlib import Path

import pytest

from benchmarks.kernels import gemm_tables
from sgl_fp8rl.engine.gemm.candidates import FLASHINFER, STOCK
from sgl_fp8rl.engine.gemm.table import FILES, SHIPPED
from sgl_fp8rl.engine.gemm.tune_cache import Machine
from sgl_fp8rl.engine.tuning.tune import Measurement, rows_of
from sgl_fp8rl.tools.tune import BUCKETS

SHAPE = (4096, 4096)
US = {STOCK: 10.0, FLASHINFER: 8.0, "deep_gemm_split_n": 9.0}
CONFIGS = {"deep_gemm_split_n": {"splits": 2}}


def times() -> list[Measurement]:
    return [
        Measurement(m, kernel, CONFIGS.get(kernel, {}), us, 0.0)
        for m in rows_of(BUCKETS)
        for kernel, us in US.items()
    ]


def test_a_start_without_flashinfer_has_a_table_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, _: cls.of("NVIDIA H200", 132)))
    gemm_tables.save({SHAPE: times()}, tmp_path)
    taken = {
        path.stem: {entry.kernel for entry in FILES.read(path)[1][SHAPE]}
        for path in tmp_path.iterdir()
    }
    assert taken == {"nvidia-h200": {"deep_gemm_split_n"}, "nvidia-h200-flashinfer": {FLASHINFER}}


def test_a_kernel_that_runs_nowhere_is_not_left_out(tmp_path: Path) -> None:
    broken = Measurement(1, FLASHINFER, {}, None, None, "it does not build")
    whole = [x for x in times() if x.kernel != FLASHINFER]
    with pytest.raises(RuntimeError, match=FLASHINFER):
        gemm_tables.save({SHAPE: [*whole, broken]}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_tables_that_ship_have_the_benchmarked_models() -> None:
    paths = list(SHIPPED.glob("*.json"))
    assert {path.stem for path in paths} == {"nvidia-h200", "nvidia-h200-flashinfer"}
    for path in paths:
        assert sorted(FILES.read(path)[1]) == gemm_tables.shapes()
