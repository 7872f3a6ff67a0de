"""The demo's command line; it starts its own ranks, or runs as one of torchrun's.

python -m examples.grpo                          one rank on a GPU, two on a CPU
torchrun --nproc-per-node 2 -m examples.grpo     on GPUs, one rank each
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import torch
from torch.multiprocessing.spawn import spawn

from .loop import Config, run
from .tiny_model import SIZES


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}",
        description="GRPO with FP8 and BF16 rollouts, on the GPU if there is one, else on the CPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    size = "small" if on_gpu else "tiny"
    parser.add_argument("--size", choices=SIZES, default=size, help="of the model")
    parser.add_argument("--steps", type=int, default=60, help="GRPO steps of each arm")
    parser.add_argument(
        "--demonstrations", type=int, default=300, help="training steps before GRPO"
    )
    parser.add_argument("--prompts", type=int, default=16, help="prompts a step")
    parser.add_argument("--group", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--seed", type=int, default=0, help="of weights, problems and sampling")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the results")
    parser.add_argument(
        "--engine-args", type=json.loads, default={}, metavar="JSON", help="more of sglang.Engine"
    )
    config = Config(**vars(parser.parse_args()))
    world = int(os.environ.get("WORLD_SIZE", 1 if on_gpu else 2))
    if on_gpu and world > torch.cuda.device_count():
        parser.error(
            f"{world} ranks need a GPU each, but torch finds {torch.cuda.device_count()}; start "
            f"fewer, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    if config.steps < 1 or config.group < 2 or config.prompts < 1 or config.prompts % world:
        parser.error(
            f"need a step, groups of 2 or more, and prompts that {world} ranks can share equally"
        )
    # Ranks and engine share the cores; with more threads each, rollouts stall for up to 30 s.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # SGLang's imports warn of each missing GPU library, once in each process.
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning")
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), world, "env://", config)
        return
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, args=(world, f"file://{folder}/store", config), nprocs=world)


if __name__ == "__main__":
    main()
