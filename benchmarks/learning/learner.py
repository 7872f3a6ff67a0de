"""The trainer: a BF16 model (FP32 on a CPU), FP32 master weights, AdamW, GRPO steps.

This is what FSDP2's mixed precision computes, on one device, or on several with all of the model on
each. Passes are cut by length, so that a step fits beside other runs on the same GPU.

Shapes: B sequences, T tokens of the longest response, P prompts, G responses to each.
"""

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from trainer_bridge import Correction, Rollout, correct, group_advantages, response_logprobs

TOKENS_PER_PASS = 4096
"""Padded tokens of a forward with its backward; 6 GB or so, with a vocabulary of 49,152."""
BETAS = (0.9, 0.95)
LARGEST_NORM = 1.0
"""Gradients are clipped to this norm."""


class Learner:
    """Trains ``model`` through FP32 copies of its parameters.

    Args:
        learning_rate: AdamW's.
        ranks: how many train it together: each has all of it, and their gradients are added.
    """

    def __init__(self, model: PreTrainedModel, learning_rate: float, ranks: int = 1) -> None:
        self.model = model
        self._ranks = ranks
        self._named = dict(model.named_parameters())
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
        if self._ranks > 1:
            for master in self._masters:
                dist.all_reduce(master.grad)
        norm = torch.nn.utils.clip_grad_norm_(self._masters, LARGEST_NORM, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._write()
        return norm.item()

    @torch.no_grad()
    def _write(self) -> None:
        torch._foreach_copy_(list(self._named.values()), self._masters)

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
        self._write()


def learn(
    learner: Learner, batch: Rollout, rewards_PG: torch.Tensor, config: str
) -> tuple[Correction, float]:
    """One GRPO step on the whole batch; returns its correction, and the norm of the gradient before
    it was clipped."""
    with torch.no_grad():
        trainer_BT = response_logprobs(learner.model, batch, micro_batch_tokens=TOKENS_PER_PASS)
    correction = correct(batch, trainer_BT, config)
    advantages_B1 = group_advantages(batch, rewards_PG.flatten()).to(learner.model.device)
    for rows in batch.micro_batches(TOKENS_PER_PASS):
        factors_BT = -correction[rows].weights_BT * advantages_B1[rows]
        logprobs_BT = response_logprobs(learner.model, batch[rows])
        learner.backward((factors_BT * logprobs_BT).sum() / max(correction.tokens, 1))
    return correction, learner.step()
