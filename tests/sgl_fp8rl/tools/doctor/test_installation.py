"""Checks of what is installed must fail where something is wrong."""

import os
import re
import sys
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from sgl_fp8rl.tools.doctor import check as checks
from sgl_fp8rl.tools.doctor import installation
from sgl_fp8rl.tools.doctor.check import Check


def only(checks: Iterator[Check]) -> Check:
    (check,) = checks
    return check


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"sgl-fp8rl": "0.1.0", "torch": "2.11.0", "sglang": "0.5.17"}
    monkeypatch.setattr(checks, "installed", installed.get)

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


ENGINE, PLATFORM, VERL = installation.ENTRY_POINTS
OURS = {group: [target] for group, (_, target) in installation.ENTRY_POINTS.items()}
BROKEN = "broken:register"


class _Point(metadata.EntryPoint):
    """An entry point that loads nothing."""

    def load(self) -> object:
        assert self.group != VERL, "it is found, and not loaded: that would import verl"
        if self.value == BROKEN:
            raise ImportError("broken on purpose")
        return None


@pytest.mark.usefixtures("sglang_stub")
@pytest.mark.parametrize(
    ("group", "targets", "plugins", "expected"),
    [
        *((group, target, None, "ok") for group, target in OURS.items()),
        *((group, OURS[group], "other, fp8rl,fp8rl_cpu", "ok") for group in (ENGINE, PLATFORM)),
        (ENGINE, OURS[ENGINE], "", "ok"),
        (ENGINE, OURS[ENGINE], "other", "SGLANG_PLUGINS=other"),
        (ENGINE, [], None, "nothing"),
        (ENGINE, ["elsewhere:register"], None, "elsewhere:register"),
        (ENGINE, OURS[ENGINE] * 2, None, "reinstall"),
        (ENGINE, [BROKEN], None, "broken on purpose"),
        (VERL, OURS[VERL], "auto", "ok"),
        (VERL, OURS[VERL], "other,fp8rl", "ok"),
        (VERL, OURS[VERL], "none", "VERL_USE_EXTERNAL_PLUGINS=none"),
        (VERL, ["elsewhere"], None, "reinstall"),
    ],
)
def test_entry_points(
    monkeypatch: pytest.MonkeyPatch,
    group: str,
    targets: list[str],
    plugins: str | None,
    expected: str,
) -> None:
    name, target = installation.ENTRY_POINTS[group]
    wanted = BROKEN if BROKEN in targets else target
    monkeypatch.setattr(installation, "ENTRY_POINTS", {group: (name, wanted)})
    found = [_Point(name, each, group) for each in targets]
    monkeypatch.setattr(installation.metadata, "entry_points", lambda group: found)
    variable, _ = installation.PLUGINS[group.partition(".")[0]]
    monkeypatch.delenv(variable, raising=False)
    if plugins is not None:
        monkeypatch.setenv(variable, plugins)
    check = only(installation.check_entry_points())
    assert check.status == ("ok" if expected == "ok" else "fail")
    assert expected == "ok" or expected in check.message
    monkeypatch.setattr(checks, "installed", {}.get)  # neither SGLang nor verl
    assert list(installation.check_entry_points()) == []


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
    assert [check.status for check in installation.check_shadowing()] == ["ok", "ok"]
    (tmp_path / "trainer_bridge.py").touch()
    assert [check.status for check in installation.check_shadowing()] == ["ok", "warn"]


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
