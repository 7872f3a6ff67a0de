"""The benchmark of scales that are powers of two: what it says of either format is true."""

import pytest
import torch

from benchmarks import rounded_scales
from benchmarks.result_rows import rows_of
from benchmarks.tables.rounded_scales import rounded_scales as rendered
from sgl_fp8rl.formats import BLOCK_FP8, BLOCK_FP8_UE8M0, BLOCKS

MATRICES = [torch.randn(256, 384, generator=torch.Generator().manual_seed(n)) for n in range(2)]
BF16 = [weight.bfloat16() for weight in MATRICES]


def by_arm() -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    for each in rounded_scales.errors(BF16):
        found.setdefault(each["arm"], {})[each["case"]] = each["values"]["error"]
    return found


def test_errors_of_either_format() -> None:
    """E4M3 has three bits of a mantissa: 2.6% of Gaussian values, wherever the scale is."""
    found = by_arm()
    assert [*found] == [fmt.name for fmt in BLOCKS]
    for errors in found.values():
        assert [len(values) for values in errors.values()] == [2, 2, 2, 1, 1, 2, 2]
        for case, values in errors.items():
            # an outlier that is exact makes the error of its tokens small
            least = 0.001 if "tokens, with outliers" in case else 0.02
            most = 0.05 if case.startswith("product") else 0.03
            assert all(least < value < most for value in values), (case, values)
    assert found[BLOCK_FP8.name] != found[BLOCK_FP8_UE8M0.name]


def test_a_scale_that_is_lost_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    encode = BLOCK_FP8_UE8M0.encode
    monkeypatch.setattr(
        BLOCK_FP8_UE8M0,
        "encode",
        lambda w: {s: t if not s else 2 * t for s, t in encode(w).items()},
    )
    found = by_arm()[BLOCK_FP8_UE8M0.name]
    assert min(found["weights, Gaussian"]) > 0.9


def test_the_table_has_a_line_for_each_case() -> None:
    measurements = list(rounded_scales.errors(BF16))
    environment = {"device": "CPU", "date": "today", "commit": "c"}
    results = {"rows": rows_of(measurements), "failures": {}, "environment": environment}
    lines = [line for line in rendered(results).splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0].strip("| ") for line in lines][2:] == [
        case["case"] for case in measurements[: len(measurements) // 2]
    ]
