"""One case of the KV cache benchmark, in this process: kv_arm.py JOB writes the job's report."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import kv_cases, models


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the case of ``job``: ``reports`` that become rows, or ``logprobs`` to be compared.

    Raises:
        RuntimeError: the case did not do what its name says.
    """
    from benchmarks import measuring

    case, folder = kv_cases.find(job["name"]), job["folder"]
    if case.part == "attention":
        from benchmarks import kv_attention

        mma = case.arm == "xqa-bf16-mma"
        return {"reports": kv_attention.reports(mma, measuring.copy_tb_s())}

    from benchmarks import kv_engines

    shape = models.MODELS[kv_cases.MODEL]
    if case.part == "logprobs":
        shape = kv_engines.cut_shape()
    elif job["layers"] is not None:
        shape = replace(shape, layers=job["layers"])
    (Path(folder) / "config.json").write_text(json.dumps(models.config(shape)))
    if case.part == "logprobs":
        return {"logprobs": kv_engines.logprobs(case, folder, job["to_score"])}
    if case.part == "update":
        return {"reports": kv_engines.updates(case, shape, folder)}
    return {"reports": kv_engines.speed(case, shape, folder)}


if __name__ == "__main__":  # SGLang spawns its processes, which import this file again
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(job["report"]).write_text(json.dumps(run(job)))
