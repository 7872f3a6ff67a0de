"""What no engine can serve is refused with its name, and what overflows all the same costs only the
requests that it meets. One server of a tied model."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import trainer_bridge
from tests.engine import models
from tests.engine.conftest import Policies
from tests.engine.harness import FORKED, Server
from trainer_bridge.engines.engine_client import EngineError

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

EMBED = "model.embed_tokens.weight"
UP = "model.layers.1.mlp.up_proj.weight"
BAD = 7
"""The token whose activations overflow."""
SCALES = torch.full((2, 2, 2), 0.05)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "sampling_seed": 3},
}

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def start(policies: Policies) -> Tensors:
    return dict(models.named_tensors(policies("qwen2")[0]))


@pytest.fixture(scope="module")
def server(policies: Policies, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("unsound") / "server.log"
    with Server(log, FORKED, policies("qwen2")[0], "--kv-cache-dtype=fp8_e4m3") as started:
        yield started


def update(server: Server, weights: Any, **more: Any) -> int:
    layout = server.control({"op": "layout"})
    more.setdefault("kv_scales", SCALES)
    return trainer_bridge.update(weights, server, version=layout["version"] + 1, **more).tensors


def state_of(server: Server) -> str:
    return str(server.control({"op": "layout"})["state"])


def overflowing(start: Tensors) -> Tensors:
    """Finite weights, with which one token's embedding becomes Inf behind the last norm, which is
    not quantized. Of other tokens that channel is 0."""
    changed = {name: tensor.clone() for name, tensor in start.items()}
    changed[EMBED][:, 0] = 0
    changed[EMBED][BAD, 0] = 100
    changed["model.norm.weight"][0] = 1e38
    for layer in range(2):
        changed[f"model.layers.{layer}.self_attn.o_proj.weight"][0] = 0
        changed[f"model.layers.{layer}.mlp.down_proj.weight"][0] = 0
    return changed


@pytest.mark.guarantee("quarantine", fault="finite weights that are too large for FP8 scales")
def test_weights_that_are_too_large_are_named(server: Server, start: Tensors) -> None:
    huge = {**start, UP: (start[UP].float() * 1e36).to(start[UP].dtype)}
    with pytest.raises(EngineError, match=rf"{UP} holds .* too large"):
        update(server, huge)
    assert state_of(server) == "quarantined"
    update(server, start)
    assert state_of(server) == "serving"


@pytest.mark.guarantee("rollouts", fault="activations of one request that overflow")
@pytest.mark.parametrize("way", SAMPLINGS)
def test_a_request_whose_logits_are_not_finite_fails_alone(
    server: Server, start: Tensors, way: str
) -> None:
    update(server, overflowing(start))
    prompts = [[1, 2, 3], [4, 5, BAD], [BAD, 5, 6, 8], [9] * 40]
    # whoever draws that token needs no logits behind it
    sampling = {**SAMPLINGS[way], "max_new_tokens": 6, "stop_token_ids": [BAD]}
    sampled = trainer_bridge.rollout(server, prompts, {**sampling, "n": 3})
    assert {*sampled.errors} == {3, 4, 5}
    assert all("not finite" in str(error) for error in sampled.errors.values())
    assert {error.status for error in sampled.errors.values()} == {500}
    lengths = [len(tokens) for tokens in sampled.tokens]
    assert lengths[3:6] == [0] * 3 and min(lengths[:3] + lengths[6:]) > 0
    # in a decode step: the first token that is drawn is that one
    forced = {**SAMPLINGS[way], "max_new_tokens": 6, "logit_bias": {str(BAD): 1e9}}
    with pytest.raises(EngineError, match="not finite"):
        server.generate({"input_ids": [1, 2, 3], "sampling_params": forced})
    update(server, start)
    sampled = trainer_bridge.rollout(server, prompts, {"max_new_tokens": 6, "ignore_eos": True})
    assert not sampled.errors
