"""Two small policies to plant faults in: one sure of nearly every token, one of hardly any.

"sums" is the demo's task, "text" continues English, both in ASCII. Each is a Qwen3 that learns from
demonstrations, then takes policy gradient steps; the weights after each step are kept.

Shapes: B sequences, P prompts, G samples of each, L prompt tokens, T response tokens.
"""

import pydoc_data.topics
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3ForCausalLM

from benchmarks.alarms import fault_injection
from examples.grpo import arithmetic, tiny_model

SEED = 0
RL_STEPS = 20
PROMPTS, GROUP = 16, 8  # of a policy gradient step
WARMUP = 30
State = dict[str, torch.Tensor]

# The reference of Python's language that comes with Python: 460 kB of English.
TEXT = "\n".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore")


@dataclass(frozen=True)
class Task:
    """What a policy learns; prompts have one length."""

    name: str
    layers: int
    steps: int
    """Of learning from demonstrations."""
    rl_learning_rate: float
    length: int
    """Tokens of a response, at most."""
    end: int | None
    """The token that ends a response."""
    demonstrations: Callable[[random.Random], tuple[torch.Tensor, torch.Tensor]]
    """Tokens [B, L + T], and True where one is to be learnt."""
    prompts: Callable[[random.Random, int], torch.Tensor]
    """[B, L]."""
    reward: Callable[[list[int], list[int]], float]
    """Of a prompt and its response."""


def _sums_demonstrations(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    problems = [arithmetic.make_problem(rng) for _ in range(128)]
    prompts = torch.tensor([arithmetic.encode(problem.prompt) for problem in problems])
    responses = [arithmetic.encode(arithmetic.demonstrate(p, rng)) for p in problems]
    wide = arithmetic.MAX_NEW_TOKENS
    padded = [row + [arithmetic.END_TOKEN] * (wide - len(row)) for row in responses]
    tokens_BL = torch.cat([prompts, torch.tensor(padded)], 1)
    learnt_BL = torch.zeros_like(tokens_BL, dtype=torch.bool)
    for row_L, response in zip(learnt_BL, responses, strict=True):
        row_L[prompts.shape[1] : prompts.shape[1] + len(response)] = True
    return tokens_BL, learnt_BL


def _sums_prompts(rng: random.Random, count: int) -> torch.Tensor:
    problems = [arithmetic.make_problem(rng) for _ in range(count)]
    return torch.tensor([arithmetic.encode(problem.prompt) for problem in problems])


def _sums_reward(prompt: list[int], response: list[int]) -> float:
    terms = arithmetic.decode(prompt).rstrip("=").replace("-", "+-").split("+")
    problem = arithmetic.Problem(tuple(map(int, terms)))
    return arithmetic.reward(problem, arithmetic.decode(response))


def _windows(rng: random.Random, count: int, width: int) -> torch.Tensor:
    starts = [rng.randrange(len(TEXT) - width) for _ in range(count)]
    return torch.tensor([list(TEXT[start : start + width]) for start in starts])


def _text_demonstrations(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    tokens_BL = _windows(rng, 16, 112)
    return tokens_BL, torch.ones_like(tokens_BL, dtype=torch.bool)


TASKS = {
    "sums": Task(
        "sums", 2, 300, 5e-5, arithmetic.MAX_NEW_TOKENS, arithmetic.END_TOKEN,
        _sums_demonstrations, _sums_prompts, _sums_reward,
    ),
    "text": Task(
        "text", 4, 400, 1e-5, 96, None,
        _text_demonstrations,
        lambda rng, count: _windows(rng, count, 16),
        lambda prompt, response: response.count(ord(" ")) / len(response),
    ),
}  # fmt: skip


@dataclass
class Policy:
    """A model with its weights of every policy gradient step; the last are the trainer's."""

    task: Task
    model: Qwen3ForCausalLM
    history: list[State] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def at(self, age: int) -> Qwen3ForCausalLM:
        """The model as it was so many steps ago."""
        model = Qwen3ForCausalLM(self.model.config)
        model.load_state_dict(self.history[-1 - age])
        return model


def build(task: Task) -> Qwen3ForCausalLM:
    """Random; every FP8 matrix has sides that are multiples of 128."""
    return tiny_model.build_model(SEED, end=task.end, other={"num_hidden_layers": task.layers})


def teach(task: Task, model: PreTrainedModel, steps: int) -> Iterator[float]:
    """Learn from demonstrations; yields the loss in nats a token."""
    rng = random.Random(f"{SEED} {task.name} demonstrations")
    rate = tiny_model.PRETRAIN_LR
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    for step in range(steps):
        left = 1 - step / steps
        optimizer.param_groups[0]["lr"] = rate * min((step + 1) / WARMUP, 0.1 + 0.9 * left)
        tokens_BL, learnt_BL = task.demonstrations(rng)
        logprobs = fault_injection.logprobs_of(model, tokens_BL[:, :1], tokens_BL[:, 1:], 1.0)
        loss = -logprobs[learnt_BL[:, 1:]].mean()
        loss.backward()
        tiny_model.take_step(model, optimizer)
        yield loss.item()


def reinforce(policy: Policy, steps: int) -> None:
    """Take policy gradient steps on the model's own samples; notes weights and rewards."""
    task, model = policy.task, policy.model
    rng = random.Random(f"{SEED} {task.name} policy gradient")
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=task.rl_learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    policy.history.append(_state(model))
    for _ in range(steps):
        prompts_BL = task.prompts(rng, PROMPTS).repeat_interleave(GROUP, 0)
        sampled = fault_injection.sample(model, prompts_BL, task.length, generator, end=task.end)
        rewards_PG = torch.tensor(
            [
                task.reward(prompt, tokens[: int(length)])
                for prompt, tokens, length in zip(
                    prompts_BL.tolist(),
                    sampled.tokens_BT.tolist(),
                    sampled.mask_BT.sum(1),
                    strict=True,
                )
            ]
        ).view(PROMPTS, GROUP)
        spread_P1 = rewards_PG.std(1, keepdim=True) + 1e-6
        advantages_B = ((rewards_PG - rewards_PG.mean(1, keepdim=True)) / spread_P1).flatten()
        logprobs_BT = fault_injection.logprobs_of(model, prompts_BL, sampled.tokens_BT, 1.0)
        loss_BT = -advantages_B[:, None] * logprobs_BT
        loss_BT[sampled.mask_BT].mean().backward()
        tiny_model.take_step(model, optimizer)
        policy.history.append(_state(model))
        policy.rewards.append(rewards_PG.mean().item())


def _state(model: Any) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
