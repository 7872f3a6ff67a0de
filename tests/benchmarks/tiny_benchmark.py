"""A benchmark of a few lines, for the runner's tests."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.benchmark import LAYERS, Benchmark, Job, Measurement, Option, Run

CRASHED = """Scheduler hit an exception: Traceback
IndexError: out of range
RuntimeError: the engine is gone"""


@dataclass(frozen=True)
class Case:
    """What a process does."""

    name: str


def measure(case: Case, run: Run) -> list[Measurement]:
    print("measuring", case.name, flush=True)
    assert run.folder.is_dir() and "measuring" in run.log.read_text()
    match case.name:
        case "ours":
            assert "SGLANG_PLUGINS" not in os.environ
            assert os.environ["MINE"] == "1"
        case "stock":
            assert os.environ["SGLANG_PLUGINS"] == "none"
        case "crash":
            raise MemoryError("too much")
        case "killed":
            print(CRASHED, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(os.environ["PID_FILE"]).write_text(str(child.pid))
            time.sleep(600)
        case "early":
            os._exit(0)
    values = {"step_ms": [3.0, 1.0, 2.0] * run.options["repeats"]}
    return [{"arm": case.name, "model": "m", "case": "c", "values": values}]


BENCHMARK = Benchmark(
    jobs=(
        Job("m/good", Case("good")),
        Job("m/ours", Case("ours"), environ={"MINE": "1"}),
        Job("m/stock", Case("stock"), stock=True),
        Job("m/crash", Case("crash"), by_default=False),
        Job("killed", Case("killed"), by_default=False),
        Job("hangs", Case("hangs"), by_default=False),
        Job("early", Case("early"), by_default=False),
    ),
    measure=measure,
    limit_s=60.0,
    options=(Option("repeats", "of each job", default=1), LAYERS),
    gpu="unused",
    facts={"engine": "tiny", "layers": (1, 2)},
)
