"""Compile and measure the kernels that a model's engines need, before runs share a GPU.

    python examples/parity/warm_up.py --model dense --state runs/parity

The first FP8 engine of a model measures products for half a minute and keeps what it found. Runs
that start side by side would all do that, and measure each other. The weights are random, so this
runs while the model that runs begin with is trained.
"""

import argparse
import os
from dataclasses import replace

from benchmarks.parity import options, policies, rollouts
from benchmarks.parity.paths import WARMED, warm_up_folder
from benchmarks.parity.settings import ENGINE, SETTINGS, START_SEED
from benchmarks.parity.variants import ALL_BF16, ARMS, Arm
from examples.grpo import placement
from trainer_bridge import connect


def engines_of(model: str) -> list[Arm]:
    """Arms whose engines differ in FP8, and the first again: it finishes what it had no time for,
    since an engine measures for a bounded time and the first that it does is to compile."""
    arms = [arm for arm in ARMS.values() if arm.model == model and arm.is_timed]
    quantized = [arm for arm in arms if arm.ignored_layers != ALL_BF16]
    return [*quantized, quantized[0]]


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description="Compile and measure a model's kernels.")
    options.add_common(parser)
    parser.add_argument("--model", choices=policies.MODELS, required=True)
    args = parser.parse_args()
    settings = replace(SETTINGS[args.size], **args.settings)
    folder = warm_up_folder(args.state, args.model, args.size)
    policies.save(policies.build(args.model, args.size, START_SEED), folder)
    device = placement.device_type()
    problems = rollouts.problems_of(settings.prompts, "warm-up")
    for arm in engines_of(args.model):
        keywords = placement.engine_keywords(device, ENGINE[device]) | arm.engine | args.engine_args
        with placement.running_engine(folder, arm.ignored_layers, 0, keywords) as engine:
            version = connect(engine).control({"op": "layout"})["version"]
            batch = rollouts.respond(engine, problems, version, settings.group)
        print(f"{arm.name}: {sum(map(len, batch.tokens))} tokens", flush=True)
    (folder / WARMED).touch()


if __name__ == "__main__":
    main()
