"""Checks of what is installed must fail where something is wrong."""

import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch

import trainer_bridge
from sgl_fp8rl.tools.doctor import installation, seams
from sgl_fp8rl.tools.doctor.check import Check


def only(checks: Iterator[Check]) -> Check:
    (check,) = checks
    return check


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"sgl-fp8rl": "0.1.0", "torch": "2.11.0", "sglang": "0.5.17"}
    monkeypatch.setattr(seams, "installed", installed.get)

    def status() -> dict[str, str]:
        return {check.name: check.status for check in installation.check_versions()}

    assert status() == {
        "python": "ok",
        "sgl-fp8rl": "ok",
        "torch": "ok",
        "transformers": "warn",
        "sglang": "ok",
        "flashinfer-python": "skip",
        "sglang-kernel": "skip",
    }
    installed["sglang"] = "0.5.18"
    assert status()["sglang"] == "warn"
    del installed["sglang"], installed["torch"]
    assert (status()["sglang"], status()["torch"]) == ("warn", "fail")


@pytest.mark.parametrize(
    ("has_gpu", "version", "status"),
    [
        (False, "0.5.17", "ok"),
        (False, "0.5.23", "ok"),
        (True, "0.5.17", "ok"),
        (True, "0.5.23", "warn"),
    ],
)
def test_a_version_is_judged_by_what_ran_on_this_kind_of_device(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, version: str, status: str
) -> None:
    monkeypatch.setattr(seams, "installed", {"torch": "2.11.0", "sglang": version}.get)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    (check,) = (check for check in installation.check_versions() if check.name == "sglang")
    assert check.status == status
    if status == "warn":
        assert "on a GPU" in check.message and "0.5.17" in check.message


@pytest.mark.usefixtures("sglang_stub")
def test_missing_symbol_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        installation.compat, "check_symbols", lambda: [("sglang.a", True), ("sglang.b", False)]
    )
    monkeypatch.setattr(installation.compat, "check_attributes", lambda: [("sglang.C.d", False)])
    check = only(installation.check_sglang_symbols())
    assert check.status == "fail"
    assert all(name in check.message for name in ("sglang.b", "sglang.C.d"))
    assert "sglang.a" not in check.message


@pytest.mark.usefixtures("sglang_stub")
@pytest.mark.parametrize(("unknown", "status"), [([], "ok"), (["swap_weights"], "warn")])
def test_an_update_that_is_not_refused_is_named(
    monkeypatch: pytest.MonkeyPatch, unknown: list[str], status: str
) -> None:
    monkeypatch.setattr(installation.compat, "unknown_updates", lambda: unknown)
    check = only(installation.check_sglang_updates())
    assert check.status == status
    assert all(name in check.message for name in unknown)


class _Point(metadata.EntryPoint):
    """An entry point that loads nothing."""

    def load(self) -> object:
        if "broken" in self.value:
            raise ImportError("broken on purpose")
        return None


@pytest.mark.usefixtures("sglang_stub")
@pytest.mark.parametrize(
    ("targets", "plugins", "expected"),
    [
        (["sgl_fp8rl.engine.plugin:register"], "", "ok"),
        (["sgl_fp8rl.engine.plugin:register"], "other, fp8rl,fp8rl_cpu", "ok"),
        (["sgl_fp8rl.engine.plugin:register"], "other", "SGLANG_PLUGINS=other"),
        ([], "", "nothing"),
        (["elsewhere:register"], "", "elsewhere:register"),
        (["sgl_fp8rl.engine.plugin:register"] * 2, "", "reinstall"),
    ],
)
def test_entry_points(
    monkeypatch: pytest.MonkeyPatch, targets: list[str], plugins: str, expected: str
) -> None:
    points = {
        "sglang.srt.plugins": [_Point("fp8rl", t, "sglang.srt.plugins") for t in targets],
        "sglang.srt.platforms": [
            _Point(
                "fp8rl_cpu", "sgl_fp8rl.engine.cpu.cpu_platform:activate", "sglang.srt.platforms"
            )
        ],
        "verl.plugins": [],
    }
    monkeypatch.setattr(installation.metadata, "entry_points", lambda group: points[group])
    monkeypatch.setenv("SGLANG_PLUGINS", plugins)
    plugin, platform, _ = installation.check_entry_points()
    if expected == "ok":
        assert (plugin.status, platform.status) == ("ok", "ok")
    else:
        assert plugin.status == "fail"
        assert expected in plugin.message


