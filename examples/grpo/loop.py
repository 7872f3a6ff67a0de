"""GRPO with FSDP2 and an FP8 SGLang engine, an update at every step, beside a BF16 control arm.

    python examples/grpo.py                        starts its own ranks: one on a GPU, two on a CPU
    torchrun --nproc-per-node 2 examples/grpo.py   works as well; on GPUs, one rank each

The FSDP2 ranks first train a small Qwen3 on demonstrations, then train it by reinforcement, once
for each arm, from the same weights with the same seeds. Rank 0 also owns the engine, which shares
its GPU. Both arms run the same engine and the same code; in the BF16 arm every layer is ignored by
the FP8 quantization.

Shapes: B sequences of this rank, T tokens of the longest response, P prompts, G responses to each.
"""

import argparse
import copy
import os
import random
import tempfile
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from transformers import PreTrainedModel

from trainer_bridge import Rollout, connect, correct, response_logprobs, rollout, update

from . import arithmetic, placement, report, tiny_model

ARMS = {"fp8": "", "bf16": "re:.*"}  # which layers stay BF16
LEARNING_RATE = 5e-5  # of the tiny size
EVALUATION_PROBLEMS = 256
SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "max_new_tokens": arithmetic.MAX_NEW_TOKENS,
    "stop_token_ids": [arithmetic.END_TOKEN],
    "no_stop_trim": True,  # the end token belongs to the response
}


def group_advantages(rewards_PG: torch.Tensor) -> torch.Tensor:
    """(reward - mean) / std of each prompt's group, [P, G]; 0 where all rewards are equal.

    GRPO: Shao et al. 2024, arXiv:2402.03300.
    """
    centred_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    return centred_PG / (rewards_PG.std(dim=1, correction=0, keepdim=True) + 1e-6)


def policy_gradient(
    logprobs_BT: torch.Tensor, advantages_B: torch.Tensor, weights_BT: torch.Tensor
) -> torch.Tensor:
    """Loss of each token, [B, T]: -weight * advantage * logprob.

    Each rollout is used for one step, so PPO's ratio is 1 and its clip never acts; what remains is
    the importance weight of the trainer's policy over the engine's.
    """
    return -weights_BT * advantages_B[:, None] * logprobs_BT


def share_of(rank: int, world: int, batch: Rollout) -> Rollout:
    """This rank's sequences: an equal slice of every list."""
    count = len(batch.tokens) // world
    mine = slice(rank * count, (rank + 1) * count)
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    lists: dict[str, Any] = {k: v[mine] for k, v in values.items() if isinstance(v, list)}
    return replace(batch, **lists)


def score(problems: list[arithmetic.Problem], batch: Rollout) -> list[float]:
    """Reward of each sequence; those of one problem stand side by side."""
    n = len(batch.tokens) // len(problems)
    repeated = [problem for problem in problems for _ in range(n)]
    return [
        arithmetic.reward(problem, arithmetic.decode(tokens))
        for problem, tokens in zip(repeated, batch.tokens, strict=True)
    ]


def draw_problems(count: int, seed: str) -> tuple[list[arithmetic.Problem], list[list[int]]]:
    """Problems with their encoded prompts."""
    rng = random.Random(seed)
    problems = [arithmetic.make_problem(rng) for _ in range(count)]
    return problems, [arithmetic.encode(problem.prompt) for problem in problems]


def evaluate(engine: Any, seed: int, version: int) -> float:
    """Mean reward of one sampled response to each of the evaluation problems (rank 0)."""
    problems, prompts = draw_problems(EVALUATION_PROBLEMS, f"{seed} evaluation")
    batch = rollout(engine, prompts, SAMPLING, expected_version=version)
    return sum(score(problems, batch)) / len(problems)


def sample(engine: Any, args: argparse.Namespace, step: int) -> tuple[Rollout, torch.Tensor, float]:
    """This step's rollout, its rewards [P, G], and the seconds that sampling took (rank 0)."""
    problems, prompts = draw_problems(args.prompts, f"{args.seed} step {step}")
    started = time.perf_counter()
    batch = rollout(engine, prompts, {**SAMPLING, "n": args.group}, expected_version=step)
    seconds = time.perf_counter() - started
    return batch, torch.tensor(score(problems, batch)).view(args.prompts, args.group), seconds


