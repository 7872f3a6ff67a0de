"""One part of the kernels' benchmark, in this process: kernels_arm.py JOB writes its report."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Check and time the pairs of the job's ``part``, a module and a function: ``reports``.

    Raises:
        RuntimeError: a pair does not agree.
    """
    import torch

    from benchmarks import kernels_pair, measuring

    torch.manual_seed(0)
    module, function = job["part"]
    pairs = getattr(importlib.import_module(module), function)()
    return {"reports": kernels_pair.reports(pairs, measuring.copy_tb_s())}


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(job["report"]).write_text(json.dumps(run(job)))
