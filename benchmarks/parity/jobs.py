"""The jobs of a study: processes, what each makes, and what it waits for."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.parity import positions
from benchmarks.parity.held_out import weights_of
from benchmarks.parity.run_log import FINISHED, HELD_OUT
from benchmarks.parity.scan import SCAN
from benchmarks.parity.settings import Study
from benchmarks.parity.start import WARMED

GRACE_S = 45.0
"""In this time a run whose time is up ends its step and writes its checkpoint."""
EVALUATION_S, EVALUATED_S = 90.0, 10.0
"""What is left for evaluations after that: for an engine, and for each run of a GPU's share. With
90 s alone, for shares of 9, 10 runs of 33 were not evaluated."""
POSITIONS_S = 90.0
"""Mismatch by position is measured only where this is left beside ``run_all.LEAST_S``."""


@dataclass(frozen=True)
class Job:
    """A process to run to its end, maybe over several calls."""

    name: str
    command: tuple[str, ...]
    makes: tuple[Path, ...]
    """All exist when there is nothing left to do."""
    needs: tuple[Path, ...] = ()
    """It cannot start before all exist."""
    after: tuple[str, ...] = ()
    """Jobs that it waits for, until they have ended, however, or cannot start any more."""
    spare_s: float = 0.0
    """Before the deadline, when it has to have ended."""

    @property
    def is_done(self) -> bool:
        return all(path.exists() for path in self.makes)


def jobs_of(study: Study, args: argparse.Namespace) -> Iterator[Job]:
    """All jobs, in the order in which they start if nothing is to be waited for."""

    def job(name: str, script: str, makes: list[Path], *words: str, **waits: Any) -> Job:
        settings = ("--size", args.size, "--settings", json.dumps(args.settings))
        program = (sys.executable, "-m", f"benchmarks.parity.{script}", "--study", study.name)
        command = (*program, "--state", str(args.state), *settings, *words)
        return Job(name, command, tuple(makes), **waits)

    def held_out(name: str, model: str, seed: int, arms: list[str], **waits: Any) -> Job:
        makes = [folder / HELD_OUT for folder in weights_of(study, model, seed, arms)]
        words = ("--model", model, "--seed", str(seed), "--arms", *arms)
        return job(name, "held_out", makes, *words, **waits)

    gpus = len(args.gpus.split(","))
    arms_of = Counter(arm.model for arm in study.arms.values())
    largest = -(-max(arms_of[model] for model in args.models or arms_of) // gpus)
    spare_s = GRACE_S + (0.0 if args.timing else EVALUATION_S + largest * EVALUATED_S)
    options = ("--until", f"{args.until - spare_s:.0f}", *(("--timing",) if args.timing else ()))
    begun: set[Path] = set()
    for seed in range(args.first_seed, args.first_seed + (1 if args.timing else args.seeds)):
        which = study.start_of(seed)
        arms = [
            arm
            for arm in study.arms.values()
            if arm.model in (args.models or [arm.model])
            and (arm.is_timed if args.timing else not arm.planted or seed == 0)
        ]
        starts = {arm.model: study.start_folder(arm.model, which) for arm in arms}
        for model, start in starts.items():
            if start in begun:
                continue
            begun.add(start)
            yield from _starts(study, job, model, which)
            if not args.timing:
                # beside the warm-ups if it has a GPU to itself: they measure kernels
                after = [] if gpus >= 2 * len(starts) else [start.name]
                name = f"held-out-{start.name}"
                yield held_out(name, model, seed, [], needs=(start,), after=tuple(after))
        for arm in arms:
            start = starts[arm.model]
            yield job(
                f"{arm.name}-{seed}",
                "run",
                [study.run_folder(arm.name, seed, args.timing) / FINISHED],
                *("--arm", arm.name, "--seed", str(seed), *options),
                needs=(start,) if arm.dose is None else (start, start / SCAN),
                after=(start.name,),
                spare_s=spare_s,
            )
        for model, start in () if args.timing else starts.items():
            names = [arm.name for arm in arms if arm.model == model]
            # as many engines as GPUs: one would take minutes; runs that begin together share one
            for share, mine in _shares(names, gpus):
                after = [f"held-out-{start.name}", *(f"{name}-{seed}" for name in mine)]
                name = f"held-out-{model}-{seed}{share}"
                yield held_out(name, model, seed, mine, after=tuple(after))
            if study.settings.position_problems and seed == args.first_seed:
                after = [f"{name}-{seed}" for name in names]  # runs need the GPUs more
                yield from _positions(study, job, model, which, gpus, tuple(after))


def _positions(
    study: Study,
    job: Callable[..., Job],
    model: str,
    which: int,
    gpus: int,
    after: tuple[str, ...],
) -> Iterator[Job]:
    """The mismatch by position, the engines in as many jobs as there are GPUs; beside the last
    evaluations only where there is time for both."""
    start = study.start_folder(model, which)
    waits = {"needs": (start,), "after": after, "spare_s": POSITIONS_S}
    for share, mine in _shares([*positions.ENGINES], gpus):
        makes = [positions.path_of(study, model, which, name) for name in mine]
        words = ("--model", model, "--start", str(which), "--engines", *mine)
        yield job(f"positions-{model}{share}", "positions", makes, *words, **waits)


def _shares(names: list[str], gpus: int) -> Iterator[tuple[str, list[str]]]:
    """Names in as many parts as there are GPUs, each with a suffix for its job."""
    size = -(-len(names) // gpus)
    for first in range(0, len(names), size):
        yield f"-{first // size + 1}" if gpus > 1 else "", names[first : first + size]


def _starts(study: Study, job: Callable[..., Job], model: str, which: int) -> Iterator[Job]:
    """The weights to begin with, and their scan where doses are planted.

    What comes after them needs the weights alone: an engine that fails while it is warmed up ends
    the job, and stops no other arm.
    """
    folder, suffix = study.start_folder(model, which), f"-{which}" if which else ""
    words = ("--model", model, "--start", str(which))
    yield job(folder.name, "start", [folder, folder / WARMED], *words)
    if any(arm.model == model and arm.dose is not None for arm in study.arms.values()):
        waits = {"needs": (folder,), "after": (folder.name,)}
        yield job(f"scan-{model}{suffix}", "scan", [folder / SCAN], *words, **waits)
