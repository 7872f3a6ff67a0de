"""The kernels of corrections where there is no GPU; ``tests/gpu/test_correction.py`` runs them."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from trainer_bridge.correction import triton_impl
from trainer_bridge.correction.triton_rows import count_rows
from trainer_bridge.correction.triton_tokens import count_tokens

COMMON = {"trainer": "*fp32", "rollout": "*bf16", "mask": "*u8", "T": "i32"}
DOUBLES = dict.fromkeys(("limits", "sums", "maxima", "states"), "*fp64")
ROWS = COMMON | DOUBLES
TOKENS = ROWS | {
    "versions": "*i64",
    "known_versions": "*i64",
    "starts": "*i32",
    "weights": "*fp32",
    "kept": "*u8",
    "old": "*fp32",
    "histogram": "*i32",
    "known": "i32",
}
OF_TOKENS = {"POSITIONS": 7, "COPIES": triton_impl.COPIES, "APPLIES": True, "KEEPS_ROLLOUT": False}
SIXTEEN = [["tt.divisibility", 16]]
"""What Triton notes of an argument: tensors begin at whole multiples of 16 bytes."""


def resources(kernel: Any, level: int, is_band: bool, block: int, warps: int, folder: Path) -> str:
    """What a kernel takes of a Hopper card, as its disassembler says."""
    given = {"LEVEL": level, "IS_BAND": is_band, "BLOCK": block}
    given |= OF_TOKENS if kernel is count_tokens else {}
    types = {argument: TOKENS.get(argument, "constexpr") for argument in kernel.arg_names}
    assert {argument for argument, kind in types.items() if kind == "constexpr"} == set(given)
    constants = {(kernel.arg_names.index(argument),): value for argument, value in given.items()}
    hints = {(i,): SIXTEEN for i, kind in enumerate(types.values()) if kind.startswith("*")}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=hints)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    path = folder / "kernel.cubin"
    path.write_bytes(made.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", path]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize("block", [32, triton_impl.BLOCK])
@pytest.mark.parametrize(("level", "is_band"), [(0, False), (1, False), (1, True), (3, False)])
@pytest.mark.parametrize(
    ("kernel", "most"),
    [(count_rows, triton_impl.ROW_WARPS), (count_tokens, triton_impl.TOKEN_WARPS)],
)
def test_they_compile_for_a_hopper_card_and_stay_in_registers(
    kernel: Any, most: int, level: int, is_band: bool, block: int, tmp_path: Path
) -> None:
    warps = triton_impl.warps_of(most, block)
    assert "STACK:0 " in resources(kernel, level, is_band, block, warps, tmp_path)


def test_control_what_does_not_fit_is_seen(tmp_path: Path) -> None:
    """All sums of a row by one warp."""
    assert "STACK:0 " not in resources(count_rows, 1, False, triton_impl.BLOCK, 1, tmp_path)
