"""One arm of the rollout benchmark, in this process: rollout_arm.py JOB writes the job's report."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import models, rollout_cases


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the arm of ``job``, its loads or its rollout: ``reports`` that become rows.

    Raises:
        RuntimeError: the engine did not do what it should.
    """
    from benchmarks import long_tail, serving

    arm, model, folder = rollout_cases.find(job["arm"]), job["model"], job["folder"]
    shape = models.MODELS[model]
    if job["layers"] is not None:
        shape = replace(shape, layers=job["layers"])
    (Path(folder) / "config.json").write_text(json.dumps(models.config(shape)))
    if job["requests"] is not None:
        values = long_tail.run(arm, shape, folder, job["requests"])
    else:
        loads = [load for load in rollout_cases.LOADS[model] if load.name in job["cases"]]
        # the graphs of a load that is not run would change the capacity
        keywords = arm.keywords(batches=[load.batch for load in rollout_cases.LOADS[model]])
        values = serving.speed(keywords, shape, folder, loads)
    return {"reports": serving.reports(arm.name, model, shape.layers, values)}


if __name__ == "__main__":  # SGLang spawns its processes, which import this file again
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(job["report"]).write_text(json.dumps(run(job)))
