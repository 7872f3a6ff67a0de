"""Experts that a real engine returns, and what replaying them does to a trainer's mismatch.

The trainer is transformers in BF16 with the same weights. It is compared with an engine in BF16,
where routers differ by rounding alone, and with one in FP8.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_bridge
from tests.engine import models
from tests.engine.harness import EngineProcess
from trainer_bridge import Rollout, record_routing, replay_routing, routing_disagreement

pytestmark = pytest.mark.engine

ARMS = {"bf16": {"fp8rl_ignored_layers": ("re:.*",)}, "fp8": {}}
PROMPTS = [
    torch.randint(models.VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (17, 24, 30, 9)
]
SAMPLING = {"n": 2, "temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True}
LAYERS, EXPERTS, TOP_K = 2, 16, 4


@dataclass(frozen=True)
class Run:
    """One engine's rollouts, and the trainer's view of them."""

    rollout: Rollout
    again: Rollout
    """The same prompts once more: all but their last tokens come from the prefix cache."""
    model: Any


@pytest.fixture(scope="module", params=ARMS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = models.make_checkpoint("qwen3_moe_16", folder / "model")
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, attn_implementation="eager"
    )
    options = ARMS[request.param] | {"enable_return_routed_experts": True}
    with EngineProcess(folder / "log", checkpoint, **options) as engine:
        first, again = (
            trainer_bridge.rollout(engine, PROMPTS, SAMPLING, routed_experts=True) for _ in range(2)
        )
    yield Run(first, again, model.eval())


def batch(rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask ``[B, S]``, padded on the right."""
    rows = [p + t for p, t in zip(rollout.prompt_tokens, rollout.tokens, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask


@torch.inference_mode()
def logprobs_BT(model: Any, rollout: Rollout) -> torch.Tensor:
    """The trainer's logprobs of the response."""
    ids_BS, mask_BS = batch(rollout)
    logprobs_BSV = model(ids_BS, attention_mask=mask_BS).logits.float().log_softmax(-1)
    found = torch.zeros(rollout.tokens_BT.shape)
    for b, (prompt, tokens) in enumerate(zip(rollout.prompt_tokens, rollout.tokens, strict=True)):
        at = torch.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1)
        found[b, : len(tokens)] = logprobs_BSV[b, at, torch.tensor(tokens)]
    return found


def kl(rollout: Rollout, trainer_BT: torch.Tensor) -> float:
    metrics = trainer_bridge.mismatch_metrics(trainer_BT, rollout.logprobs_BT, rollout.mask_BT)
    return metrics["mismatch_kl_k3"]


def test_experts_are_of_every_token_but_the_last(run: Run) -> None:
    for rollout in (run.rollout, run.again):
        assert rollout.routed_experts is not None
        rows = [
            len(p) + len(t) - 1 for p, t in zip(rollout.prompt_tokens, rollout.tokens, strict=True)
        ]
        assert [tuple(e.shape) for e in rollout.routed_experts] == [
            (count, LAYERS, TOP_K) for count in rows
        ]
        assert {e.dtype for e in rollout.routed_experts} == {torch.uint8}
        for layer in range(LAYERS):  # routers that choose by token, not a constant
            chosen = torch.cat([e[:, layer] for e in rollout.routed_experts])
            assert chosen.unique().numel() == EXPERTS


def test_measure(run: Run) -> None:
    model, rollout = run.model, run.rollout
    _, mask = batch(rollout)
    with record_routing(model, attention_mask=mask) as own:
        alone = kl(rollout, logprobs_BT(model, rollout))
    without = routing_disagreement(rollout.routed_experts, own.experts)
    with replay_routing(model, rollout.routed_experts, attention_mask=mask) as own:
        replayed = kl(rollout, logprobs_BT(model, rollout))
    within = routing_disagreement(rollout.routed_experts, own.experts)
    shuffled = [(e.long() + 1) % EXPERTS for e in rollout.routed_experts]
    with replay_routing(model, shuffled, attention_mask=mask):
        wrong = kl(rollout, logprobs_BT(model, rollout))
    shifted = [e.roll(1, 0) for e in rollout.routed_experts]
    with replay_routing(model, shifted, attention_mask=mask):
        off = kl(rollout, logprobs_BT(model, rollout))
    print(
        f"\nMEASURE without {without} within {within} kl {alone} replayed {replayed} shuffled {wrong} shifted {off}"
    )
