"""The doctor: its checks must fail where something is wrong."""

import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

import trainer_bridge
from sgl_fp8rl import doctor, selftest
from sgl_fp8rl.doctor import Check
from sgl_fp8rl.formats import block_fp8
from sgl_fp8rl.ops import reference
from tests import oracle

OK = Check("a", "ok", "well")
WARN = Check("longer name", "warn", "hm")
FAIL = Check("b", "fail", "broken", "Traceback")


def only(checks: Iterator[Check]) -> Check:
    (check,) = checks
    return check


def run_with(monkeypatch: pytest.MonkeyPatch, *checks: Check) -> None:
    monkeypatch.setattr(doctor, "PROBES", {"planted": lambda: iter(checks)})


def test_exit_code_tells_of_failures_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with(monkeypatch, OK, WARN)
    assert doctor.run() == 0
    run_with(monkeypatch, OK, FAIL, WARN)
    assert doctor.run() == 1
    assert "1 ok, 1 fail, 1 warn" in capsys.readouterr().out


def test_table() -> None:
    first, second, _, counts = doctor.render([OK, WARN]).splitlines()
    assert first.split() == [OK.status, OK.name, OK.message]
    assert second.split(maxsplit=1) == [WARN.status, f"{WARN.name}  {WARN.message}"]
    assert "1 ok" in counts and "1 warn" in counts


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_with(monkeypatch, FAIL)
    assert doctor.run(as_json=True) == 1
    assert json.loads(capsys.readouterr().out) == {
        "checks": [{"name": "b", "status": "fail", "message": "broken", "detail": "Traceback"}]
    }


def test_a_check_that_raises_is_a_failure_and_the_others_still_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> Iterator[Check]:
        yield OK
        raise OSError("no such thing")

    monkeypatch.setattr(doctor, "PROBES", {"broken": broken, "fine": lambda: iter([WARN])})
    first, failure, last = doctor.run_checks()
    assert (first, last) == (OK, WARN)
    assert (failure.name, failure.status) == ("broken", "fail")
    assert "OSError" in failure.message and "no such thing" in failure.message
    assert "Traceback" in failure.detail


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"sgl-fp8rl": "0.1.0", "torch": "2.11.0", "sglang": "0.5.17"}
    monkeypatch.setattr(doctor, "_version", installed.get)

    def status() -> dict[str, str]:
        return {check.name: check.status for check in doctor.check_versions()}

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
    monkeypatch.setattr(doctor, "_version", {"torch": "2.11.0", "sglang": version}.get)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    (check,) = (check for check in doctor.check_versions() if check.name == "sglang")
    assert check.status == status
    if status == "warn":
        assert "on a GPU" in check.message and "0.5.17" in check.message


def test_without_sglang_the_engine_checks_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", {"torch": "2.11.0"}.get)
    needing = {name: doctor.PROBES[name] for name in doctor.NEED_SGLANG}
    monkeypatch.setattr(doctor, "PROBES", needing)
    assert [(check.name, check.status) for check in doctor.run_checks()] == [
        (name, "skip") for name in doctor.NEED_SGLANG
    ]


@pytest.fixture
def sglang_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", types.ModuleType("sglang"))
    monkeypatch.setattr(doctor, "_version", lambda package: "0.5.17")


@pytest.mark.usefixtures("sglang_stub")
def test_missing_symbol_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor.compat, "check_symbols", lambda: [("sglang.a", True), ("sglang.b", False)]
    )
    monkeypatch.setattr(doctor.compat, "check_attributes", lambda: [("sglang.C.d", False)])
    check = only(doctor.check_sglang_symbols())
    assert check.status == "fail"
    assert all(name in check.message for name in ("sglang.b", "sglang.C.d"))
    assert "sglang.a" not in check.message


@pytest.mark.usefixtures("sglang_stub")
@pytest.mark.parametrize(("unknown", "status"), [([], "ok"), (["swap_weights"], "warn")])
def test_an_update_that_is_not_refused_is_named(
    monkeypatch: pytest.MonkeyPatch, unknown: list[str], status: str
) -> None:
    monkeypatch.setattr(doctor.compat, "unknown_updates", lambda: unknown)
    check = only(doctor.check_sglang_updates())
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
            _Point("fp8rl_cpu", "sgl_fp8rl.engine.cpu_platform:activate", "sglang.srt.platforms")
        ],
        "verl.plugins": [],
    }
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: points[group])
    monkeypatch.setenv("SGLANG_PLUGINS", plugins)
    plugin, platform, _ = doctor.check_entry_points()
    if expected == "ok":
        assert (plugin.status, platform.status) == ("ok", "ok")
    else:
        assert plugin.status == "fail"
        assert expected in plugin.message