@pytest.mark.usefixtures("sglang_stub")
@pytest.mark.parametrize(
    ("target", "plugins", "expected"),
    [
        ("sgl_fp8rl.verl.plugin", None, "ok"),
        ("sgl_fp8rl.verl.plugin", "auto", "ok"),
        ("sgl_fp8rl.verl.plugin", "other,fp8rl", "ok"),
        ("sgl_fp8rl.verl.plugin", "none", "VERL_USE_EXTERNAL_PLUGINS=none"),
        ("broken", None, "reinstall"),
    ],
)
def test_entry_point_of_verl(
    monkeypatch: pytest.MonkeyPatch, target: str, plugins: str | None, expected: str
) -> None:
    """It is found, and not loaded: that would import verl."""
    point = _Point("fp8rl", target, "verl.plugins")
    monkeypatch.setattr(
        installation, "ENTRY_POINTS", {n: installation.ENTRY_POINTS[n] for n in [point.group]}
    )
    monkeypatch.setattr(installation.metadata, "entry_points", lambda group: [point])
    monkeypatch.setattr(_Point, "load", None)
    monkeypatch.delenv("VERL_USE_EXTERNAL_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", plugins)
    check = only(installation.check_entry_points())
    assert check.status == ("ok" if expected == "ok" else "fail")
    assert expected == "ok" or expected in check.message
    monkeypatch.setattr(seams, "installed", {"sglang": "0.5.17"}.get)
    assert list(installation.check_entry_points()) == []


@pytest.mark.usefixtures("sglang_stub")
def test_entry_point_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        installation, "ENTRY_POINTS", {"sglang.srt.plugins": ("fp8rl", "broken:register")}
    )
    point = _Point("fp8rl", "broken:register", "sglang.srt.plugins")
    monkeypatch.setattr(installation.metadata, "entry_points", lambda group: [point])
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    check = only(installation.check_entry_points())
    assert check.status == "fail"
    assert "broken on purpose" in check.message


def test_our_packages_are_ours() -> None:
    assert [check.status for check in installation.check_shadowing()] == ["ok", "ok"]


def test_a_foreign_package_of_our_name_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    foreign = types.ModuleType("server_args")
    foreign.__file__ = str(tmp_path / "server_args.py")
    monkeypatch.setitem(sys.modules, "server_args", foreign)
    server_args, bridge = installation.check_shadowing()
    assert (server_args.status, bridge.status) == ("fail", "ok")
    assert str(tmp_path) in server_args.message


def test_a_file_of_our_name_in_the_working_folder_warns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trainer_bridge.py").touch()
    assert [check.status for check in installation.check_shadowing()] == ["ok", "warn"]


def test_shadowed_in_a_real_process(tmp_path: Path) -> None:
    """``python -m`` puts the working folder first, so the file really wins there."""
    (tmp_path / "server_args.py").touch()
    code = "from sgl_fp8rl.tools.doctor.installation import check_shadowing\n"
    code += "for check in check_shadowing(): print(check.status)"
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(trainer_bridge.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == ["fail", "ok"]


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FP8RL_")]:
        monkeypatch.delenv(name)
    assert only(installation.check_environment()).status == "ok"
    monkeypatch.setenv("FP8RL_BUCKET_BYTES", "1GiB")
    assert "FP8RL_BUCKET_BYTES" in only(installation.check_environment()).message
    monkeypatch.setenv("FP8RL_BUCKET_BYTE", "1GiB")
    check = only(installation.check_environment())
    assert check.status == "warn"
    assert re.search(r"FP8RL_BUCKET_BYTE\b", check.message)
    monkeypatch.setenv("FP8RL_BUCKET_BYTES", "much")
    with pytest.raises(ValueError, match="FP8RL_BUCKET_BYTES"):
        list(installation.check_environment())
