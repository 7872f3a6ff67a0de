"""Run ``tests/gpu`` in parts, as GPUs are lent for minutes, and join what they did to one record.

    python -m tests.gpu.record run part1.json tests/gpu/test_gemms.py ...
    python -m tests.gpu.record join part1.json part2.json > tests/GPU.md

``join`` fails where a file of ``tests/gpu`` is missing, a test failed, or the parts are of several
commits. The commit of a copy without a repository is taken from ``FP8RL_COMMIT``.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests import guarantees
from tests import run as suites

HERE = Path(__file__).parent
PACKAGES = ("sglang", "torch", "triton", "flashinfer-python")
SUMS = ("passed", "skipped", "seconds")
Part = dict[str, Any]


def run_part(out: Path, files: list[str]) -> int:
    """Run these files in one pytest process; its record goes to ``out``, its lines to stdout."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={xml}", *files]
        status = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
        passed, failed, skipped, failures = suites.read(xml)
        outcomes = guarantees.outcomes(xml)
    part = {
        "files": files,
        "status": status,
        "passed": passed,
        "failed": failed,
        "skipped": skipped,
        "failures": failures,
        "outcomes": outcomes,
        "seconds": round(time.monotonic() - start),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        **environment(),
    }
    out.write_text(json.dumps(part, indent=1))
    return status


def environment() -> dict[str, str]:
    """GPUs, driver, versions and commit."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpus = subprocess.run(query, check=True, capture_output=True, text=True).stdout.split("\n")
    name, driver = gpus[0].rsplit(", ", 1)
    return {
        "gpu": name,
        "driver": driver,
        "commit": os.environ.get("FP8RL_COMMIT") or suites.commit(),
        **{package: installed(package) for package in PACKAGES},
    }


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def join(parts: list[Part], files: set[str]) -> str:
    """The record of all parts, as Markdown.

    Args:
        files: names of the files that must have run.

    Raises:
        ValueError: a test failed, a file did not run, or the parts do not belong together.
    """
    for field in ("commit", "gpu", "driver", *PACKAGES):
        if len(values := {part[field] for part in parts}) != 1:
            raise ValueError(f"the parts are of different {field}: {', '.join(sorted(values))}")
    failures = [name for part in parts for name in part["failures"]]
    if failures or any(part["status"] for part in parts):
        raise ValueError(f"not all tests passed: {', '.join(failures) or 'see the logs'}")
    if missing := files - {Path(file).name for part in parts for file in part["files"]}:
        raise ValueError(f"did not run: {', '.join(sorted(missing))}")
    first = parts[0]
    versions = ", ".join(f"{package} {first[package]}" for package in PACKAGES)
    totals = {field: sum(part[field] for part in parts) for field in SUMS}
    lines = [
        f"# The last run of `tests/gpu`: commit {first['commit']}",
        "",
        f"{first['gpu']}, driver {first['driver']}, {versions}. {totals['passed']} passed, "
        f"{totals['skipped']} skipped, {suites.duration(totals['seconds'])} in {len(parts)} parts "
        f"(`tests/gpu/record.py`).",
        "",
        "| files | passed | skipped | time | date (UTC) |",
        "|---|---|---|---|---|",
    ]
    rows = [
        f"| {', '.join(sorted(Path(file).stem.removeprefix('test_') for file in part['files']))} "
        f"| {part['passed']} | {part['skipped']} "
        f"| {suites.duration(part['seconds'])} | {part['date']} |"
        for part in parts
    ]
    return "\n".join([*lines, *sorted(rows)])


def main() -> int:
    match sys.argv[1:]:
        case ["run", out, first, *files]:
            return run_part(Path(out), [first, *files])
        case ["join", first, *others]:
            parts = [json.loads(Path(path).read_text()) for path in (first, *others)]
            print(join(parts, {path.name for path in HERE.glob("test_*.py")}))
            outcomes = [part["outcomes"] for part in parts]
            guarantees.keep(guarantees.GPU, outcomes, parts[0]["commit"])
            return 0
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main())
