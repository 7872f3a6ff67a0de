"""MLA in BF16 on the CPU platform, against transformers: ground to stand on before it is FP8."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine import models
from tests.engine.harness import EngineProcess
from tests.engine.hf_oracle import mean_difference, prompt_logprobs
from tests.engine.test_families import score

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

BF16_ERROR = 0.05
"""Mean |logprob - transformers' in FP32|: 0.030 measured, dense or with experts."""
FACTOR = models.FAMILIES["deepseek_v2"].config["rope_parameters"]["factor"]
YARN = (0.1 * math.log(FACTOR) + 1.0) ** 2
"""By which DeepSeek's own code scales its attention's logits where mscale_all_dim is 1
(modeling_deepseek.py of DeepSeek-V2). transformers 5.19's class does so, that of 5.12 does not."""


def scaled_by(factor: float) -> Callable[[Any], None]:
    """Scale the logits of attention, whatever this version of transformers does."""

    def prepare(model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.scaling = factor / math.sqrt(layer.self_attn.qk_head_dim)

    return prepare


def test_mla_is_that_of_transformers(tmp_path: Path) -> None:
    checkpoint = models.make_checkpoint("deepseek_v2", tmp_path / "checkpoint")
    with EngineProcess(tmp_path / "engine.log", checkpoint, quantization=None) as engine:
        tokens, served = score(engine)
    apart, control = (
        mean_difference(
            served, prompt_logprobs(checkpoint, tokens, fp8=False, prepare=scaled_by(factor))
        )
        for factor in (YARN, 1.0)
    )
    assert apart < BF16_ERROR
    assert control > 3 * BF16_ERROR  # without that factor, 0.21
