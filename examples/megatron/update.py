"""Megatron ranks that update an FP8 engine: every rank walks mbridge's export, the first one sends.

    sglang serve --model-path MODEL --quantization fp8rl --max-total-tokens 16384 --port 30000 &
    torchrun --nproc-per-node 2 -m examples.megatron.update MODEL http://127.0.0.1:30000

MODEL is the folder of a Qwen3 or Qwen3-MoE checkpoint. It runs on CPUs, and does not train: a step
halves all weights.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

import trainer_bridge
from examples.megatron import cpu_model

PROMPTS = [[51, 43, 53, 45, 50, 61], [50, 43, 50, 61]]  # token ids
SAMPLING = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("engine", help="address of the server")
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    layout = cpu_model.Layout(tensor=options.tensor_parallel)
    bridge, model = cpu_model.load(options.model, layout)
    engine = options.engine if dist.get_rank() == 0 else None
    for step in range(options.steps):
        with torch.no_grad():
            result = trainer_bridge.update(
                bridge.export_weights([model]), engine, version=step, group=dist.group.WORLD
            )
            if engine is not None:
                print(result)
                batch = trainer_bridge.rollout(engine, PROMPTS, SAMPLING, expected_version=step)
                print(f"tokens of version {batch.policy_versions}: {batch.tokens}")
            if step < options.steps - 1:
                for parameter in model.parameters():
                    parameter.mul_(0.5)  # in place of the optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
