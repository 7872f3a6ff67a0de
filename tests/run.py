"""Run the test suites of several SGLang versions side by side, and say at the end what they did.

Each plan is a target of the Makefile, such as ``test`` and ``test-full``. A suite is one pytest
process in the environment of its SGLang version under ``.venv/``. Its lines appear as they come,
marked with the suite; a suite that fails stops no other. Standard library only.
"""

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
OLDEST, NEWEST = "0.5.17", "0.5.23"
SETTINGS = ("OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
"""Variables by which the arithmetic of the CPU changes; the summary states them."""


@dataclass(frozen=True)
class Suite:
    """One pytest process: which tests, on which SGLang."""

    name: str
    sglang: str
    arguments: tuple[str, ...]
    families: str = ""
    """``FP8RL_TEST_FAMILIES``: the model families that are loaded; empty for all."""
    environment: str = ""
    """Folder under ``.venv/``; that of the SGLang version where it is empty."""
    may_skip: bool = True
    """Whether the suite passes when one of its tests is skipped."""

    @property
    def label(self) -> str:
        return f"{self.name} {self.sglang}"

    @property
    def python(self) -> Path:
        return self._folder / "bin" / "python"

    @property
    def is_installed(self) -> bool:
        return (self._folder / ".ready").exists()

    @property
    def _folder(self) -> Path:
        return ROOT / ".venv" / (self.environment or self.sglang)


FAST = ("-m", "not engine and not gpu")
ENGINE = ("--verbose", "-m", "engine and not full and not gpu")
ALL_ENGINE = ("--verbose", "-m", "engine and not gpu")
MEGATRON = (
    "tests/engine/test_megatron.py",
    "tests/examples/test_megatron.py",
    "tests/integrations/slime/test_engine.py",
)
"""Beside SGLang 0.5.23 Megatron cannot be imported on a host without NVIDIA's driver."""
LAYOUTS_OF_OLDEST = ("qwen3-tp1", "qwen3_moe-tp2")
# The oldest version serves and updates a dense model and experts in `make test`, and releases
# memory, for which the newest needs a GPU; what differs of it otherwise, tests of settings see.
ENGINES_OF_OLDEST = (
    *MEGATRON,
    *("tests/engine/test_server.py", "tests/engine/test_updates.py"),
    *("-k", " or ".join(("megatron", "slime", "a_release", *LAYOUTS_OF_OLDEST))),
)
OF_SETTINGS = (
    *(
        f"tests/sgl_fp8rl/engine/test_{name}.py"
        for name in ("arguments", "fusion", "plugin", "settings", "startup")
    ),
    "tests/sgl_fp8rl/test_compat.py",
)
"""Fast tests of what SGLang resolves, and of what we name of it: these differ between versions."""
VERL = (
    "--verbose",
    "tests/trainer_bridge/test_correction_verl.py",
    "tests/integrations/verl",
)


SLOW = (ROOT / "tests" / "slow.txt").read_text().split()
"""Fast tests that `make quick` leaves out: of three seconds and more, on a busy machine."""
QUICK = (
    "--quiet",
    *FAST,
    "--numprocesses=2",
    "--dist=worksteal",
    *(f"--deselect={test}" for test in SLOW),
    *("tests/server_args", "tests/sgl_fp8rl", "tests/trainer_bridge", "tests/integrations"),
    "--ignore=tests/integrations/trl",  # whose conftest.py imports TRL
    "tests/fuzz",
    *(f"tests/{file.name}" for file in sorted((ROOT / "tests").glob("test_*.py"))),
)


def _fast(sglang: str) -> tuple[Suite, ...]:
    """All fast tests, in parts that take about as long as each other."""
    folders = "tests/sgl_fp8rl", "tests/trainer_bridge"
    rest = [f"--ignore={folder}" for folder in folders]
    return (
        *(Suite(f"fast, {Path(folder).name}", sglang, (*FAST, folder)) for folder in folders),
        Suite("fast, all else", sglang, (*FAST, *rest)),
    )


# The longest first: `JOBS` run at once.
PLANS: dict[str, tuple[Suite, ...]] = {
    "quick": (Suite("quick", "none", QUICK, environment="quick"),),
    "fast": (Suite("fast", NEWEST, FAST),),
    "test": (
        Suite(
            "engine", NEWEST, ENGINE, "qwen2,glm4,mixtral,qwen3_ragged,smollm2,deepseek_v3,gemma"
        ),
        Suite("engine", OLDEST, (*ENGINE, *ENGINES_OF_OLDEST)),
        Suite("settings", OLDEST, (*FAST, *OF_SETTINGS)),
        *_fast(NEWEST),
    ),
    "test-full": (
        Suite("engine", NEWEST, ALL_ENGINE),
        Suite("engine", OLDEST, ALL_ENGINE),
        *_fast(NEWEST),
        *_fast(OLDEST),
    ),
    "verl": (Suite("verl", OLDEST, VERL, environment="verl", may_skip=False),),
    "guarantees": (
        Suite("guarantees", NEWEST, ("--verbose", "-m", "guarantee and not gpu")),
        Suite("guarantees", OLDEST, ("--verbose", "-m", "guarantee and engine and not gpu")),
    ),
}
JOBS = 2
"""An engine mostly starts, which takes one core."""
LONGEST_ERROR = 600
"""Characters of one error in the summary."""
LAST_LINES = 3
"""Of an error's message: a rank's ends with where it failed, and with what."""
COMPARISON = ("assert ", "+  where ")
"""How pytest begins the lines in which it shows what an ``assert`` compared."""
running: set["subprocess.Popen[str]"] = set()


@dataclass(frozen=True)
class Result:
    """What became of a suite."""

    suite: Suite
    status: int
    """pytest's exit status."""
    seconds: float
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: tuple[str, ...] = ()
    """The tests that failed, as pytest names them, each with the ends of its error."""

    @property
    def is_well(self) -> bool:
        ran = self.status == 0 and self.passed > 0 and not self.failed
        return ran and (self.suite.may_skip or not self.skipped)

    @property
    def verdict(self) -> str:
        if not self.suite.is_installed:
            return "NOT INSTALLED"
        if self.is_well:
            return "passed"
        if self.failed:
            return "FAILED"
        ended = f"pytest ended with status {self.status}"
        return f"FAILED: {ended if self.status else 'tests were skipped'}"


def run(suite: Suite, extra: Sequence[str]) -> Result:
    """Run one suite to its end, whatever that is."""
    if not suite.is_installed:
        return Result(suite, 1, 0.0)
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    if suite.families:
        environment.setdefault("FP8RL_TEST_FAMILIES", suite.families)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "results.xml"
        options = [f"--junitxml={xml}", "--durations=10", *suite.arguments, *extra]
        command = [str(suite.python), "-m", "pytest", *options]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        running.add(process)
        assert process.stdout is not None
        for line in process.stdout:
            print(f"[{suite.label}] {line}", end="", flush=True)
        status = process.wait()
        running.discard(process)
        seconds = time.monotonic() - start
        return Result(suite, status, seconds, *read(xml))


def read(xml: Path, module: str | None = None) -> tuple[int, int, int, tuple[str, ...]]:
    """Passed, failed, skipped and what failed with which error, from a JUnit file.

    Args:
        module: count its tests alone.
    """
    if not xml.exists():  # pytest was ended from outside
        return 0, 0, 0, ()
    failures, skipped, passed = [], 0, 0
    for case in ElementTree.parse(xml).iter("testcase"):
        if module not in (None, case.get("classname")):
            continue
        failure = next((f for f in case if f.tag in ("failure", "error")), None)
        if failure is not None:
            file = case.get("classname", "").replace(".", "/")
            failures.append(f"{file}.py::{case.get('name')}: {_ends(failure)}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return passed, len(failures), skipped, tuple(failures)


def _ends(failure: ElementTree.Element) -> str:
    """The first line of an error and the last ones; CI may keep no more of the output than the
    summary. pytest marks its lines; the attribute ``message`` has only where a long one begins."""
    marked = [line[1:] for line in (failure.text or "").splitlines() if line.startswith("E ")]
    lines = [line.strip() for line in marked or failure.get("message", "").splitlines()]
    lines = [line for line in lines if line]
    while len(lines) > 1 and lines[-1].startswith(COMPARISON):
        lines.pop()  # it says less than the message before it
    if len(lines) > 1 + LAST_LINES:
        lines = [lines[0], "...", *lines[-LAST_LINES:]]
    text = " / ".join(lines)
    half = LONGEST_ERROR // 2
    return text if len(text) <= LONGEST_ERROR else f"{text[:half]} ... {text[-half:]}"


def summary(plan: str, results: list[Result], seconds: float) -> str:
    """What ran, on what, and how it ended, as Markdown."""
    settings = ", ".join(f"{name}={os.environ.get(name, 'unset')}" for name in SETTINGS)
    lines = [
        f"`make {plan}`, {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, commit {commit()}, "
        f"{duration(seconds)} in all",
        "",
        f"{cpu()}, {os.cpu_count()} cores, Python {platform.python_version()}, {settings}",
        "",
        "| suite | SGLang | result | passed | failed | skipped | time |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.suite.name} | {r.suite.sglang} | {r.verdict} | {r.passed} | {r.failed} "
        f"| {r.skipped} | {duration(r.seconds)} |"
        for r in results
    ]
    failed = [f"- [{r.suite.label}] {name}" for r in results for name in r.failures]
    return "\n".join([*lines, *(["", "Failed:", *failed] if failed else [])])


def duration(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def commit() -> str:
    """The commit, with a mark where files differ from it; that of a copy is in ``FP8RL_COMMIT``."""
    if named := os.environ.get("FP8RL_COMMIT"):
        return named
    command = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu() -> str:
    """The processor's name, as Linux gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("plan", choices=PLANS)
    arguments, extra = parser.parse_known_args()  # the rest is pytest's
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    start = time.monotonic()
    with ThreadPoolExecutor(JOBS) as pool:
        futures = [pool.submit(run, suite, extra) for suite in PLANS[arguments.plan]]
        try:
            results = [future.result() for future in futures]
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.terminate()  # pytest then ends the engines that it started
            raise
    print(f"\n{summary(arguments.plan, results, time.monotonic() - start)}\n")
    return int(not all(result.is_well for result in results))


if __name__ == "__main__":
    sys.exit(main())
