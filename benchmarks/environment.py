"""What a benchmark's figures depend on."""

import hashlib
import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COMMIT_VARIABLE = "FP8RL_COMMIT"
PACKAGES = {"sglang": "sglang", "torch": "torch", "flashinfer": "flashinfer-python"}


def environment(command: str) -> dict[str, Any]:
    """Device, driver, CPU, versions, date, commit, command and a mark of the host."""
    return {
        **(gpus() or {"device": _cpu(), "count": 1}),
        "cpu": _cpu(),
        **{name: _version(package) for name, package in PACKAGES.items()},
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit(),
        "command": command,
        "host": host(),
    }


def host() -> str:
    """A mark of this boot of this machine, which does not tell its name."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.sha256(boot.encode()).hexdigest()[:12]


def commit(root: Path = ROOT) -> str:
    """The checkout's commit, with a plus sign where files differ from it.

    FP8RL_COMMIT names it for a copy of the tree, whose repository is absent or behind.
    """
    if COMMIT_VARIABLE in os.environ or not (root / ".git").exists():
        return os.environ.get(COMMIT_VARIABLE, "unknown")
    changes = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return _output("git", "-C", str(root), "rev-parse", "--short", "HEAD") + "+" * bool(changes)


def gpus() -> dict[str, Any] | None:
    """Name, number and driver of the GPUs, or None where there are none."""
    try:
        lines = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    except (OSError, subprocess.CalledProcessError):
        return None
    device, driver = lines.splitlines()[0].rsplit(", ", 1)
    return {"device": device, "count": len(lines.splitlines()), "driver": driver}


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
