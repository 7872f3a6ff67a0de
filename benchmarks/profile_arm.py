"""Traces of one arm's engine, in this process: profile_arm.py JOB writes the job's report."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import models, rollout_cases

STEPS = 16
"""Decode steps that are averaged."""
EDGE = 2
"""Steps after them; as many go before them, when requests may still be joining."""


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Profile the arm of ``job``: ``profiles``, of decode and of prefill for each load."""
    from benchmarks import serving, traces

    arm, model, folder = rollout_cases.find(job["arm"]), job["model"], Path(job["folder"])
    shape = models.MODELS[model]
    if job["layers"] is not None:
        shape = replace(shape, layers=job["layers"])
    (folder / "config.json").write_text(json.dumps(models.config(shape)))
    loads = rollout_cases.LOADS[model]
    keywords = arm.keywords(batches=[load.batch for load in loads])
    engine = serving.start(str(folder), keywords)
    serving.give_weights(engine, shape, keywords)
    profiles = []
    for seed, load in enumerate(loads):
        if load.name not in job["cases"]:
            continue
        serving.warm_up(engine, load, seed, shape, keywords)
        prompts = serving.prompts_of(seed, load.batch, load.length, shape.vocab)
        chunk = prompts[: max(1, keywords["chunked_prefill_size"] // load.length)]
        found = trace(engine, folder, chunk, 1)
        phases = {f"prefill of {sum(map(len, chunk))} tokens": [traces.whole(found)]}
        serving.generate(engine, prompts, serving.BEGIN)
        found = trace(engine, folder, prompts, STEPS + 2 * EDGE)
        phases["decode"] = traces.decode_steps(found, STEPS, EDGE)
        profiles += [
            {"arm": arm.name, "model": model, "layers": shape.layers, "case": load.name}
            | {"phase": phase, **traces.table(steps)}
            for phase, steps in phases.items()
        ]
    engine.shutdown()
    return {"profiles": profiles}


def trace(engine: Any, folder: Path, prompts: list[list[int]], new: int) -> list[Any]:
    """The kernels that run in the engine while it generates.

    Raises:
        RuntimeError: SGLang did not leave one trace.
    """
    from benchmarks import serving, traces

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


if __name__ == "__main__":  # SGLang spawns its processes, which import this file again
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(job["report"]).write_text(json.dumps(run(job)))
