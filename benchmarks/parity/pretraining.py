"""The model that all runs begin with: trained from scratch on the teacher's demonstrations, until
it solves a given part of the problems.

python examples/parity/pretraining.py --model dense --state runs/parity
"""

import argparse
import json
import os
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from benchmarks.parity import options, policies, rollouts, tasks
from benchmarks.parity.learner import Learner, parts_of
from benchmarks.parity.paths import START_SETTINGS, Row, start_folder
from benchmarks.parity.settings import SETTINGS, START_SEED, Settings
from examples.grpo import arithmetic, placement, tiny_model
from examples.grpo.arithmetic import END_TOKEN
from trainer_bridge import response_logprobs

LINE_EVERY = 25  # steps
EVALUATE_EVERY = 200
PADDING = 0  # no character of the tasks
AUX_LOSS = 0.01
"""Weight of the loss that keeps a router's experts in use."""
TRAINED_BY = (
    "demonstrations",
    "demonstration_batch",
    "demonstration_rate",
    "start_reward",
    "evaluation_problems",
)
"""Settings that a start depends on."""


def start_of(state: Path, model: str, size: str, settings: Settings, device: torch.device) -> Path:
    """Folder of the checkpoint to begin with; trained here if there is none yet.

    Raises:
        ValueError: the folder has one of other demonstrations.
    """
    folder = start_folder(state, model, size)
    wanted = {name: getattr(settings, name) for name in TRAINED_BY}
    if not folder.exists():
        unfinished = state / f"{folder.name}.{os.getpid()}.tmp"
        policies.save(_train(model, size, settings, device).model, unfinished)
        (unfinished / START_SETTINGS).write_text(json.dumps(wanted))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what is to come is smaller
            torch.cuda.reset_peak_memory_stats()
        _move(unfinished, folder)
    if changed := sorted(wanted.items() - _settings_of(folder).items()):
        raise ValueError(
            f"{folder} was trained with other {', '.join(name for name, _ in changed)}; give the "
            f"same settings, or another folder as --state"
        )
    return folder


def _move(unfinished: Path, folder: Path) -> None:
    """Give a start its name, or delete it where another process was faster."""
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(unfinished)


def _settings_of(folder: Path) -> Row:
    """What a start was trained by; empty where it does not say."""
    path = folder / START_SETTINGS
    return json.loads(path.read_text()) if path.exists() else {}


def _train(model: str, size: str, settings: Settings, device: torch.device) -> Learner:
    # the same weights on the same machine, wherever torch has a deterministic kernel
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    rng = random.Random(f"{START_SEED} demonstrations")
    made = policies.build(model, size, START_SEED).to(device, torch.bfloat16)
    learner = Learner(made, tiny_model.learning_rate(settings.demonstration_rate, made))
    aux: list[torch.Tensor] = []
    if model == "moe":
        made.config.output_router_logits = True
        made.register_forward_hook(lambda module, given, output: aux.append(output.aux_loss))
    schedule = tiny_model.warm_up_and_decay(learner.optimizer, settings.demonstrations)
    started = time.perf_counter()
    for step in range(1, settings.demonstrations + 1):
        problems = [tasks.make_problem(rng) for _ in range(settings.demonstration_batch)]
        prompts = [arithmetic.encode(problem.prompt) for problem in problems]
        texts = [tasks.demonstrate(problem, rng)[: tasks.MAX_NEW_TOKENS] for problem in problems]
        responses = [arithmetic.encode(text) for text in texts]
        tokens = sum(map(len, responses))
        total = torch.zeros((), device=device)
        for part in parts_of(prompts, responses):
            shown = [responses[index] for index in part]
            logprobs_BT = response_logprobs(made, [prompts[i] for i in part], shown)
            loss = -(logprobs_BT * tiny_model.mask_of(shown).to(device)).sum() / tokens
            share = sum(map(len, shown)) / tokens
            learner.backward(loss + AUX_LOSS * share * aux.pop() if aux else loss)
            total += loss.detach()
        learner.step()
        schedule.step()
        if step % LINE_EVERY == 0:
            seconds = time.perf_counter() - started
            print(
                f"demonstrations  step {step:4d}  loss {total.item():.3f} nats a token  "
                f"{seconds:.0f} s",
                flush=True,
            )
        if step % EVALUATE_EVERY == 0:
            made.config.output_router_logits = False  # which sampling cannot make
            reward = reward_of(made, settings.evaluation_problems)
            made.config.output_router_logits = model == "moe"
            aux.clear()
            print(f"demonstrations  step {step:4d}  held-out {reward:.3f}", flush=True)
            if reward >= settings.start_reward:
                break
    torch.use_deterministic_algorithms(False)
    made.config.output_router_logits = False
    return learner


@torch.no_grad()
def reward_of(model: PreTrainedModel, count: int) -> float:
    """Mean reward of one response to each of ``count`` held-out problems, without SGLang."""
    problems = rollouts.problems_of(count, "demonstrations", held_out=True)
    prompts = [torch.tensor(arithmetic.encode(problem.prompt)) for problem in problems]
    tokens_BL = pad_sequence(prompts, batch_first=True, padding_side="left").to(model.device)
    sampled_BT = model.generate(
        tokens_BL,
        attention_mask=(tokens_BL != PADDING).long(),
        do_sample=True,
        top_k=0,
        max_new_tokens=tasks.MAX_NEW_TOKENS,
        eos_token_id=END_TOKEN,
        pad_token_id=PADDING,
    )[:, tokens_BL.shape[1] :]
    texts = [arithmetic.decode([t for t in row if t != PADDING]) for row in sampled_BT.tolist()]
    return fmean(tasks.reward(*pair) for pair in zip(problems, texts, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the model that runs begin with.")
    options.add_common(parser)
    parser.add_argument("--model", choices=policies.MODELS, required=True)
    args = parser.parse_args()
    settings = replace(SETTINGS[args.size], **args.settings)
    device = torch.device(placement.device_type())
    folder = start_of(args.state, args.model, args.size, settings, device)
    print(f"{folder.name}: {policies.fingerprint(folder)}")


if __name__ == "__main__":
    main()
