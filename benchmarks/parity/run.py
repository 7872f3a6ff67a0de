"""One run of the experiment: GRPO of one arm with one seed, which goes on where it was stopped.

    python examples/parity/run.py --arm fp8-kv8 --seed 0 --steps 150 --state runs/parity

The folder gets the model that all runs begin with (trained here if it is not there), and for this
run a log, a checkpoint while it runs, and its final weights. Trainer and engine share a device.

Problems are drawn from the seed and the step alone, so nothing is lost with the process but the
engine's own random numbers.
"""

import argparse
import math
import os
import sys
import time
from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks import environment
from benchmarks.parity import options, policies, pretraining, rollouts
from benchmarks.parity.learner import Learner, learn
from benchmarks.parity.paths import FINAL, run_folder
from benchmarks.parity.run_log import RunLog
from benchmarks.parity.settings import ENGINE, SETTINGS, Settings
from benchmarks.parity.variants import ARMS, Arm
from examples.grpo import placement, report, tiny_model
from trainer_bridge import connect, update, worst_tokens

STOPPED = 3
"""Exit status of a run whose time was up, and that is to be started again."""
ENGINE_SEEDS = 1_000_003
"""An engine that is started at a later step must not draw the random numbers of the first again."""
METRICS = (
    "mismatch_kl_k1",
    "mismatch_kl_k3",
    "ess",
    "weight_ess",
    "weight_mean",
    "clipped_fraction",
    "chi2_token",
    "ratio_mean",
    "ratio_p01",
    "ratio_p99",
    "ratio_max",
    "logprob_abs_diff_mean",
    "logprob_abs_diff_max",
    "token_mult_prob_error",
    "rollout_log_ppl",
    "rollout_nll",
    "trainer_log_ppl",
    "tokens",
)
"""What a step's row has of the correction's metrics, each where the correction has it."""


def run(args: argparse.Namespace, run_log: RunLog) -> bool:
    """Go on with a run; returns whether it came to its end, or else its time was up."""
    arm = ARMS[args.arm]
    device = torch.device(placement.device_type())
    settings = replace(SETTINGS[args.size], **args.settings)
    start = pretraining.start_of(args.state, arm.model, args.size, settings, device)
    model = policies.load(start, device)
    frozen = policies.plant(model) if arm.planted else []
    learner = Learner(model, tiny_model.learning_rate(settings.rate, model), frozen)
    fixed = {
        **asdict(settings),
        "steps": args.steps,
        "size": args.size,
        "start": policies.fingerprint(start),
        "engine_args": args.engine_args,
        "commit": environment.commit(),
    }
    keywords = placement.engine_keywords(device.type, ENGINE[device.type])
    keywords |= arm.engine | args.engine_args
    step, state = run_log.resume(fixed)
    if state:
        learner.restore(state)
    else:
        where = placement.device_name(device)
        about = report.environment(model.num_parameters(), where, {})
        header = {"arm": arm.name, "seed": args.seed, "engine": keywords, **about}
        run_log.add("run", **header, options=fixed)
    started = time.perf_counter()
    seed = args.seed + ENGINE_SEEDS * step
    with placement.running_engine(start, arm.ignored_layers, seed, keywords) as engine:
        formats = [row["format"] for row in connect(engine).control({"op": "layers"})["layers"]]
        engine_s = time.perf_counter() - started
        run_log.add(
            "engine",
            step=step,
            start_s=engine_s,
            matrices=len(formats),
            fp8_matrices=formats.count("fp8"),
        )
        while step < args.steps:
            if time.time() > args.until:
                if step:
                    run_log.save(step, learner.state())
                return False
            update_s, update_gpu_s = bring(model, engine, step)
            if step % settings.evaluate_every == 0:
                measure(engine, run_log, step, settings)
            row = take_step(engine, learner, arm, args.seed, step, settings)
            run_log.add("step", step=step, update_s=update_s, update_gpu_s=update_gpu_s, **row)
            print(line(arm, row | {"step": step}), flush=True)
            step += 1
            if step % settings.checkpoint_every == 0 or step == args.steps:
                run_log.save(step, learner.state())
        bring(model, engine, step)
        measure(engine, run_log, step, settings)
    policies.save(model, run_log.folder / FINAL)
    run_log.finish()
    if device.type == "cuda":
        peak_gib = torch.cuda.max_memory_reserved() / 2**30
        print(f"{run_log.folder.name} is finished; the trainer took {peak_gib:.1f} GiB at most")
    return True


