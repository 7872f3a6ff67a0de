"""The trainer of one process: a BF16 model (FP32 on a CPU), FP32 master weights, AdamW, one GRPO
step.

This is what FSDP2's mixed precision computes, on one device and without its collectives. Passes are
cut by length, so that a step fits beside other runs on the same GPU.

Shapes: B sequences, T tokens of the longest response, P prompts, G responses to each.
"""

from collections.abc import Collection, Iterator

import torch
from transformers import PreTrainedModel

from examples.grpo.loop import group_advantages
from trainer_bridge import Correction, Rollout, correct, response_logprobs

TOKENS_PER_PASS = 4096
"""Padded tokens of a forward with its backward; 6 GB or so, with a vocabulary of 49,152."""
BETAS = (0.9, 0.95)
LARGEST_NORM = 1.0
"""Gradients are clipped to this norm."""


class Learner:
    """Trains ``model`` through FP32 copies of its parameters.

    Args:
        learning_rate: AdamW's.
        frozen: parameters that stay as they are.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        learning_rate: float,
        frozen: Collection[torch.nn.Parameter] = (),
    ) -> None:
        self.model = model
        for parameter in frozen:
            parameter.requires_grad_(False)
        self._named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._masters = [p.detach().float().clone() for p in self._named.values()]
        self.optimizer = torch.optim.AdamW(
            self._masters, lr=learning_rate, betas=BETAS, weight_decay=0.0
        )

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a micro-batch, in FP32."""
        loss.backward()
        for master, parameter in zip(self._masters, self._named.values(), strict=True):
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> float:
        """One step of AdamW on what was added; returns the gradient's norm before it is clipped."""
        norm = torch.nn.utils.clip_grad_norm_(self._masters, LARGEST_NORM, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch._foreach_copy_(list(self._named.values()), self._masters)
        return norm.item()

    def state(self) -> dict[str, torch.Tensor]:
        """All that a step depends on: weights, AdamW's moments and its count of steps."""
        state = {}
        for name, master in zip(self._named, self._masters, strict=True):
            state[f"weight.{name}"] = master
            for key, value in self.optimizer.state[master].items():
                state[f"{key}.{name}"] = value
        return state

    @torch.no_grad()
    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from ``state``."""
        for name, master in zip(self._named, self._masters, strict=True):
            master.copy_(state[f"weight.{name}"])
            self.optimizer.state[master] = {
                key: state[f"{key}.{name}"].to("cpu" if key == "step" else master.device)
                for key in ("step", "exp_avg", "exp_avg_sq")
            }
        torch._foreach_copy_(list(self._named.values()), self._masters)


def micro_batches_of(prompts: list[list[int]], responses: list[list[int]]) -> Iterator[list[int]]:
    """Indices of sequences that go through the model together, those of like length."""
    length = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    micro_batch: list[int] = []
    for index in sorted(range(len(length)), key=lambda i: length[i]):
        if micro_batch and length[index] * (len(micro_batch) + 1) > TOKENS_PER_PASS:
            yield micro_batch
            micro_batch = []
        micro_batch.append(index)
    yield micro_batch


def logprobs_of(learner: Learner, batch: Rollout, micro_batch: list[int]) -> torch.Tensor:
    """Logprobs [len(micro_batch), longest response] by the trainer's weights."""
    prompts, responses = (
        [rows[i] for i in micro_batch] for rows in (batch.prompt_tokens, batch.tokens)
    )
    return response_logprobs(learner.model, prompts, responses, batch.temperature)


def learn(
    learner: Learner, batch: Rollout, rewards_PG: torch.Tensor, preset: str
) -> tuple[Correction, float]:
    """One on-policy GRPO step on the whole batch; returns its correction, and the norm of the
    gradient before it was clipped."""
    device = learner.model.device
    micro_batches = list(micro_batches_of(batch.prompt_tokens, batch.tokens))
    trainer_BT = torch.zeros(batch.mask_BT.shape, device=device)
    with torch.no_grad():
        for micro_batch in micro_batches:
            logprobs_BT = logprobs_of(learner, batch, micro_batch)
            trainer_BT[micro_batch, : logprobs_BT.shape[1]] = logprobs_BT
    correction = correct(batch, trainer_BT, preset)
    advantages_B1 = group_advantages(rewards_PG).view(-1, 1).to(device)
    factors_BT = -correction.weights_BT * correction.mask_BT * advantages_B1
    count = correction.mask_BT.sum().clamp(min=1)
    for micro_batch in micro_batches:
        logprobs_BT = logprobs_of(learner, batch, micro_batch)
        factors = factors_BT[micro_batch, : logprobs_BT.shape[1]]
        learner.backward((factors * logprobs_BT).sum() / count)
    return correction, learner.step()
