"""``sgl-fp8rl precision`` on a GPU ranks as it does on a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from sgl_fp8rl.tools import cli
from tests.engine import models
from tests.gpu.conftest import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="torch computes here, not Triton")

ALIKE = 0.2
"""Relative difference of a KL: sums in another order let some activations take the next code, and
experts take other tokens."""
RESPONSE = [(7 * n) % models.VOCAB for n in range(200)]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_gpu_measures_what_a_cpu_does(family: str, tmp_path: Path, device: str) -> None:
    checkpoint = models.make_checkpoint(family, tmp_path / family)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": [1, 2, 3], "response": RESPONSE}))

    def report(where: str) -> dict[str, Any]:
        path = tmp_path / f"{where}.json"
        given = ["--prompts", str(prompts), "--output", str(path)]
        assert cli.main(["precision", str(checkpoint), "--device", where, *given]) == 0
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    on_gpu, on_cpu = report(device), report("cpu")
    kls = {layer["name"]: layer["kl"] for layer in on_cpu["layers"]}
    for layer in on_gpu["layers"]:
        assert layer["kl"] == pytest.approx(kls[layer["name"]], rel=ALIKE), layer["name"]
    assert on_gpu["kl_all_fp8"] == pytest.approx(on_cpu["kl_all_fp8"], rel=ALIKE)
