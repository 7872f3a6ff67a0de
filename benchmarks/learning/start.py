"""The weights that runs begin with: trained from scratch on the teacher's demonstrations, until
they solve a given part of the problems; or a published checkpoint. On a GPU the engines of the arms
are run as well.

    python -m benchmarks.learning.start --state runs/learning

Several GPUs train a large model before, which is all that ``torchrun`` does here:

    torchrun --nproc-per-node 2 -m benchmarks.learning.start --size large --state runs/learning
"""

import argparse
import os
import random
from collections.abc import Sequence
from operator import add

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from benchmarks.learning import sampling, study, tasks
from benchmarks.learning.learner import Learner
from benchmarks.learning.study import ARMS, PRETRAINED, Settings, Study
from benchmarks.pretrained import checkpoint
from examples.grpo import arithmetic, tiny_model
from trainer_bridge import connect, response_logprobs
from trainer_bridge.rollouts.batch import micro_batches_of

LINE_EVERY = 25  # steps
PADDING = 0  # no character of the tasks
RATE = 2e-3  # of the tiny size
TOKENS_PER_PASS = 16384  # demonstrations share the GPU with few others
WARMED = "warmed"
"""Empty; exists when the kernels of the engines have been compiled and measured."""


def make(of: Study) -> None:
    """Make the checkpoint to begin with, if there is none yet."""
    if of.size == PRETRAINED:
        checkpoint.convert(of.start)
    elif not of.start.exists():
        made = train(of.size, of.settings, of.device)
        if rank_and_world()[0] == 0:
            unfinished = of.start.with_suffix(f".{os.getpid()}")
            study.save(made, unfinished)
            unfinished.rename(of.start)
        if of.device.type == "cuda":
            torch.cuda.empty_cache()  # what is to come is smaller


def rank_and_world() -> tuple[int, int]:
    """Of this process, and of how many train together."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def train(size: str, settings: Settings, device: torch.device) -> PreTrainedModel:
    """The trained model, in BF16, on each rank: all draw the same batch and take parts of it.

    Raises:
        ValueError: it solves fewer problems than a start has to.
    """
    # the same weights on the same machine, wherever torch has a deterministic kernel
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    rank, world = rank_and_world()
    seed = settings.start_seed
    rng = random.Random(f"{seed} demonstrations")
    made = study.build(size, seed).to(device, study.dtype_of(device))
    learner = Learner(made, tiny_model.learning_rate(RATE, made), world)
    longest = tasks.max_new_tokens(settings.levels)
    reward = 0.0
    schedule = tiny_model.warm_up_and_decay(learner.optimizer, settings.demonstrations)
    for step in range(1, settings.demonstrations + 1):
        problems = [
            tasks.make_problem(rng, levels=settings.levels)
            for _ in range(settings.demonstration_batch)
        ]
        texts = [tasks.demonstrate(problem, rng)[:longest] for problem in problems]
        tokens = sum(map(len, texts))
        prompts = [arithmetic.encode(problem.prompt) for problem in problems[rank::world]]
        responses = [arithmetic.encode(text) for text in texts[rank::world]]
        total = torch.zeros((), device=device)
        lengths = list(map(add, map(len, prompts), map(len, responses)))
        for micro_batch in micro_batches_of(lengths, TOKENS_PER_PASS):
            shown = [responses[index] for index in micro_batch]
            logprobs_BT = response_logprobs(made, [prompts[i] for i in micro_batch], shown)
            loss = -(logprobs_BT * tiny_model.mask_of(shown).to(device)).sum() / tokens
            learner.backward(loss)
            total += loss.detach()
        learner.step()
        schedule.step()
        if step % LINE_EVERY == 0:
            _add_up(total)
            print(f"demonstrations  step {step}  loss {total.item():.3f} nats a token", flush=True)
        if step % settings.demonstrations_every == 0:
            reward = reward_of(made, settings.evaluation_problems, settings.levels)
            print(f"demonstrations  step {step}  held-out {reward:.3f}", flush=True)
            if reward >= settings.start_reward:
                break
    torch.use_deterministic_algorithms(False)
    if reward < (least := settings.start_reward / 4):
        raise ValueError(
            f"the start solves {reward:.3f} of held-out problems, and has to solve {least:.3f}, so "
            f"its weights are discarded; give it more demonstrations or shorter problems"
        )
    return made


@torch.no_grad()
def reward_of(model: PreTrainedModel, count: int, levels: Sequence[int]) -> float:
    """Mean reward of one response to each of ``count`` held-out problems, without SGLang."""
    rank, world = rank_and_world()
    drawn = tasks.draw_problems(count, "demonstrations", held_out=True, levels=levels)
    problems = drawn[rank::world]
    prompts = [torch.tensor(arithmetic.encode(problem.prompt)) for problem in problems]
    tokens_BL = pad_sequence(prompts, batch_first=True, padding_side="left").to(model.device)
    sampled_BT = model.generate(
        tokens_BL,
        attention_mask=(tokens_BL != PADDING).long(),
        do_sample=True,
        top_k=0,
        max_new_tokens=tasks.max_new_tokens(levels),
        eos_token_id=arithmetic.END_TOKEN,
        pad_token_id=PADDING,
    )[:, tokens_BL.shape[1] :]
    texts = [arithmetic.decode([t for t in row if t != PADDING]) for row in sampled_BT.tolist()]
    rewards = sum(tasks.reward(*pair) for pair in zip(problems, texts, strict=True))
    return _add_up(torch.tensor(rewards, device=model.device)).item() / len(drawn)


def _add_up(value: torch.Tensor) -> torch.Tensor:
    """The sum over ranks, in its place."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def warm_up(of: Study) -> None:
    """Compile and measure the kernels of FP8 engines, with a BF16 and with an FP8 KV cache.

    The first FP8 engine of a model measures GEMMs for half a minute and keeps what it found. Runs
    that start side by side would all do that, and measure each other. The first engine comes again:
    it finishes what it had no time for, since it measures for a bounded time.
    """
    task = sampling.task_of(of)
    problems = task.draw(of.settings.prompts, "warm-up")
    for name in ("fp8-none", "kv8-none", "fp8-none") if of.device.type == "cuda" else ():
        print(f"warm-up  engine of {name}", flush=True)  # an engine that fails ends the process
        with sampling.engine_of(of, ARMS[name], 0) as engine:
            version = connect(engine).control({"op": "layout"})["version"]
            sampling.respond(engine, task, problems, version, of.settings.group)
    (of.start / WARMED).touch()


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description="Train the weights that runs begin with.")
    study.add_options(parser)
    args = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        of = study.open_study(args)
        make(of)
        warm_up(of)
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    if dist.get_rank() == 0:
        study.open_study(args)  # makes its folder
    dist.barrier()
    make(study.open_study(args))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