def bring(model: PreTrainedModel, engine: Any, version: int) -> tuple[float, float | None]:
    """Update the engine; returns the seconds of wall time, and those of its kernels on a GPU."""
    updated = update(model, engine, version=version)
    return updated.seconds["total"], updated.gpu_seconds


def measure(engine: Any, run_log: RunLog, step: int, settings: Settings) -> None:
    """Evaluate on held-out problems, by the arm's own engine."""
    found = rollouts.evaluate(engine, settings.evaluation_problems, version=step)
    run_log.add("evaluation", step=step, **found)
    name = run_log.folder.name
    print(f"{name}  step {step:3d}  held-out {found['reward']:.3f}", found["by_kind"], flush=True)


def take_step(
    engine: Any, learner: Learner, arm: Arm, seed: int, step: int, settings: Settings
) -> dict[str, Any]:
    """Sample from the engine, and learn; returns the step's row."""
    started = time.perf_counter()
    problems = rollouts.problems_of(settings.prompts, f"{seed} step {step}")
    batch = rollouts.respond(engine, problems, step, settings.group)
    sampled = time.perf_counter()
    rewards = torch.tensor(rollouts.rewards_of(problems, batch))
    rewards_PG = rewards.view(settings.prompts, settings.group)
    learned = learn(learner, batch, rewards_PG, arm.correction)
    ended = time.perf_counter()
    metrics, alarms = learned.correction.metrics, learned.correction.alarms
    where = learned.trainer_logprobs_BT, batch.logprobs_BT, batch.mask_BT
    return {
        "reward": rewards.mean().item(),
        **rollouts.shape_of(batch),
        "gradient_norm": learned.gradient_norm,
        "rollout_s": sampled - started,
        "learn_s": ended - sampled,
        **{name: metrics[name] for name in METRICS if name in metrics},
        "alarms": [asdict(alarm) for alarm in alarms],
        "worst": [asdict(token) for token in worst_tokens(*where)] if alarms else [],
    }


def line(arm: Arm, row: dict[str, Any]) -> str:
    """What is printed of a step."""
    return (
        f"{arm.name}  step {row['step']:3d}  reward {row['reward']:.3f}  "
        f"mismatch KL {row['mismatch_kl_k3']:.1e}  ESS {row['ess']:.4f}  "
        f"{row['response_tokens']:.0f} tokens, entropy {row['entropy']:.3f}  "
        f"rollout {row['rollout_s']:.2f} s  learn {row['learn_s']:.2f} s"
        + "".join(f"  ALARM {alarm['metric']}" for alarm in row["alarms"])
    )


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="GRPO of one arm with one seed; it resumes.")
    options.add_common(parser)
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of problems and of sampling (0)")
    parser.add_argument("--timing", action="store_true", help="keep it apart, in the folder timing")
    parser.add_argument(
        "--until",
        type=float,
        default=math.inf,
        metavar="UNIX_TIME",
        help="stop then, with a checkpoint",
    )
    return parser.parse_args(argv)


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning")  # SGLang's, of missing libraries
    args = arguments()
    run_log = RunLog(run_folder(args.state, args.arm, args.seed, args.timing))
    if run_log.is_finished:
        print(f"{run_log.folder.name} is finished")
    elif not run(args, run_log):
        sys.exit(STOPPED)


if __name__ == "__main__":
    main()
