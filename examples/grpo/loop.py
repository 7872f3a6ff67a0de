"""GRPO on FP8 rollouts, with a weight update at every step, beside a BF16 control arm.

Every FSDP2 rank trains; rank 0 also owns the engine. Both arms begin with the same weights and run
the same engine and code; in the BF16 arm the FP8 quantization ignores every layer.

Shapes: B sequences of this rank, T tokens of the longest response, P prompts, G responses to each.
"""

import copy
import json
import math
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from trainer_bridge import (
    Rollout,
    check_alarms,
    connect,
    correct,
    group_advantages,
    policy_loss,
    response_logprobs,
    rollout,
    update,
)

from . import arithmetic, tiny_model
from .engine import KEYWORDS, running_engine
from .environment import environment

ARMS = {"fp8": "", "bf16": "re:.*"}  # which layers stay BF16
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # Python objects go by gloo
LEARNING_RATE = 5e-5  # of the tiny size
EVALUATION_PROBLEMS = 256
SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "max_new_tokens": arithmetic.MAX_NEW_TOKENS,
    "stop_token_ids": [arithmetic.END_TOKEN],
    "no_stop_trim": True,  # the end token belongs to the response
}


@dataclass(frozen=True)
class Config:
    """The options; ``python -m examples.grpo --help`` has their defaults."""

    size: str
    steps: int
    demonstrations: int
    prompts: int
    group: int
    seed: int
    out: Path
    engine_args: dict[str, Any]


def run(rank: int, world: int, init_method: str, config: Config) -> None:
    """One FSDP2 rank: train on demonstrations, then run GRPO once for each arm."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        BACKENDS[device.type], init_method=init_method, rank=rank, world_size=world
    )
    log = config.out / "grpo.jsonl"
    model = tiny_model.build_model(config.seed, config.size).to(device)
    if rank == 0:
        config.out.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        options = asdict(config) | {"out": str(config.out), "ranks": world}
        parameters = model.num_parameters()
        add_row(log, "environment", **environment(device), parameters=parameters, **options)
    tiny_model.shard(model)
    for step, loss in tiny_model.pretrain(model, config.seed, config.demonstrations):
        if rank == 0 and step % 25 == 0:
            print(f"demonstrations, step {step}: loss {loss:.3f} nats a token", flush=True)
    checkpoint = config.out / "checkpoint"
    tiny_model.save_checkpoint(model, checkpoint)
    pretrained = copy.deepcopy(model.state_dict())
    keywords = KEYWORDS[device.type] | config.engine_args
    results = {}
    for arm, ignored_layers in ARMS.items():
        model.load_state_dict(pretrained)
        with (
            running_engine(checkpoint, ignored_layers, config.seed, keywords)
            if rank == 0
            else nullcontext()
        ) as engine:
            if engine is not None:
                layers = connect(engine).control({"op": "layers"})["layers"]
                fp8 = sum(layer["format"] == "block-fp8" for layer in layers)
                add_row(log, "engine", arm=arm, matrices=len(layers), fp8_matrices=fp8)
            results[arm] = train(arm, model, engine, config, log)
    if rank == 0:
        for arm, (before, after) in results.items():
            add_row(log, "evaluation", arm=arm, before=before, after=after)
        print(f"all rows: {log}")
    dist.destroy_process_group()


def train(
    arm: str, model: PreTrainedModel, engine: Any, config: Config, log: Path
) -> tuple[float, float]:
    """GRPO for one arm; every rank calls, and all but rank 0 with None as the engine.

    Returns:
        the evaluation's reward before and after.
    """
    rate = tiny_model.learning_rate(LEARNING_RATE, model)
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.0)
    before = evaluate(engine, config, version=-1)
    for step in range(config.steps):
        started = time.perf_counter()
        updated = update(model, engine, version=step)
        batch, rewards_PG, rollout_s = sample(engine, config, step)
        metrics = learn(model, optimizer, batch, rewards_PG)
        metrics |= {
            "reward": rewards_PG.nanmean().item(),
            "update_s": updated.seconds["total"],
            "update_bytes": updated.bytes,
            "mapped_bytes": updated.mapped_bytes,
            "tokens_per_s": sum(map(len, batch.tokens)) / rollout_s,
            "step_s": time.perf_counter() - started,
        }
        if engine is not None:
            alarms = [alarm.metric for alarm in check_alarms(metrics)]
            append(log, kind="step", arm=arm, step=step, **metrics, alarms=alarms)
            print(
                f"{arm}, step {step}: reward {metrics['reward']:.2f}, "
                f"mismatch KL {metrics['mismatch_kl_k3']:.1e}, ESS {metrics['ess']:.4f}, "
                f"update {1e3 * metrics['update_s']:.1f} ms, "
                f"{metrics['tokens_per_s']:.0f} tokens/s",
                flush=True,
            )
    update(model, engine, version=config.steps)
    return before, evaluate(engine, config, version=config.steps)


def sample(engine: Any, config: Config, step: int) -> tuple[Rollout, torch.Tensor, float]:
    """A step's rollout, its rewards [P, G] (NaN of a response that failed or was cut short), and
    the seconds that sampling took; every rank calls, and rank 0's engine samples."""
    problems = arithmetic.draw_problems(config.prompts, f"{config.seed} step {step}")
    prompts, sampling = arithmetic.prompts_of(problems), {**SAMPLING, "n": config.group}
    batch, seconds = None, 0.0
    if engine is not None:
        started = time.perf_counter()
        batch = rollout(engine, prompts, sampling, expected_version=step)
        seconds = time.perf_counter() - started
    batch, seconds = broadcast((batch, seconds))
    rewards = torch.tensor(arithmetic.score(problems, batch.tokens))
    rewards = rewards.where(batch.is_complete_B, torch.nan)
    return batch, rewards.view(config.prompts, config.group), seconds


def learn(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: Rollout,
    rewards_PG: torch.Tensor,
) -> dict[str, float]:
    """One policy gradient step on the whole batch; every rank calls. Returns its metrics."""
    rows = torch.arange(len(batch)).tensor_split(dist.get_world_size())[dist.get_rank()]
    advantages_B1 = group_advantages(batch, rewards_PG.flatten())[rows].to(model.device)
    mine = batch[rows]
    logprobs_BT = response_logprobs(model, mine)
    correction = correct(mine, logprobs_BT.detach())
    policy_loss(logprobs_BT, advantages_B1, correction, reduce="tokens").backward()
    gradient_norm = tiny_model.take_step(model, optimizer)
    return {"gradient_norm": gradient_norm, **correction.metrics}


def evaluate(engine: Any, config: Config, version: int) -> float:
    """Mean reward of one sampled response to each of the evaluation problems; every rank calls."""
    problems = arithmetic.draw_problems(EVALUATION_PROBLEMS, f"{config.seed} evaluation")
    prompts, reward = arithmetic.prompts_of(problems), 0.0
    if engine is not None:
        batch = rollout(engine, prompts, SAMPLING, expected_version=version)
        scores = zip(arithmetic.score(problems, batch.tokens), batch.is_complete_B, strict=True)
        reward = fmean(score for score, is_complete in scores if is_complete)
    return float(broadcast(reward))


def broadcast(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def add_row(log: Path, kind: str, **values: Any) -> None:
    """Append a row to the log, and print it."""
    print(append(log, kind=kind, **values), flush=True)


def append(log: Path, **values: Any) -> str:
    """Append a row to the log, and return it. JSON lacks NaN and infinity: they become null."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
    row = json.dumps(finite, allow_nan=False)
    with log.open("a") as file:
        file.write(row + "\n")
    return row
