"""Checks of what this machine can run must fail where something is wrong."""

import sys
import types
from collections.abc import Iterator

import pytest
import torch

from sgl_fp8rl.formats import block_fp8
from sgl_fp8rl.ops import reference
from sgl_fp8rl.tools.doctor import device, selftest


@pytest.mark.parametrize(
    ("fmt", "capability", "expected"),
    [
        ("block-fp8", (8, 0), "fail"),
        ("block-fp8", (8, 9), "warn"),
        ("block-fp8", (9, 0), "ok"),
        ("block-fp8", (10, 0), "warn"),
        ("block-fp8-ue8m0", (8, 0), "fail"),
        ("block-fp8-ue8m0", (9, 0), "ok"),
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
    checks = list(device.check_device())
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
    platform = types.ModuleType("sgl_fp8rl.engine.cpu.cpu_platform")
    vars(platform).update(
        is_active=lambda: is_active, activate=lambda: "some.Platform" if activates else None
    )
    monkeypatch.setitem(sys.modules, "sgl_fp8rl.engine.cpu.cpu_platform", platform)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (check,) = device.check_device()
    assert check.status == expected


def test_numerics_pass_and_need_rounding() -> None:
    checks = list(device.check_numerics())
    assert [check.name for check in checks[:2]] == ["block FP8 on cpu", "update on cpu"]
    assert {check.status for check in checks} == {"ok"}
    # Control: quantization changes the known weight, so a quantizer that does nothing fails.
    unrounded = selftest.count_wrong(selftest.known_weight())
    assert unrounded > selftest.known_weight().size // 4


@pytest.mark.parametrize("fault", ["scale", "code", "nan", "zero block"])
def test_numerics_fail_on_a_wrong_quantizer(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def quantize(weight_NK: torch.Tensor, **options: bool) -> tuple[torch.Tensor, torch.Tensor]:
        codes_NK, scale_inv_nk = original(weight_NK, **options)
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
    for check in device.check_numerics():
        if check.name == "update on cuda":
            continue  # quantized by a kernel, which has no fault
        assert check.status == "fail"
        assert "E4M3" in check.message


def test_update_fails_on_swapped_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: selftest._Stacked, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.weight.data.chunk(2)[1 - self.names.index(name)].copy_(tensor)

    monkeypatch.setattr(selftest._Stacked, "load_weights", load)
    quantized, updated = list(device.check_numerics())[:2]
    assert (quantized.status, updated.status) == ("ok", "fail")


def test_a_blind_comparison_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "count_wrong", lambda read_NK: 0)
    for check in device.check_numerics():
        assert check.status == "fail"
        assert "planted fault" in check.message
