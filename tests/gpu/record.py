"""What parts of ``tests/gpu`` did (``schedule.py``), and all of it in one record.

    python -m tests.gpu.schedule FOLDER
    python -m tests.gpu.record join FOLDER/*.json > tests/GPU.md

``join`` fails where a file of ``tests/gpu`` is missing, a test failed, or the parts are of several
commits. The commit of a copy without a repository is taken from ``FP8RL_COMMIT``.
"""

import json
import os
import subprocess
import sys
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


def run_part(out: Path, files: list[str], alone: bool, variables: dict[str, str]) -> int:
    """Run these files in one pytest process; its status.

    Its record goes to ``out``; beside it are the log, and an .xml of what tests measured
    (``record_property``).

    Args:
        alone: run the tests with this mark, or those without it.
        variables: of the process's environment.
    """
    start = time.monotonic()
    xml = out.with_suffix(".xml")
    xml.unlink(missing_ok=True)  # of an earlier run
    marks = "gpu and alone" if alone else "gpu and not alone"
    command = [sys.executable, "-m", "pytest", "-q", "-m", marks, f"--junitxml={xml}", *files]
    with out.with_suffix(".log").open("w") as log:
        status = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables
        ).returncode
    passed, failed, skipped, failures = suites.read(xml)
    outcomes = guarantees.outcomes(xml)
    part = {
        "files": files,
        "alone": alone,
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
    gpus = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()
    name, driver = gpus[0].rsplit(", ", 1)
    return {
        "gpu": f"{len(gpus)} x {name}",
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
        f"(`tests/gpu/schedule.py`).",
        "",
        "| files | passed | skipped | time | date (UTC) |",
        "|---|---|---|---|---|",
    ]
    rows = [
        f"| {', '.join(sorted(Path(file).stem.removeprefix('test_') for file in part['files']))}"
        f"{' (alone)' if part['alone'] else ''} "
        f"| {part['passed']} | {part['skipped']} "
        f"| {suites.duration(part['seconds'])} | {part['date']} |"
        for part in parts
    ]
    return "\n".join([*lines, *sorted(rows)])


def main() -> int:
    match sys.argv[1:]:
        case ["join", first, *others]:
            parts = [json.loads(Path(path).read_text()) for path in (first, *others)]
            print(join(parts, {path.name for path in HERE.glob("test_*.py")}))
            outcomes = [part["outcomes"] for part in parts]
            guarantees.keep(guarantees.GPU, outcomes, parts[0]["commit"])
            return 0
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main())
