"""Profile decode steps and a prefill chunk on one GPU, by kernel: decode_profile.py [--arms ...].

Each arm's engine runs in a process of its own, about 90 s. Kernels are timed by torch's profiler in
the engine, started and stopped through SGLang: for each case 16 decode steps by CUDA graph, and the
prefill of one chunk. Profiling has a price of its own, so a step lasts longer than in rollout.py;
shares and kernels' times are what to read. Figures go to results/decode_profile.json, those of the
mixture of experts to results/decode_profile_moe.json, after each arm, and those of other arms and
cases stay where machine, boot and commit are the same; --merge makes one file of several, as in
rollout.py.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks import processes, result_rows, rollout_cases
from benchmarks.environment import environment, host
from benchmarks.models import MODELS

HERE = Path(__file__).resolve().parent
RESULTS = {
    "qwen3-8b": HERE / "results" / "decode_profile.json",
    "qwen3-30b-a3b": HERE / "results" / "decode_profile_moe.json",
}
"""By model."""
ARMS = ("stock-bf16", "stock-block-fp8-kv8-xqa", "fp8rl-kv8")
CASES = ("128x512", "256x512", "64x8192")
"""By default, where the model has them."""

Profile = dict[str, Any]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b")
    parser.add_argument("--arms", nargs="+", choices=rollout_cases.NAMES, default=list(ARMS))
    usual = f"loads of rollout.py ({' '.join(CASES)}, or all that the model has)"
    parser.add_argument("--cases", nargs="+", metavar="CASE", help=usual)
    parser.add_argument("--layers", type=int, help="a try-out with fewer layers")
    parser.add_argument("--limit-s", type=float, default=300.0, help="time limit of a process")
    parser.add_argument("--output", type=Path, help="instead of the model's file")
    parser.add_argument("--merge", nargs="+", type=Path, help="make one file of these; run nothing")
    options = parser.parse_args(argv)
    known = [load.name for load in rollout_cases.LOADS[options.model]]
    options.cases = options.cases or [c for c in known if c in CASES] or known
    if unknown := set(options.cases) - set(known):
        parser.error(f"no case {', '.join(sorted(unknown))} of {options.model}; it has {known}")
    options.output = options.output or RESULTS[options.model]
    if options.layers is not None and options.output in RESULTS.values():
        parser.error("--layers gives no figures of the whole model; name another --output")
    return options


def command(options: argparse.Namespace) -> str:
    """How to repeat the run; arms and cases may be run one by one."""
    words = ["python examples/benchmarks/decode_profile.py"]
    if options.layers is not None:
        words.append(f"--layers {options.layers}")
    return " ".join(words)


def identity(profile: Profile) -> tuple[str, ...]:
    """What a file holds once."""
    return tuple(profile[key] for key in ("model", "arm", "case", "phase"))


def save(path: Path, facts: dict[str, Any], profiles: list[Profile]) -> None:
    """Write all profiles, in the order of the arms."""
    order = {name: number for number, name in enumerate(rollout_cases.NAMES)}
    found = sorted(profiles, key=lambda profile: order[profile["arm"]])
    result_rows.write(path, {"benchmark": path.stem, "environment": facts, "profiles": found})


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    if options.merge:
        save(options.output, *result_rows.merged(options.merge, "profiles", identity))
        return
    facts = environment(command(options)) | {"host": host()}
    profiles = result_rows.earlier(options.output, facts, "profiles")
    for arm in options.arms:
        started = time.perf_counter()
        job = {key: getattr(options, key) for key in ("model", "layers", "cases")} | {"arm": arm}
        environ = processes.engine_environment(rollout_cases.find(arm).stock)
        outcome = processes.run_job(HERE / "profile_arm.py", job, options.limit_s, environ)
        if outcome.report is not None:
            found = outcome.report["profiles"]
            again = {identity(profile) for profile in found}
            profiles = [p for p in profiles if identity(p) not in again] + found
            save(options.output, facts, profiles)
            for profile in found:
                print(text(profile), flush=True)
        how = outcome.failure or "done"
        print(f"{arm}: {how} ({time.perf_counter() - started:.0f} s)", flush=True)


def text(profile: Profile) -> str:
    """A profile as plain text, with the kernels whose class is not known."""
    lines = [
        f"{', '.join(identity(profile))}: {profile['step_us']:.0f} us, of which idle "
        f"{profile['gap_us']:.0f} us"
    ]
    lines += [
        f"  {row['us']:10.1f} us {row['share']:6.1%} {row['calls']:7.1f} calls  {row['class']}"
        for row in profile["classes"]
    ]
    lines += [
        f"    other: {row['us']:.1f} us, {row['calls']:.1f} calls: {row['name']}"
        for row in profile["kernels"]
        if row["class"] == "other"
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
