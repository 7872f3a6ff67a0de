"""``python -m tests.soak``: see the package."""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests import run
from tests.engine.harness import tail
from tests.soak import resources
from tests.soak.drive import drive
from tests.soak.faults import FAULTS, impossible
from tests.soak.settings import SETTINGS
from tests.soak.soak import Soak, running

Report = dict[str, Any]


def soak_once(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run and its report."""
    gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else None
    facts = {
        "SGLang": version("sglang"),
        "device": arguments.device,
        "machine": gpu or run.cpu(),
        "seed": arguments.seed,
    }
    counts: dict[str, int] = {}
    with running(SETTINGS[arguments.device], arguments.seed, folder) as soak:
        start, result = time.monotonic(), "passed"
        try:
            drive(soak, arguments.updates, counts, arguments.only)
            if leaks := resources.leaks(soak.samples):
                result = f"LEAKED: {'; '.join(leaks)}"
        except Exception as error:  # noqa: BLE001  (a violation, or a trainer or client failed)
            result = f"FAILED at {soak.step}: {type(error).__name__}: {error}"
            print(f"{tail(soak.server.log)}\n\n{result}", file=sys.stderr)
            if arguments.output:
                shutil.copy(soak.server.log, arguments.output.with_suffix(".log"))
        facts |= {"result": result, "policies": soak.judge.policies}
        found = report(soak, counts, time.monotonic() - start, facts)
        return {**found, "samples": soak.samples}


def report(soak: Soak, counts: dict[str, int], seconds: float, facts: Report) -> Report:
    """The figures of a run so far."""
    growth, slopes = resources.growth(soak.samples), resources.slopes(soak.samples)
    return {
        **facts,
        "commit": run.commit(),
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        "seconds": round(seconds),
        "updates": soak.updates,
        "faults": counts,
        "impossible": impossible(),
        "heals": soak.heals,
        "quarantines": soak.quarantines,
        "tokens": soak.judge.tokens,
        "mixed tokens": soak.judge.mixed_tokens,
        "sequences of several versions": soak.judge.mixed_sequences,
        "requests refused in quarantine": soak.clients.refused,
        "difference": soak.judge.summary(),
        "bounds": {"token": soak.setting.token_bound, "segment": soak.setting.segment_bound},
        "growth": {name: round(grown, 1) for name, grown in growth.items()},
        "slopes": {name: round(slope, 1) for name, slope in slopes.items()},
    }


def shown(report: Report) -> str:
    """A line for each figure, but for long lists."""
    lines = []
    for name, value in report.items():
        if name in ("policies", "samples"):
            continue
        if isinstance(value, dict):
            value = [f"{key} {of}" for key, of in value.items()]
        if isinstance(value, list):
            value = ", ".join(map(str, value))
        lines.append(f"{name}: {value}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=SETTINGS, default="cpu")
    parser.add_argument("--only", action="append", default=[], choices=FAULTS, help="these faults")
    parser.add_argument("--output", type=Path, help="JSON of this run")
    arguments = parser.parse_args()
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the server as well
    print(f"seed {arguments.seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        found = soak_once(arguments, Path(folder))
    if arguments.output:
        arguments.output.write_text(json.dumps(found))
    print(shown(found))
    return int(found["result"] != "passed")


if __name__ == "__main__":
    sys.exit(main())
