"""Decode steps and a prefill chunk on one GPU, by class of kernel.

A job is an arm of the rollout benchmark, a case one of its loads. Kernels are timed by torch's
profiler in the engine, started and stopped through SGLang: 16 decode steps by CUDA graph, and the
prefill of one chunk. A step lasts longer under the profiler than in the rollout benchmark: shares
and kernels' times are what to read.
"""

from pathlib import Path
from typing import Any

from benchmarks import rollout, traces
from benchmarks.benchmark import LAYERS, Benchmark, Measurement, Run
from benchmarks.engines import models, serving

ARMS = ("stock-bf16", "stock-block-fp8-kv8-xqa", "fp8rl-kv8")
"""By default."""
CASES = {"qwen3-8b": ("32x512", "128x512", "256x512", "64x8192"), "qwen3-30b-a3b": ("64x4096",)}
"""Loads that are profiled."""
STEPS = 16
"""Decode steps that are averaged."""
EDGE = 2
"""Steps after them; as many go before them, when requests may still be joining."""


def measure(arm: rollout.Arm, run: Run) -> list[Measurement]:
    """The mean time of each class of kernel, of decode and of prefill for each load."""
    arm.assert_served()
    shape = models.written(models.MODELS[arm.model], run.folder, run.options["layers"])
    loads, wanted = rollout.LOADS[arm.model], rollout.wanted_loads(arm.model, run)
    keywords = arm.keywords(batches=[load.batch for load in loads])
    engine = serving.start(str(run.folder), keywords)
    serving.give_weights(engine, shape, keywords)
    values = {}
    for seed, load in enumerate(loads):
        if load.name not in CASES[arm.model] or load not in wanted:
            continue
        serving.warm_up(engine, load, seed, shape, keywords)
        prompts = serving.prompts_of(seed, load.batch, load.length, shape.vocab)
        # a chunk of a batch that the rollout benchmark times
        batch = load.batch // serving.QUARTERS
        chunk = prompts[: max(1, min(batch, keywords["chunked_prefill_size"] // load.length))]
        found = trace(engine, run.folder, chunk, 1)
        phases = {f"prefill of {sum(map(len, chunk))} tokens": [traces.whole(found)]}
        serving.generate(engine, prompts, serving.BEGIN)
        found = trace(engine, run.folder, prompts, STEPS + 2 * EDGE)
        phases["decode"] = traces.decode_steps(found, STEPS, EDGE)
        for phase, steps in phases.items():
            values[f"{load.name}, {phase}"] = traces.means(steps)
    engine.shutdown()
    return serving.measurements(arm.name, arm.model, values)


def trace(engine: Any, folder: Path, prompts: list[list[int]], new: int) -> list[traces.Kernel]:
    """The kernels that run in the engine while it generates.

    Raises:
        RuntimeError: SGLang did not leave one trace.
    """
    before = set(folder.rglob("*.trace.json.gz"))
    # the host's own activities would slow what is timed
    engine.start_profile(
        output_dir=str(folder), activities=["GPU"], with_stack=False, record_shapes=False
    )
    serving.generate(engine, prompts, new)
    engine.stop_profile()
    written = set(folder.rglob("*.trace.json.gz")) - before
    if len(written) != 1:
        raise RuntimeError(f"SGLang's profiler left {len(written)} traces in the place of one")
    return traces.kernels(written.pop())


def _benchmark(model: str) -> Benchmark:
    return Benchmark(
        jobs=rollout.jobs(model, ARMS),
        measure=measure,
        limit_s=300.0,
        options=(LAYERS,),
    )


DENSE = _benchmark("qwen3-8b")
MOE = _benchmark("qwen3-30b-a3b")
