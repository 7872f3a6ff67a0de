"""The weights that runs of a model begin with: trained from scratch on the teacher's
demonstrations, until they solve a given part of the problems; or a published checkpoint. On a GPU
its engines are run as well.

    python -m benchmarks.parity.start --model dense --state runs/parity

A large model is trained by all GPUs before, which is all that ``torchrun`` does here:

    torchrun --nproc-per-node 2 -m benchmarks.parity.start \\
        --study long --size large --model dense --state runs/long
"""

import argparse
import os
import random
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from benchmarks.parity import engines, models, sampling, tasks
from benchmarks.parity.arms import Arm
from benchmarks.parity.learner import Learner, micro_batches_of
from benchmarks.parity.settings import Settings, Study, add_options, open_study
from benchmarks.pretrained import checkpoint
from examples.grpo import arithmetic, tiny_model
from trainer_bridge import connect, response_logprobs

LINE_EVERY = 25  # steps
PADDING = 0  # no character of the tasks
AUX_LOSS = 0.01
"""Weight of the loss that keeps a router's experts in use."""
WARMED = "warmed"
"""Empty; exists when the model's kernels have been compiled and measured."""


def start_of(study: Study, model: str, start: int = 0) -> Path:
    """Folder of the checkpoint to begin with; made here if there is none yet.

    Args:
        start: which one; each has its own random weights and demonstrations.
    """
    folder = study.start_folder(model, start)
    if model == models.PRETRAINED:
        return checkpoint.convert(folder)
    if not folder.exists():
        made = train(model, study.size, study.settings, study.device, start)
        if rank_and_world()[0] == 0:
            unfinished = folder.with_suffix(f".{os.getpid()}")
            models.save(made, unfinished)
            unfinished.rename(folder)
        if study.device.type == "cuda":
            torch.cuda.empty_cache()  # what is to come is smaller
    return folder


def rank_and_world() -> tuple[int, int]:
    """Of this process, and of how many train together."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def train(
    model: str, size: str, settings: Settings, device: torch.device, seed: int = 0
) -> PreTrainedModel:
    """The trained model, in BF16, on each rank: all draw the same batch and take parts of it.

    Raises:
        ValueError: it solves fewer problems than a start has to.
    """
    # the same weights on the same machine, wherever torch has a deterministic kernel
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    rank, world = rank_and_world()
    rng = random.Random(f"{seed} demonstrations")
    made = models.build(model, size, seed).to(device, models.dtype_of(device))
    learner = Learner(made, tiny_model.learning_rate(settings.demonstration_rate, made), world)
    aux: list[torch.Tensor] = []
    if models.has_experts(model):
        made.config.output_router_logits = True
        made.register_forward_hook(lambda module, given, output: aux.append(output.aux_loss))
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
        for micro_batch in micro_batches_of(prompts, responses, settings.demonstration_tokens):
            shown = [responses[index] for index in micro_batch]
            logprobs_BT = response_logprobs(made, [prompts[i] for i in micro_batch], shown)
            loss = -(logprobs_BT * tiny_model.mask_of(shown).to(device)).sum() / tokens
            share = sum(map(len, shown)) / tokens
            learner.backward(loss + AUX_LOSS * share * aux.pop() if aux else loss)
            total += loss.detach()
        learner.step()
        schedule.step()
        if step % LINE_EVERY == 0:
            _add_up(total)
            print(f"demonstrations  step {step}  loss {total.item():.3f} nats a token", flush=True)
        if step % settings.demonstrations_every == 0:
            made.config.output_router_logits = False  # which sampling cannot make
            reward = reward_of(made, settings.evaluation_problems, settings.levels)
            made.config.output_router_logits = models.has_experts(model)
            aux.clear()
            print(f"demonstrations  step {step}  held-out {reward:.3f}", flush=True)
            if reward >= settings.start_reward:
                break
    torch.use_deterministic_algorithms(False)
    made.config.output_router_logits = False
    if reward < settings.least_start_reward:
        raise ValueError(
            f"the start solves {reward:.3f} of held-out problems, and has to solve "
            f"{settings.least_start_reward}, so its weights are discarded; give it more "
            f"demonstrations or shorter problems"
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


def warm_up(study: Study, model: str, start: int = 0) -> None:
    """Compile and measure the kernels of a model's FP8 engines.

    The first FP8 engine of a model measures GEMMs for half a minute and keeps what it found. Runs
    that start side by side would all do that, and measure each other.
    """
    folder = study.start_folder(model, start)
    task = sampling.task_of(model, folder, study.settings.levels)
    for arm in fp8_engines_of(study, model) if study.device.type == "cuda" else []:
        problems = task.draw(study.settings.prompts, "warm-up")
        keywords = study.engine(arm.engine)
        print(f"warm-up  engine of {arm.name}", flush=True)  # an engine that fails ends the process
        with engines.running(arm, folder, arm.ignored_layers, 0, keywords) as engine:
            version = connect(engine.handle).control({"op": "layout"})["version"]
            sampling.respond(engine, task, problems, version, study.settings.group)
    (folder / WARMED).touch()


def fp8_engines_of(study: Study, model: str) -> list[Arm]:
    """Arms whose engines differ in FP8, and the first again: it finishes what it had no time for,
    since an engine measures for a bounded time and the first that it does is to compile."""
    found: dict[str, Arm] = {}
    for arm in study.arms.values():
        is_ours = arm.model == model and not arm.has_bf16_engine
        if is_ours and "fp8rl_kv_scheme" not in arm.engine:  # scales do not change kernels
            found.setdefault(str(arm.engine), arm)
    return [*found.values(), next(iter(found.values()))]


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description="Train the weights that runs begin with.")
    add_options(parser)
    parser.add_argument("--model", choices=(*models.MODELS, models.PRETRAINED), required=True)
    parser.add_argument("--start", type=int, default=0, help="which one (0)")
    args = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _train_together(args)
        return
    study = open_study(args)
    start_of(study, args.model, args.start)
    warm_up(study, args.model, args.start)


def _train_together(args: argparse.Namespace) -> None:
    """``start_of`` on each rank of torchrun, which started this process."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    if dist.get_rank() == 0:
        open_study(args)  # makes its folder
    dist.barrier()
    start_of(open_study(args), args.model, args.start)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
