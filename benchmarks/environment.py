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
    """Card, driver, versions, date and commit. ``command`` is how the benchmark was started.

    Raises:
        RuntimeError: there is no NVIDIA driver.
    """
    device, driver, count = _card()
    return {
        "device": device,
        "count": count,
        "driver": driver,
        **{name: _version(package) for name, package in PACKAGES.items()},
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit(),
        "command": command,
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


def _card() -> tuple[str, str, int]:
    try:
        lines = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(
            "nvidia-smi found no GPU; run the benchmark on a machine with an NVIDIA GPU"
        ) from error
    cards = lines.splitlines()
    device, driver = cards[0].rsplit(", ", 1)
    return device, driver, len(cards)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
