"""What each part of ``tests/gpu`` did when it last ran (``schedule.py``), in ``tests/GPU.md``.

    python -m tests.gpu.schedule FOLDER
    python -m tests.gpu.record FOLDER/*.json

Parts that did not run again keep their rows. Nothing is recorded where a test failed. The commit of
a copy without a repository is taken from ``FP8RL_COMMIT``.
"""

import json
import subprocess
import sys
import time
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

from tests import run as suites

HERE = Path(__file__).parent
PACKAGES = ("sglang", "torch", "triton", "flashinfer-python")
SUMS = ("passed", "skipped", "seconds")
FIELDS = ("files", "alone", *SUMS, "date", "gpu", "driver", "commit", *PACKAGES)
"""Of a part that are kept."""
PARTS = HERE.parent / "gpu_parts.json"
PAGE = HERE.parent / "GPU.md"
TIMEOUT_S = 900
"""Of a test, whose engine may compile kernels while a dozen others start: up to 280 s were seen."""
HEADER = "| files | passed | skipped | time | date (UTC) |\n|---|---|---|---|---|"
Part = dict[str, Any]


def run_part(
    out: Path, files: list[str], alone: bool, workers: int, variables: dict[str, str]
) -> int:
    """Run these files in one pytest process; its status.

    Its record goes to ``out``; beside it are the log, and an .xml of what tests measured
    (``record_property``).

    Args:
        alone: run the tests with this mark, or those without it.
        workers: processes that share the tests (pytest-xdist), by ``xdist_group``.
        variables: of the process's environment.
    """
    start = time.monotonic()
    xml = out.with_suffix(".xml")
    xml.unlink(missing_ok=True)  # of an earlier run
    marks = "gpu and alone" if alone else "gpu and not alone"
    command = [sys.executable, "-m", "pytest", "-q", "-m", marks, f"--junitxml={xml}", *files]
    command.append(f"--timeout={TIMEOUT_S}")
    if workers > 1:
        command += [f"--numprocesses={workers}", "--dist=loadgroup"]
    with out.with_suffix(".log").open("w") as log:
        status = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables
        ).returncode
    passed, failed, skipped, failures = suites.read(xml)
    part = {
        "files": files,
        "alone": alone,
        "status": status,
        "passed": passed,
        "failed": failed,
        "skipped": skipped,
        "failures": failures,
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
        "commit": suites.commit(),
        **{package: installed(package) for package in PACKAGES},
    }


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def merged(old: list[Part], new: list[Part]) -> list[Part]:
    """The parts that ran last.

    Raises:
        ValueError: a test of a new part failed.
    """
    failures = [name for part in new for name in part["failures"]]
    if failures or any(part["status"] for part in new):
        raise ValueError(f"not all tests passed: {', '.join(failures) or 'see the logs'}")
    again = {(file, part["alone"]) for part in new for file in part["files"]}
    kept = [p for p in old if not again & {(file, p["alone"]) for file in p["files"]}]
    return sorted([*kept, *new], key=label)


def label(part: Part) -> str:
    names = sorted(Path(file).stem.removeprefix("test_") for file in part["files"])
    return f"{', '.join(names)}{' (alone)' if part['alone'] else ''}"


def page(parts: list[Part], files: set[str]) -> str:
    """The parts, as Markdown.

    Args:
        files: names of all files; those of no part are named.
    """
    totals = {field: sum(part[field] for part in parts) for field in SUMS}
    missing = files - {Path(file).name for part in parts for file in part["files"]}
    lines = [
        "# The last run of each part of `tests/gpu`",
        "",
        f"{totals['passed']} passed, {totals['skipped']} skipped, "
        f"{suites.duration(totals['seconds'])} in {len(parts)} parts (`tests/gpu/schedule.py`), "
        "several at a time.",
        *(["", f"Not recorded: {', '.join(sorted(missing))}."] if missing else []),
    ]
    for environment, those in groupby(sorted(parts, key=_environment), key=_environment):
        lines += ["", f"## {environment}", "", HEADER]
        lines += [
            f"| {label(part)} | {part['passed']} | {part['skipped']} "
            f"| {suites.duration(part['seconds'])} | {part['date']} |"
            for part in those
        ]
    return "\n".join(lines) + "\n"


def _environment(part: Part) -> str:
    versions = ", ".join(f"{package} {part[package]}" for package in PACKAGES)
    return f"{part['commit']}: {part['gpu']}, driver {part['driver']}, {versions}"


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    new = [json.loads(Path(path).read_text()) for path in sys.argv[1:]]
    parts = merged(json.loads(PARTS.read_text()) if PARTS.exists() else [], new)
    stored = [{field: part[field] for field in FIELDS} for part in parts]
    PARTS.write_text(json.dumps(stored, indent=1) + "\n")
    PAGE.write_text(page(parts, {path.name for path in HERE.glob("test_*.py")}))


if __name__ == "__main__":
    main()