def learn(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: Rollout,
    rewards_PG: torch.Tensor,
) -> dict[str, float]:
    """One policy gradient step on the whole batch; every rank calls. Returns its metrics."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = share_of(rank, world, batch)
    advantages_B = group_advantages(rewards_PG).flatten().chunk(world)[rank].to(model.device)
    logprobs_BT = response_logprobs(model, mine.prompt_tokens, mine.tokens, mine.temperature)
    correction = correct(mine, logprobs_BT.detach(), group=dist.group.WORLD)
    losses_BT = policy_gradient(logprobs_BT, advantages_B, correction.weights_BT)
    tiny_model.global_mean(losses_BT, correction.mask_BT).backward()
    gradient_norm = tiny_model.take_step(model, optimizer)
    return {"gradient_norm": gradient_norm, **correction.metrics}


def train_arm(
    arm: str,
    model: PreTrainedModel,
    checkpoint: Path,
    args: argparse.Namespace,
    log: report.Log | None,
) -> None:
    """Run GRPO for one arm; every rank calls, rank 0 with the log."""
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=tiny_model.learning_rate(LEARNING_RATE, model),
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    keywords = placement.engine_keywords(model.device.type, args.engine_args)
    if log:
        print(f"{arm:4s}  starting the engine", flush=True)
    with placement.engine_of(checkpoint, ARMS[arm], args.seed, keywords) as engine:
        if log:
            layers = connect(engine).control({"op": "layers"})["layers"]
            log.add("engine", arm=arm, layers=layers, keywords=keywords)
            before = evaluate(engine, args.seed, version=-1)
            log.add("evaluation", arm=arm, when="before", reward=before)
        for step in range(args.steps):
            started = time.perf_counter()
            updated = update(model, engine, version=step)
            sampled = sample(engine, args, step) if log else None
            batch, rewards_PG, rollout_s = placement.broadcast(sampled)
            metrics = learn(model, optimizer, batch, rewards_PG)
            if log:
                log.add(
                    "step",
                    arm=arm,
                    step=step,
                    reward=rewards_PG.mean().item(),
                    update_s=updated.seconds["total"],
                    update_gpu_s=updated.gpu_seconds,
                    update_bytes=updated.bytes,
                    mapped_bytes=updated.mapped_bytes,
                    rollout_s=rollout_s,
                    tokens_per_s=sum(map(len, batch.tokens)) / rollout_s,
                    step_s=time.perf_counter() - started,
                    **metrics,
                )
        update(model, engine, version=args.steps)
        if log:
            after = evaluate(engine, args.seed, version=args.steps)
            log.add("evaluation", arm=arm, when="after", reward=after)


def work(rank: int, world: int, init_method: str, args: argparse.Namespace) -> None:
    """One FSDP2 rank, from the process group to the report."""
    started = time.perf_counter()
    device = placement.join(rank, world, init_method)
    name = "grpo_gpu" if device.type == "cuda" else "grpo"
    log = report.Log(args.out / f"{name}.jsonl") if rank == 0 else None
    model = tiny_model.build_model(args.seed, args.size).to(device)
    if log:
        options = {k: v for k, v in vars(args).items() if k != "out"} | {"ranks": world}
        where = placement.device_name(device)
        log.add("environment", **report.environment(model.num_parameters(), where, options))
    tiny_model.shard(model)
    for step, loss in tiny_model.pretrain(model, args.seed, args.demonstrations):
        if log:
            log.add("pretraining", step=step, loss=loss)
    checkpoint = args.out / "checkpoint"
    tiny_model.save_checkpoint(model, checkpoint)
    pretrained = copy.deepcopy(model.state_dict())
    for arm in ARMS:
        model.load_state_dict(pretrained)
        train_arm(arm, model, checkpoint, args, log)
    if log:
        report.draw(log.rows, args.out / f"{name}.png")
        print(report.table(log.rows))
        minutes = (time.perf_counter() - started) / 60
        print(f"{minutes:.1f} minutes; written: {args.out}/{name}.jsonl, {args.out}/{name}.png")
    dist.destroy_process_group()


def main() -> None:
    device_type = placement.device_type()
    parser = argparse.ArgumentParser(
        description="GRPO with FP8 and BF16 rollouts, on the GPU if there is one, else on the CPU."
    )
    parser.add_argument(
        "--size",
        choices=tiny_model.SIZES,
        default=tiny_model.DEFAULT_SIZE[device_type],
        help="of the model (tiny on a CPU, small on a GPU)",
    )
    parser.add_argument("--steps", type=int, default=60, help="GRPO steps of each arm (60)")
    parser.add_argument(
        "--demonstrations", type=int, default=300, help="training steps before GRPO (300)"
    )
    parser.add_argument("--prompts", type=int, default=16, help="prompts a step (16)")
    parser.add_argument("--group", type=int, default=8, help="responses to each prompt (8)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, problems and sampling (0)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="results (runs/demo)")
    parser.add_argument(
        "--engine-args",
        type=placement.engine_args,
        default={},
        metavar="JSON",
        help="more keywords of sglang.Engine, as a JSON object",
    )
    args = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", placement.RANKS[device_type]))
    if reason := placement.refusal(device_type, world):
        parser.error(reason)
    if args.steps < 1 or args.group < 2 or args.prompts < 1 or args.prompts % world:
        parser.error(
            f"need a step, groups of 2 or more, and prompts that {world} ranks can share equally"
        )
    # Ranks and engine share the cores; with more threads each, rollouts stall for up to 30 s.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # SGLang's imports warn of each missing GPU library, once in each process.
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning")
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]), world, "env://", args)
        return
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        spawn(work, args=(world, store, args), nprocs=world)


if __name__ == "__main__":
    main()