@pytest.mark.usefixtures("sglang_stub")
@pytest.mark.parametrize(
    ("target", "plugins", "expected"),
    [
        ("sgl_fp8rl.integrations.verl.plugin", None, "ok"),
        ("sgl_fp8rl.integrations.verl.plugin", "auto", "ok"),
        ("sgl_fp8rl.integrations.verl.plugin", "other,fp8rl", "ok"),
        ("sgl_fp8rl.integrations.verl.plugin", "none", "VERL_USE_EXTERNAL_PLUGINS=none"),
        ("broken", None, "reinstall"),
    ],
)
def test_entry_point_of_verl(
    monkeypatch: pytest.MonkeyPatch, target: str, plugins: str | None, expected: str
) -> None:
    """It is found, and not loaded: that would import verl."""
    point = _Point("fp8rl", target, "verl.plugins")
    monkeypatch.setattr(doctor, "ENTRY_POINTS", {n: doctor.ENTRY_POINTS[n] for n in [point.group]})
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [point])
    monkeypatch.setattr(_Point, "load", None)
    monkeypatch.delenv("VERL_USE_EXTERNAL_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", plugins)
    check = only(doctor.check_entry_points())
    assert check.status == ("ok" if expected == "ok" else "fail")
    assert expected == "ok" or expected in check.message
    monkeypatch.setattr(doctor, "_version", {"sglang": "0.5.17"}.get)
    assert list(doctor.check_entry_points()) == []


@pytest.mark.usefixtures("sglang_stub")
def test_entry_point_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "ENTRY_POINTS", {"sglang.srt.plugins": ("fp8rl", "broken:register")}
    )
    point = _Point("fp8rl", "broken:register", "sglang.srt.plugins")
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [point])
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    check = only(doctor.check_entry_points())
    assert check.status == "fail"
    assert "broken on purpose" in check.message


@pytest.mark.parametrize(
    ("fmt", "capability", "expected"),
    [
        ("block-fp8", (8, 0), "fail"),
        ("block-fp8", (8, 9), "warn"),
        ("block-fp8", (9, 0), "ok"),
        ("block-fp8", (10, 0), "warn"),
        ("channel-fp8", (8, 0), "fail"),
        ("channel-fp8", (9, 0), "ok"),
        ("int8", (7, 5), "fail"),
        ("int8", (8, 0), "warn"),
        ("int8", (9, 0), "ok"),
        ("int8", (10, 0), "fail"),
    ],
)
def test_gpus(
    monkeypatch: pytest.MonkeyPatch, fmt: str, capability: tuple[int, int], expected: str
) -> None:
    monkeypatch.setenv("FP8RL_FORMAT", fmt)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Card {index}")
    checks = list(doctor.check_device())
    assert [check.status for check in checks] == [expected] * 2
    assert checks[1].message.startswith(f"Card 1, SM {capability[0]}.{capability[1]}")


@pytest.mark.usefixtures("sglang_stub")
@pytest.mark.parametrize(
    ("is_active", "activates", "expected"),
    [(True, True, "ok"), (False, False, "warn"), (False, True, "fail")],
)
def test_cpu_platform(
    monkeypatch: pytest.MonkeyPatch, is_active: bool, activates: bool, expected: str
) -> None:
    platform = types.ModuleType("sgl_fp8rl.engine.cpu_platform")
    vars(platform).update(
        is_active=lambda: is_active, activate=lambda: "some.Platform" if activates else None
    )
    monkeypatch.setitem(sys.modules, "sgl_fp8rl.engine.cpu_platform", platform)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert only(doctor.check_device()).status == expected


def test_our_packages_are_ours() -> None:
    assert [check.status for check in doctor.check_shadowing()] == ["ok", "ok"]


def test_a_foreign_package_of_our_name_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    foreign = types.ModuleType("server_args")
    foreign.__file__ = str(tmp_path / "server_args.py")
    monkeypatch.setitem(sys.modules, "server_args", foreign)
    server_args, bridge = doctor.check_shadowing()
    assert (server_args.status, bridge.status) == ("fail", "ok")
    assert str(tmp_path) in server_args.message


def test_a_file_of_our_name_in_the_working_folder_warns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trainer_bridge.py").touch()
    assert [check.status for check in doctor.check_shadowing()] == ["ok", "warn"]


