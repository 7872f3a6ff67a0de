"""The kernel tests of ``tests/gpu`` on a CPU, through Triton's interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_kernels_in_the_interpreter() -> None:
    # In a process of its own: Triton decides at import whether it interprets.
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/gpu/test_kernels.py",
        ],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed, (\d+) skipped", run.stdout)
    assert passed is not None and int(passed[1]) > 100, run.stdout[-2000:]
    assert int(passed[2]) == 3, "only what is exhaustive is left to a GPU"
