"""The ignore list of ``sgl-fp8rl precision`` on a real engine, and its arithmetic beside it."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_fp8rl.formats import CHOICES
from sgl_fp8rl.tools import cli
from sgl_fp8rl.tools.precision import command, fake_quant
from sgl_fp8rl.tools.precision.groups import fp8_groups
from tests.engine import models
from tests.engine.harness import EngineProcess
from tests.engine.hf_oracle import mean_difference
from tests.engine.test_families import score
from tests.server_args.flags import parse

pytestmark = pytest.mark.engine

CLOSE = 0.5
"""Mean |logprob| difference of engine and fake-quantized model, as a part of what FP8 in the layers
of the list would change."""


@pytest.mark.parametrize("fmt", ["block-fp8", pytest.param("channel-fp8", marks=pytest.mark.full)])
def test_the_list_is_what_the_engine_leaves_in_bf16(fmt: str, tmp_path: Path) -> None:
    name = CHOICES[fmt].name
    checkpoint = models.make_checkpoint("qwen3_moe", tmp_path / "model")
    saved = tmp_path / "report.json"
    given = ["precision", str(checkpoint), "--tokens", "256", "--format", fmt]
    assert cli.main([*given, "--output", str(saved)]) == 0
    found: dict[str, Any] = json.loads(saved.read_text())
    ignored = found["ignored_layers"]
    assert ignored and len(ignored) < len(found["layers"])

    options = parse(shlex.split(found["flag"]), {})
    assert options.format == fmt
    keywords: dict[str, Any] = {
        "fp8rl_ignored_layers": options.ignored_layers,
        "fp8rl_format": options.format,
    }
    with EngineProcess(tmp_path / "log", checkpoint, **keywords) as engine:
        layers = {x["name"]: x for x in engine.control({"op": "layers"})["layers"]}
        tokens, logprobs = score(engine)
    for layer in found["layers"]:
        real = layers[layer["name"]]
        assert real["format"] == ("bf16" if layer["name"] in ignored else name)
        assert (real["reason"] or "").startswith("ignored by") == (layer["name"] in ignored)
    assert {n for n, x in layers.items() if x["format"] == name} == {
        layer["name"] for layer in found["layers"] if layer["name"] not in ignored
    }

    model = command.load(str(checkpoint), torch.device("cpu"), torch.bfloat16)
    groups = fp8_groups(model, CHOICES[fmt])
    as_listed = by_transformers(model, [g for g in groups if g.name not in ignored], tokens)
    without_list = by_transformers(model, groups, tokens)
    apart = mean_difference(logprobs, as_listed)
    wrong = mean_difference(without_list, as_listed)
    print(f"engine {apart:.4f} from the fake-quantized model; {wrong:.4f} if the list were unread")
    assert apart < CLOSE * wrong
    assert mean_difference(logprobs, without_list) > CLOSE * wrong


def by_transformers(model: Any, groups: list[Any], tokens: list[int]) -> list[float]:
    ids = torch.tensor(tokens)
    with torch.inference_mode(), fake_quant.fp8(groups):
        logprobs = model(ids[None]).logits[0].double().log_softmax(-1)
    return [float(x) for x in logprobs[:-1].gather(-1, ids[1:, None]).squeeze(-1)]