def test_shadowed_in_a_real_process(tmp_path: Path) -> None:
    """``python -m`` puts the working folder first, so the file really wins there."""
    (tmp_path / "server_args.py").touch()
    code = "from sgl_fp8rl import doctor\nfor c in doctor.check_shadowing(): print(c.status)"
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(trainer_bridge.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert child.stdout.split() == ["fail", "ok"]


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FP8RL_")]:
        monkeypatch.delenv(name)
    assert only(doctor.check_environment()).status == "ok"
    monkeypatch.setenv("FP8RL_BUCKET_BYTES", "1GiB")
    assert "FP8RL_BUCKET_BYTES" in only(doctor.check_environment()).message
    monkeypatch.setenv("FP8RL_BUCKET_BYTE", "1GiB")
    check = only(doctor.check_environment())
    assert check.status == "warn"
    assert re.search(r"FP8RL_BUCKET_BYTE\b", check.message)
    monkeypatch.setenv("FP8RL_BUCKET_BYTES", "much")
    with pytest.raises(ValueError, match="FP8RL_BUCKET_BYTES"):
        list(doctor.check_environment())


def test_numerics_pass_and_need_rounding() -> None:
    checks = list(doctor.check_numerics())
    assert [check.name for check in checks[:2]] == ["block FP8 on cpu", "update on cpu"]
    assert {check.status for check in checks} == {"ok"}
    # Control: the known weight is no fixed point, so a quantizer that does nothing would fail.
    unrounded = selftest.count_wrong(selftest.known_weight())
    assert unrounded > selftest.known_weight().size // 4


def test_known_weight_is_exact_in_bf16() -> None:
    weight = torch.from_numpy(selftest.known_weight())
    assert torch.equal(weight.to(torch.bfloat16).double(), weight)


def test_nearest_e4m3_against_the_table_of_all_codes() -> None:
    middles = (oracle.E4M3[:126] + oracle.E4M3[1:127]) / 2
    values = np.concatenate([oracle.E4M3[:127], middles, np.nextafter(middles, 1e9), [1e6]])
    values = np.concatenate([values, np.nextafter(middles, -1e9)])
    values = np.concatenate([values, -values])
    expected = oracle.E4M3[oracle.encode(values)]
    assert np.array_equal(selftest.nearest_e4m3(values), expected)


@pytest.mark.parametrize("fault", ["scale", "code", "nan", "zero block"])
def test_numerics_fail_on_a_wrong_quantizer(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def quantize(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes_NK, scale_inv_nk = original(weight_NK)
        if fault == "scale":
            scale_inv_nk[0, 1] = torch.nextafter(scale_inv_nk[0, 1], torch.tensor(1.0))
        elif fault == "code":
            codes_NK.view(torch.uint8)[200, 3] ^= 1
        elif fault == "nan":
            scale_inv_nk[1, 0] = float("nan")
        else:
            scale_inv_nk[1, 1] = float("inf")
        return codes_NK, scale_inv_nk

    original = reference.quantize_weight
    monkeypatch.setattr(reference, "quantize_weight", quantize)
    monkeypatch.setattr(block_fp8, "quantize_weight", quantize)
    for check in doctor.check_numerics():
        if check.name == "update on cuda":
            continue  # quantized by a kernel, which has no fault
        assert check.status == "fail"
        assert "E4M3" in check.message


def test_update_fails_on_swapped_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: selftest._Stacked, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.weight.data.chunk(2)[1 - self.names.index(name)].copy_(tensor)

    monkeypatch.setattr(selftest._Stacked, "load_weights", load)
    quantized, updated = list(doctor.check_numerics())[:2]
    assert (quantized.status, updated.status) == ("ok", "fail")


def test_a_blind_comparison_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "count_wrong", lambda read_NK: 0)
    for check in doctor.check_numerics():
        assert check.status == "fail"
        assert "planted fault" in check.message


def test_a_plugin_that_refuses_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Iterator[Check]:
        sys.exit("sgl-fp8rl cannot start: reason")
        yield

    monkeypatch.setattr(doctor, "PROBES", {"quantization fp8rl": refuse})
    (check,) = doctor.run_checks()
    assert check.status == "fail" and "sgl-fp8rl cannot start: reason" in check.message


def test_this_installation_is_well(tmp_path: Path) -> None:
    """The console command itself, with the real SGLang where there is one."""
    doctor_ = [sys.executable, "-m", "sgl_fp8rl.cli", "doctor", "--json"]
    child = subprocess.run(doctor_, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    report = json.loads(child.stdout)["checks"]
    assert [check for check in report if check["status"] == "fail"] == []
    assert child.returncode == 0
    assert {"ok"} == {check["status"] for check in report if "on cpu" in check["name"]}
