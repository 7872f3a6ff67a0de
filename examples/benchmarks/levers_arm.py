"""One case of the benchmark of logprob levers, in this process: levers_arm.py JOB."""

import json
import sys
from pathlib import Path
from typing import Any

import levers_cases


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the case of ``job``: ``reports`` that become rows."""
    import levers_engines

    return {"reports": levers_engines.measure(levers_cases.find(job["name"]), job)}


if __name__ == "__main__":  # SGLang spawns its processes, which import this file again
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(job["report"]).write_text(json.dumps(run(job)))
