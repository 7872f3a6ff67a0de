"""Update an FP8 engine from a transformers model and measure the mismatch: quickstart.py MODEL."""

import sys

import sglang
import torch
from transformers import AutoModelForCausalLM

import trainer_bridge

if __name__ == "__main__":  # SGLang spawns its processes, which import this file again
    path = sys.argv[1] if len(sys.argv) == 2 else sys.exit(__doc__)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    engine = sglang.Engine(model_path=path, quantization="fp8rl", skip_tokenizer_init=True)
    print(trainer_bridge.update(model, engine, version=0))
    prompts = [[51, 43, 53, 45, 50, 61], [50, 43, 50, 61]]  # token ids
    batch = trainer_bridge.rollout(engine, prompts, {"temperature": 1.0, "max_new_tokens": 16})
    with torch.no_grad():
        logprobs = trainer_bridge.response_logprobs(
            model, batch.prompt_tokens, batch.tokens, batch.temperature
        )
    print(batch.tokens, trainer_bridge.correct(batch, logprobs).metrics)
    engine.shutdown()
