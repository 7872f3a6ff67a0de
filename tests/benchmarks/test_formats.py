"""The benchmark of weight formats, at sizes for a CPU: what it says of each format is true."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks import formats
from benchmarks.formats import ARMS, Experts, Linear, Shard
from sgl_fp8rl.formats import CHOICES
from sgl_fp8rl.formats.padding import Padding

NORMAL = {
    "bf16": (0.001, 0.003),  # healthy 0.0016
    "block-fp8": (0.02, 0.05),  # 0.037
    "block-fp8-ue8m0": (0.02, 0.05),  # 0.037
    "channel-fp8": (0.02, 0.05),  # 0.037
    "int8": (0.005, 0.02),  # 0.011
}
"""Least and most error of normal values; of another format it would be outside of these, but for
the two of FP8, whose codes are the same."""
RAGGED = Linear("m", "qkv", (Shard(192, 1, 2), Shard(64, 1, 2), Shard(64, 1, 2)), Shard(320))


def by_arm(found: Iterator[Any]) -> dict[str, float]:
    return {each["arm"]: each["values"]["error"][0] for each in found}


def test_each_format_has_its_error() -> None:
    errors = by_arm(formats.linears(RAGGED, "cpu", (32,)))
    assert tuple(errors) == ARMS
    for arm, (least, most) in NORMAL.items():
        assert least < errors[arm] < most


def test_a_lost_scale_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    bound = formats._channel_linear
    monkeypatch.setattr(
        formats, "_channel_linear", lambda codes, scales: bound(codes, scales.roll(1, 0))
    )
    errors = by_arm(formats.linears(RAGGED, "cpu", (32,)))
    assert min(errors["channel-fp8"], errors["int8"]) > NORMAL["channel-fp8"][1]


def dequantized(
    arm: str,
    layer: Experts,
    held: dict[str, torch.Tensor],
    ids_MT: torch.Tensor,
    rows_of_token: int,
    padding: Padding | None,
) -> formats.Call:
    """Stands for SGLang's Triton kernel, without quantized activations."""
    weight = held[""].float() if arm == "bf16" else CHOICES[arm].decode(held)
    padded = padding if arm in formats.BLOCK_ARMS else None

    def run(x: torch.Tensor) -> torch.Tensor:
        x = padded.cols.pad(x) if padded else x
        rows = enumerate(ids_MT.flatten().tolist())
        y = torch.stack([weight[e] @ x[row // rows_of_token].float() for row, e in rows])
        return padded.rows.cut(y) if padded else y

    return run


@pytest.mark.parametrize("size", [Shard(128), Shard(192, 1, 4)], ids=["whole", "cut"])
def test_experts(monkeypatch: pytest.MonkeyPatch, size: Shard) -> None:
    monkeypatch.setattr(formats, "_expert_gemm", dequantized)
    found = list(formats.experts(Experts("m", 4, 2, 256, size), "cpu", (8,)))
    for case in dict.fromkeys(each["case"] for each in found):
        errors = by_arm(each for each in found if each["case"] == case)
        assert errors["bf16"] < 1e-3 < errors["int8"] < errors["block-fp8"] < NORMAL["block-fp8"][1]
