"""Tables on disk: what is written is read, and what is not ours is told of and left alone."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sgl_fp8rl.engine.gemm import table, tune_cache
from sgl_fp8rl.engine.gemm.candidates import FLASHINFER, STOCK
from sgl_fp8rl.engine.gemm.table import FILES, Entry, Table
from sgl_fp8rl.engine.gemm.tune_cache import Machine
from sgl_fp8rl.tools.tune import BUCKETS

MACHINE = Machine("NVIDIA H200", 132, {"torch": "2.11.0", "triton": "3.6.0"})
TABLE: Table = {
    (24576, 4096): [
        Entry(64, STOCK, {}, 37.0, 37.0),
        Entry(128, "deep_gemm_split_n", {"splits": 2}, 43.0, 93.0),
    ],
    (4096, 4096): [Entry(256, "flashinfer_sm90", {}, 9.0, 12.0)],
}


def write(path: Path, change: Any) -> None:
    """A valid file, and one thing of it changed."""
    FILES.save(path, MACHINE, TABLE)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "table.json"
    FILES.save(path, MACHINE, TABLE)
    assert FILES.read(path) == (MACHINE, TABLE)
    assert FILES.own(MACHINE, str(tmp_path)) == {}
    FILES.save(FILES.path(MACHINE, str(tmp_path)), MACHINE, TABLE)
    assert FILES.own(MACHINE, str(tmp_path)) == TABLE


def test_others_may_read_what_one_has_measured(tmp_path: Path) -> None:
    (usual := tmp_path / "usual").touch()
    FILES.save(path := tmp_path / "table.json", MACHINE, TABLE)
    assert path.stat().st_mode == usual.stat().st_mode


def test_a_name_for_each_machine() -> None:
    machines = [
        MACHINE,
        replace(MACHINE, gpu="NVIDIA H100 80GB HBM3"),
        replace(MACHINE, sms=114),
        replace(MACHINE, versions={**MACHINE.versions, "triton": "3.7.0"}),
    ]
    names = [FILES.path(machine, "~/cache").name for machine in machines]
    assert len(set(names)) == len(machines)
    assert names[0].startswith("gemm-nvidia-h200-132-")
    assert FILES.path(MACHINE, "~/cache").parent == Path("~/cache").expanduser()


def test_this_machine_names_what_compiles() -> None:
    machine = Machine.of("a GPU", 1)
    assert set(machine.versions) == set(tune_cache.PACKAGES)
    assert machine.versions["torch"]


def entries_of(content: Any) -> Any:
    return content["shapes"]["24576x4096"]


CORRUPTIONS = {
    "another format": lambda c: c.update(format=tune_cache.FORMAT + 1),
    "another GPU": lambda c: c.update(gpu="NVIDIA H100"),
    "other versions": lambda c: c["versions"].update(torch="2.12.0"),
    "no format": lambda c: c.pop("format"),
    "no shapes": lambda c: c.pop("shapes"),
    "a shape that is none": lambda c: c["shapes"].update({"24576": []}),
    "an unknown kernel": lambda c: entries_of(c)[0].update(kernel="cutlass"),
    "a config of another kernel": lambda c: entries_of(c)[1].update(kernel="triton"),
    "a config of an older version": lambda c: entries_of(c)[1].update(config={"parts": 2}),
    "a field too many": lambda c: entries_of(c)[0].update(rows=1),
    "batch sizes that do not ascend": lambda c: entries_of(c).reverse(),
    "batch sizes that are text": lambda c: entries_of(c)[0].update(m="64"),
    "shapes that are a list": lambda c: c.update(shapes=[1]),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_a_table_that_is_not_ours_is_ignored(
    corruption: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = FILES.path(MACHINE, str(tmp_path))
    write(path, lambda _: None)
    assert FILES.own(MACHINE, str(tmp_path)) == TABLE
    write(path, CORRUPTIONS[corruption])
    assert FILES.own(MACHINE, str(tmp_path)) == {}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.getMessage()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00\xff"])
def test_a_file_that_is_no_table_is_ignored(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = FILES.path(MACHINE, str(tmp_path))
    path.write_bytes(text.encode("latin-1"))
    assert FILES.own(MACHINE, str(tmp_path)) == {}
    assert len(caplog.records) == 1


def test_a_folder_in_the_place_of_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FILES.path(MACHINE, str(tmp_path)).mkdir()
    assert FILES.own(MACHINE, str(tmp_path)) == {}
    assert len(caplog.records) == 1


@pytest.mark.parametrize("error", [OSError("no space left on device"), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_the_old_table(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    FILES.save(path, MACHINE, TABLE)

    def cut(path: Path, text: str) -> None:
        path.write_bytes(text[:1].encode())
        raise error

    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(Path, "write_text", cut)
        FILES.save(path, MACHINE, {})
    assert FILES.read(path) == (MACHINE, TABLE)
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]


def test_shipped_tables_are_for_a_gpu(tmp_path: Path) -> None:
    """Other versions are said, another GPU or number of SMs is not taken."""
    FILES.save(tmp_path / "nvidia-h200.json", MACHINE, TABLE)
    assert table.shipped(MACHINE, False, tmp_path) == (TABLE, True)
    newer = replace(MACHINE, versions={"torch": "2.12.0"})
    assert table.shipped(newer, False, tmp_path) == (TABLE, False)
    assert table.shipped(replace(MACHINE, sms=114), False, tmp_path) == ({}, True)
    assert table.shipped(replace(MACHINE, gpu="NVIDIA H100"), False, tmp_path) == ({}, True)


def test_a_shipped_table_that_is_broken_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "nvidia-h200.json", lambda content: content.pop("shapes"))
    assert table.shipped(MACHINE, False, tmp_path) == ({}, True)
    assert len(caplog.records) == 1


def test_no_home_folder_is_no_reason_to_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless(_path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    assert FILES.own(MACHINE, "~/.cache") == {}
    assert "set FP8RL_TUNE_CACHE" in caplog.text
    with pytest.raises(OSError, match="set FP8RL_TUNE_CACHE"):
        FILES.path(MACHINE, "~/.cache")


def test_the_tables_of_the_package_are_whole(tmp_path: Path) -> None:
    """One which no start must build anything for, one with FlashInfer's kernel, each as written."""
    files = {path.stem: FILES.read(path) for path in table.SHIPPED.glob("*.json")}
    assert set(files) == {"nvidia-h200", "nvidia-h200-flashinfer"}
    shapes = set()
    for name, (machine, found) in files.items():
        assert machine.slug == "nvidia-h200"
        FILES.save(tmp_path / name, machine, found)
        assert (tmp_path / name).read_text() == (table.SHIPPED / f"{name}.json").read_text()
        shapes.add(frozenset(found))
        kernels = {entry.kernel for entries in found.values() for entry in entries}
        assert (FLASHINFER in kernels) is name.endswith("-flashinfer")
        for entries in found.values():
            assert entries[-1].m == BUCKETS[-1]
            assert all(0 < entry.us <= entry.stock_us for entry in entries)
    assert len(shapes) == 1
