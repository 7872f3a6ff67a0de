"""The process of one job: ``python -m benchmarks.child JOB`` writes the job's measurements.

SGLang's own processes import this module again, so it imports nothing heavy before ``main``.
"""

import json
import sys
from pathlib import Path

from benchmarks.benchmark import Run, load


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    benchmark = load(job["benchmark"])
    (spec,) = (found.spec for found in benchmark.jobs if found.name == job["name"])
    run = Run(Path(job["folder"]), Path(job["log"]), job["options"], tuple(job["cases"]))
    Path(job["output"]).write_text(json.dumps(benchmark.measure(spec, run)))


if __name__ == "__main__":
    main()
