"""All runs of the experiment, side by side on the GPUs of one machine; call it until all is done.

    python examples/parity/run_all.py --gpus 2 --per-gpu 6 --deadline 570 --state runs/parity

First the models that runs begin with, beside them on a GPU the kernels of their engines, then the
runs, a seed of every arm before the next seed, then the judging. Before the deadline each run
writes a checkpoint and ends, and the next call goes on. ``--timing`` runs the timed arms instead,
for a few steps, one alone on a GPU: side by side they take each other's time.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from benchmarks.parity import options
from benchmarks.parity.paths import (
    FINISHED,
    JUDGED,
    WARMED,
    run_folder,
    start_folder,
    warm_up_folder,
)
from benchmarks.parity.run import STOPPED
from benchmarks.parity.schedule import TRIES, Job, Schedule
from benchmarks.parity.variants import ARMS, seeds_of
from examples.grpo import placement

HERE = Path(__file__).resolve().parent
SEEDS = 3
TIMING_STEPS = 20


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """All jobs, in the order in which they are to start."""
    runs = [
        (arm, seed)
        for seed in range(args.seeds)
        for arm in args.arms
        if seed in seeds_of(arm, args.seeds) and (ARMS[arm].is_timed or not args.timing)
    ]
    models = list(dict.fromkeys(ARMS[arm].model for arm, _ in runs))
    seeds = range(0 if args.timing else args.seeds)
    return [
        *(_start(args, model) for model in models),
        *(_warm_up(args, model) for model in models if _measures()),
        *(_run(args, arm, seed) for arm, seed in runs),
        *(_judging(args, model, seed, runs) for seed in seeds for model in models),
    ]


def _command(args: argparse.Namespace, script: str, *words: str) -> list[str]:
    return [sys.executable, str(HERE / script), *options.handed_on(args), *words]


def _start(args: argparse.Namespace, model: str) -> Job:
    command = _command(args, "pretraining.py", "--model", model)
    return Job(f"start-{model}", command, (start_folder(args.state, model, args.size),))


def _measures() -> bool:
    """Whether engines measure kernels here."""
    return placement.device_type() == "cuda"


def _warm_up(args: argparse.Namespace, model: str) -> Job:
    command = _command(args, "warm_up.py", "--model", model)
    marker = warm_up_folder(args.state, model, args.size) / WARMED
    return Job(f"warm-up-{model}", command, (marker,))


def _run(args: argparse.Namespace, arm: str, seed: int) -> Job:
    folder = run_folder(args.state, arm, seed, args.timing)
    model = ARMS[arm].model
    needs = [start_folder(args.state, model, args.size)]
    if _measures():
        needs += _warm_up(args, model).makes
    words = ["--arm", arm, "--seed", str(seed), *(["--timing"] if args.timing else [])]
    command = _command(args, "run.py", *words)
    return Job(folder.name, command, (folder / FINISHED,), tuple(needs), stops=True)


def _judging(args: argparse.Namespace, model: str, seed: int, runs: list[tuple[str, int]]) -> Job:
    """Of a seed's runs of a model, when all have finished: arms are compared by seed."""
    chosen = [arm for arm, of_seed in runs if of_seed == seed and ARMS[arm].model == model]
    folders = [run_folder(args.state, arm, seed) for arm in chosen]
    return Job(
        f"judge-{model}-{seed}",
        _command(args, "judge.py", "--model", model, "--seed", str(seed)),
        tuple(folder / JUDGED for folder in folders),
        tuple(folder / FINISHED for folder in folders),
    )


def gpus_of(text: str) -> list[str]:
    """Read ``--gpus``: names of so many of the GPUs that this process may use.

    Raises:
        argparse.ArgumentTypeError: no number from 1, or more than CUDA_VISIBLE_DEVICES lists.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GPUs; give 1 or more")
    count = int(text)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(gpu) for gpu in range(count)]
    names = [name.strip() for name in visible.split(",")]  # of an empty list: one empty name
    if count > len(names):
        raise argparse.ArgumentTypeError(
            f"{count} are more than CUDA_VISIBLE_DEVICES={visible} has; give {len(names)} or less"
        )
    return names[:count]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="All runs of the experiment; call it again to go on."
    )
    options.add_common(parser)
    parser.add_argument("--gpus", type=gpus_of, default="1", metavar="N", help="to run on (1)")
    parser.add_argument("--per-gpu", type=int, default=4, help="runs side by side on a GPU (4)")
    parser.add_argument("--deadline", type=float, default=570, help="seconds from now (570)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"of each arm ({SEEDS})")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--timing", action="store_true", help="time a few steps, each arm alone")
    args = parser.parse_args(argv)
    if args.timing:
        args.per_gpu, args.seeds, args.steps = 1, 1, TIMING_STEPS
    return args


def main() -> None:
    until = time.monotonic()
    args = arguments()
    until += args.deadline
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each job: there are many
    schedule = Schedule(args.gpus, args.per_gpu, args.state / "logs", until)
    left = schedule.run(jobs_of(args))
    print(f"{len(left)} jobs are left: {', '.join(job.name for job in left) or 'none'}")
    if schedule.failures:
        print(f"failed starts: {json.dumps(schedule.failures)}")
    if left:
        sys.exit(STOPPED if max(schedule.failures.values(), default=0) < TRIES else 1)


if __name__ == "__main__":
    main()
