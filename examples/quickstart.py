"""The loop of the README on a toy reward, short responses: quickstart.py MODEL [STEPS]."""

import sys

import sglang
import torch
from transformers import AutoModelForCausalLM

import trainer_bridge

PROMPTS = [[51, 43, 53, 45, 50, 61], [50, 43, 50, 61]]  # token ids
SAMPLING = {"temperature": 1.0, "max_new_tokens": 16, "n": 8}
TOKENS = 4096
"""Of a micro-batch, with padding."""


def reward(tokens: list[int]) -> float:
    """The share of even token ids."""
    return sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1)


def main(path: str, steps: int = 3) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = sglang.Engine(
        model_path=path, quantization="fp8rl", skip_tokenizer_init=True, dtype="bfloat16"
    )
    for step in range(steps):
        print(trainer_bridge.update(model, engine, version=step))
        rollout = trainer_bridge.rollout(engine, PROMPTS, SAMPLING, expected_version=step)
        rewards = [reward(tokens) for tokens in rollout.tokens]
        advantages_B1 = trainer_bridge.group_advantages(rollout, rewards)
        with torch.no_grad():
            old_BT = trainer_bridge.response_logprobs(model, rollout, micro_batch_tokens=TOKENS)
        correction = trainer_bridge.correct(rollout, old_BT)
        for rows in rollout.micro_batches(TOKENS):
            logprobs_BT = trainer_bridge.response_logprobs(model, rollout[rows])
            trainer_bridge.policy_loss(
                logprobs_BT, advantages_B1[rows], correction[rows], reduce="tokens"
            ).backward()
        optimizer.step()
        optimizer.zero_grad()
        mean, kl = sum(rewards) / len(rewards), correction.metrics["mismatch_kl_k3"]
        print(f"reward {mean:.3f}, mismatch_kl_k3 {kl:.1e}")
    engine.shutdown()


if __name__ == "__main__":  # SGLang spawns its processes, which import this file again
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:]))
