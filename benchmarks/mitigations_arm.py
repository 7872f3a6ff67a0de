"""One case of the benchmark of logprob mitigations, in this process: mitigations_arm.py JOB."""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import mitigations_cases


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the case of ``job``: ``reports`` that become rows."""
    from benchmarks import mitigations_engines

    return {"reports": mitigations_engines.measure(mitigations_cases.find(job["name"]), job)}


if __name__ == "__main__":  # SGLang spawns its processes, which import this file again
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(job["report"]).write_text(json.dumps(run(job)))
