"""What a benchmark is to the runner: jobs, each of which is measured in a process of its own.

Only light modules are imported here: SGLang's own processes import it again.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

BENCHMARKS = {
    "update": "benchmarks.update:BENCHMARK",
    "sharded": "benchmarks.sharded:BENCHMARK",
    "rollout": "benchmarks.rollout:DENSE",
    "rollout_moe": "benchmarks.rollout:MOE",
    "rollout_two_gpus": "benchmarks.rollout:ON_TWO_GPUS",
    "long_tail": "benchmarks.long_tail:BENCHMARK",
    "multi_turn": "benchmarks.multi_turn:BENCHMARK",
    "kv_prefill": "benchmarks.kv.prefill:BENCHMARK",
    "kv_decode": "benchmarks.kv.decode:BENCHMARK",
    "kernels": "benchmarks.kernels.groups:BENCHMARK",
    "fp8_forward": "benchmarks.fp8_forward:BENCHMARK",
    "fp8_mismatch": "benchmarks.fp8_mismatch:BENCHMARK",
    "response_logprobs": "benchmarks.response_logprobs:BENCHMARK",
}
"""Module and attribute of each benchmark; the name is also that of its result file."""

Measurement = dict[str, Any]
"""``arm``, ``model``, ``case``, and ``values``: by metric, the values that were measured."""


@dataclass(frozen=True)
class Option:
    """A number on the command line that is passed to the measuring function."""

    name: str
    help: str
    default: int | None = None
    tries_out: bool = False
    """Whether figures under it are not those of the whole model, and need another ``--output``."""


LAYERS = Option("layers", "fewer decoder layers, to try the benchmark out", tries_out=True)


@dataclass(frozen=True)
class Run:
    """What a job's process knows besides its spec."""

    folder: Path
    """An empty folder of this job."""
    log: Path
    """Standard output and error of this process and of those that it starts."""
    options: Mapping[str, Any] = field(default_factory=dict)
    cases: tuple[str, ...] = ("*",)

    def wants(self, case: str) -> bool:
        """Whether ``--cases`` names this case of the job."""
        return any(fnmatch(case, pattern) for pattern in self.cases)


@dataclass(frozen=True)
class Job:
    """One process."""

    name: str
    """Segments with slashes between them, which ``--only`` matches."""
    spec: Any
    """The benchmark's own description of what is measured, a dataclass."""
    stock: bool = False
    """Whether SGLang runs without our plugin."""
    by_default: bool = True
    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to set."""

    def matches(self, pattern: str) -> bool:
        """Whether the pattern is one of the name's segments, or matches the whole name."""
        return pattern in self.name.split("/") or fnmatch(self.name, pattern)


@dataclass(frozen=True)
class Benchmark:
    """Jobs and the function that measures one of them in its process."""

    jobs: tuple[Job, ...]
    measure: Callable[[Any, Run], list[Measurement]]
    """Given a job's spec. What it raises becomes the job's failure."""
    limit_s: float
    """Time limit of a job, where the command line names none."""
    options: tuple[Option, ...] = ()
    gpu: Literal["needed", "optional", "unused"] = "needed"
    """Optional: without one a tiny model is measured, which never goes to the result file."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the environment in the result file tells besides."""


def load(reference: str) -> Benchmark:
    """The benchmark at ``module:ATTRIBUTE``."""
    module, _, attribute = reference.partition(":")
    found: Benchmark = getattr(importlib.import_module(module), attribute)
    return found
