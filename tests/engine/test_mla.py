"""MLA in BF16 on the CPU platform, against transformers: ground to stand on before it is FP8."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import models
from tests.engine.harness import EngineProcess
from tests.engine.test_families import PROMPT, REQUEST

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

BF16_ERROR = 0.05
"""Mean |logprob - transformers' in FP32|: 0.030 measured, dense or with experts."""
FACTOR = models.FAMILIES["deepseek_v2"].config["rope_parameters"]["factor"]
YARN = (0.1 * math.log(FACTOR) + 1.0) ** 2
"""By which DeepSeek's own code scales its attention's logits where mscale_all_dim is 1
(modeling_deepseek.py of DeepSeek-V2). transformers 5.19's class does so, that of 5.12 does not."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make_checkpoint("deepseek_v2", tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[float]]:
    log = tmp_path_factory.mktemp("log") / "engine.log"
    with EngineProcess(log, checkpoint, quantization=None) as engine:
        (reply,) = engine.generate(REQUEST)
        yield [entry[0] for entry in reply["meta_info"]["input_token_logprobs"][1:]]


def by_transformers(checkpoint: Path, scale: float) -> list[float]:
    """Of attention whose logits are scaled besides, whatever this version does."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    for layer in model.model.layers:
        layer.self_attn.scaling = scale / math.sqrt(layer.self_attn.qk_head_dim)
    ids_T = torch.tensor(PROMPT)
    with torch.inference_mode():
        logprobs_TV = model(ids_T[None]).logits[0].double().log_softmax(-1)
    return [float(x) for x in logprobs_TV[:-1].gather(-1, ids_T[1:, None]).squeeze(-1)]


def difference(found: list[float], wanted: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(found, wanted, strict=True)) / len(wanted)


def test_mla_is_that_of_transformers(checkpoint: Path, served: list[float]) -> None:
    assert difference(served, by_transformers(checkpoint, YARN)) < BF16_ERROR
    # control: without that factor, 0.21
    assert difference(served, by_transformers(checkpoint, 1.0)) > 3 * BF16_ERROR
