"""Whether two processes can share memory and sockets."""

import tempfile
from pathlib import Path

import pytest

from sgl_fp8rl.protocol import place as place_module
from sgl_fp8rl.protocol.place import here, is_place, is_reachable


def test_this_process_reaches_itself() -> None:
    assert is_place(here()) and is_reachable(here())


def test_another_kernel_or_another_folder_is_remote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = here()
    assert not is_reachable({**place, "boot": "another"})
    assert not is_reachable({**place, "folder": str(tmp_path / "missing")})
    assert not is_reachable({**place, "folder": str(tmp_path)}), "another folder"
    assert not is_reachable({**place, "folder": "\0"})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert is_reachable(here()), "control: with a TMPDIR of its own"


def test_a_sandbox_that_hides_its_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_module, "BOOT", tmp_path / "missing")
    assert is_place(here()) and is_reachable(here())
    monkeypatch.undo()
    assert not is_reachable({**here(), "boot": ""}), "control: seen from outside of it"


@pytest.mark.parametrize("name", ["boot", "folder", "inode"])
@pytest.mark.parametrize("value", [None, 3, [1], ["a", "b"], {}])
def test_what_does_not_describe_a_place(name: str, value: object) -> None:
    assert not is_place({**here(), name: value})
    assert not is_place(value)
