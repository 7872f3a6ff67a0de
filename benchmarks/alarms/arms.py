"""What is measured for the alarms: rollouts that are healthy, and rollouts with one fault each.

Shapes: B sequences, L prompt tokens, T response tokens.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from benchmarks.alarms import fault_injection
from benchmarks.alarms import tasks as alarm_tasks
from benchmarks.alarms.tasks import Policy
from trainer_bridge.correction import Correction, correct_logprobs

Engine = Callable[[Policy], PreTrainedModel]
CALIBRATION_PROMPTS = 64


def _fp8(age: int = 0) -> Engine:
    """FP8 with the weights of so many steps ago."""
    return lambda policy: fault_injection.fp8_engine(policy.at(age))


def _spoilt(spoil: Callable[[torch.Tensor], torch.Tensor]) -> Engine:
    return lambda policy: fault_injection.spoil_scales(
        fault_injection.fp8_engine(policy.at(0)), spoil
    )


def _fp8_kv(outliers: bool, calibrated: bool) -> Engine:
    def engine(policy: Policy) -> PreTrainedModel:
        model = fault_injection.plant_outliers(policy.at(0)) if outliers else policy.at(0)
        rng = random.Random(f"{policy.task.name} calibration")
        prompts_BL = policy.task.prompts(rng, CALIBRATION_PROMPTS) if calibrated else None
        return fault_injection.with_fp8_kv(fault_injection.fp8_engine(model), prompts_BL)

    return engine


def _missed(tensor: str, weights: Callable[[Policy], alarm_tasks.State]) -> Engine:
    """FP8 with the newest weights, but for one tensor, which an update left out."""

    def engine(policy: Policy) -> PreTrainedModel:
        model = policy.at(0)
        model.get_parameter(tensor).data.copy_(weights(policy)[tensor])
        return fault_injection.fp8_engine(model)

    return engine


def _shuffled(scale_inv_nk: torch.Tensor) -> torch.Tensor:
    order = torch.randperm(scale_inv_nk.numel(), generator=torch.Generator().manual_seed(1))
    return scale_inv_nk.flatten()[order].view_as(scale_inv_nk)


def _one_block(scale_inv_nk: torch.Tensor) -> torch.Tensor:
    spoilt_nk = scale_inv_nk.clone()
    spoilt_nk[0, 0] *= 16
    return spoilt_nk


DOWN = "model.layers.1.mlp.down_proj.weight"


@dataclass(frozen=True)
class Arm:
    """One way to roll out."""

    name: str
    engine: Engine = field(default_factory=_fp8)
    temperature: float = 1.0
    """Of sampling."""
    top_p: float = 1.0
    reported: str = "processed_BT"
    """Which logprobs of ``Sampled`` arrive at the trainer."""
    trainer_temperature: float | None = None
    """What the trainer divides its logits by; None: what was sampled with."""
    shift: int = 0
    """By how many tokens the reported logprobs are out of place."""
    stale_quarter: int = 0
    """Age of the weights of one engine in four, whose tokens say so."""


HEALTHY = (
    Arm("BF16", lambda policy: fault_injection.bf16_engine(policy.at(0))),
    Arm("FP8"),
    Arm("FP8, temperature 0.7", temperature=0.7),
    Arm("FP8 + FP8 KV", _fp8_kv(outliers=False, calibrated=True)),
    Arm("FP8 + FP8 KV at scale 1", _fp8_kv(outliers=False, calibrated=False)),
    Arm("FP8 + FP8 KV, K beyond 448", _fp8_kv(outliers=True, calibrated=True)),
    Arm("FP8, 1 step old", _fp8(1)),
)
UNJUDGED = (  # drawn from no distribution, so that its mean ratio need not be 1
    Arm("FP8, greedy", temperature=0.0, trainer_temperature=1.0),
)
FAULTY = (
    Arm("5 steps old", _fp8(5)),
    Arm("20 steps old", _fp8(20)),
    Arm("1 of 4 engines 20 steps old", stale_quarter=20),
    Arm("one tensor 20 steps old", _missed(DOWN, lambda policy: policy.history[0])),
    Arm("one tensor never loaded", _missed(DOWN, lambda p: alarm_tasks.build(p.task).state_dict())),
    Arm("one matrix's scales shuffled", _spoilt(_shuffled)),
    Arm("one block's scale x16", _spoilt(_one_block)),
    Arm("one matrix's scales doubled", _spoilt(lambda scale_nk: 2 * scale_nk)),
    Arm("one matrix's scales lost (1.0)", _spoilt(torch.ones_like)),
    Arm("FP8 KV at scale 1, K beyond 448", _fp8_kv(outliers=True, calibrated=False)),
    Arm("raw logprobs, temperature 0.7", temperature=0.7, reported="raw_BT"),
    Arm("raw logprobs, temperature 0.9", temperature=0.9, reported="raw_BT"),
    Arm("trainer without temperature 0.7", temperature=0.7, trainer_temperature=1.0),
    Arm("top-p 0.95, logprobs of it", top_p=0.95, reported="renormalised_BT"),
    Arm("top-p 0.95, logprobs without it", top_p=0.95),
    Arm("logprobs one token late", shift=1),
)
STATES = {"healthy": HEALTHY, "not judged": UNJUDGED, "faulty": FAULTY}
ARMS = {arm.name: arm for arms in STATES.values() for arm in arms}


def roll_out(
    policy: Policy,
    arm: Arm,
    prompts_BL: torch.Tensor,
    generator: torch.Generator,
) -> Correction:
    """Sample as the arm does, and correct."""
    parts = [(arm.engine(policy), prompts_BL, 0)]
    if arm.stale_quarter:
        quarter = len(prompts_BL) // 4
        parts = [
            (arm.engine(policy), prompts_BL[quarter:], 0),
            (_fp8(arm.stale_quarter)(policy), prompts_BL[:quarter], arm.stale_quarter),
        ]
    trainer, trainer_temperature = policy.at(0), arm.trainer_temperature or arm.temperature
    columns = []
    for engine, mine_BL, age in parts:
        sampled = fault_injection.sample(
            engine,
            mine_BL,
            policy.task.length,
            generator,
            temperature=arm.temperature,
            top_p=arm.top_p,
            end=policy.task.end,
        )
        trainer_BT = fault_injection.trainer_logprobs(
            trainer, mine_BL, sampled.tokens_BT, trainer_temperature
        )
        rollout_BT = getattr(sampled, arm.reported).roll(arm.shift, 1)
        versions_BT = torch.full_like(sampled.tokens_BT, alarm_tasks.RL_STEPS - age)
        columns.append((trainer_BT, rollout_BT, sampled.mask_BT, versions_BT))
    trainer_BT, rollout_BT, mask_BT, versions_BT = map(torch.cat, zip(*columns, strict=True))
    return correct_logprobs(
        trainer_BT, rollout_BT, mask_BT, "decoupled_token_is", versions_BT=versions_BT
    )
