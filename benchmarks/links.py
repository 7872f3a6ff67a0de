"""Updates of an engine on another host over links of several speeds: whole, and only what changed.

Needs Linux, root and iproute2, no GPU. The engine runs in a network and a mount namespace of its
own, behind a virtual link that is shaped both ways. Weights are Gaussian, with FP32 masters that
take steps of a normal distribution; the trainer rounds them to BF16 and quantizes on the CPU.
Trainer and engine share the CPU, so what they compute counts here as much as the link.
"""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.benchmark import Benchmark, Job, Measurement, Option, Run
from benchmarks.engines import models, weights
from benchmarks.engines.server import await_start

SHAPE = models.Shape(hidden=1024, intermediate=3072, layers=8, heads=8, kv_heads=8, vocab=4096)
MODEL = "118M"
RATES = {"100 Mb/s": 1e8, "1 Gb/s": 1e9, "10 Gb/s": 1e10}
STEPS = (1e-6, 3e-6, 1e-5)
"""RMS of a step, the learning rate of an Adam whose updates have RMS 1."""
KEY = "the-key-of-the-benchmark"
NEAR, FAR, PORT = "10.77.1.1", "10.77.1.2", 30123
BURST_S = 0.002
"""Of the link's token bucket."""


@dataclass(frozen=True)
class Case:
    """One link."""

    link: str


def measure(case: Case, run: Run) -> list[Measurement]:
    """Start the engine, and update it over the link."""
    import trainer_bridge

    rate = RATES[case.link]
    models.save_config(SHAPE, run.folder)
    module = weights.bf16_module(SHAPE, "cpu")
    masters = weights.masters_of(module)
    os.environ["FP8RL_KEY"] = KEY
    found: list[Measurement] = []

    def values(arm: str, name: str, results: list[tuple[float, int]]) -> None:
        measured = {
            "update_wall_ms": [1e3 * seconds for seconds, _ in results],
            "network_mb": [size / 1e6 for _, size in results],
            "link_ms": [8e3 * size / rate for _, size in results],
        }
        found.append(
            {"arm": arm, "model": MODEL, "case": f"{case.link}, {name}", "values": measured}
        )

    versions = itertools.count()

    def updates(engine: str, step: float, count: int) -> list[tuple[float, int]]:
        results = []
        for version in itertools.islice(versions, count):
            weights.take_step(module, masters, step)
            started = time.perf_counter()
            result = trainer_bridge.update(module, engine, version=version)
            results.append((time.perf_counter() - started, result.network_bytes))
        return results

    for keeps in (False, True):
        image = ["--fp8rl-image-bytes", "1GiB"] if keeps else []
        with engine_behind(rate, run.folder, run.log, *image) as address:
            # the first is BF16: an engine of dummy weights does not know its layers yet
            first, count = updates(address, STEPS[0], 1), run.options["updates"]
            if not keeps:
                values("fp8rl", "whole, BF16", first)
                values("fp8rl", "whole, FP8", updates(address, STEPS[0], count))
                continue
            updates(address, STEPS[0], 2)  # the first of FP8 is whole, the second warms up
            for step in STEPS:
                values("fp8rl-image", f"steps of {step:g}", updates(address, step, count))
    return found


@contextmanager
def engine_behind(rate: float, folder: Path, log: Path, *options: str) -> Iterator[str]:
    """The address of an engine at the other end of a link.

    Args:
        options: of its command line.
    """
    name = namespace()
    hidden = folder / "hidden"
    hidden.mkdir(exist_ok=True)
    with ExitStack() as stack:
        ip("netns", "add", name)
        stack.callback(ip, "netns", "del", name)
        ip("link", "add", "fp8rl0", "type", "veth", "peer", "name", "fp8rl1", "netns", name)
        stack.callback(ip, "link", "del", "fp8rl0")
        ip("addr", "add", f"{NEAR}/24", "dev", "fp8rl0")
        ip("-n", name, "addr", "add", f"{FAR}/24", "dev", "fp8rl1")
        shape("fp8rl0", rate)
        shape("fp8rl1", rate, "-n", name)
        ip("-n", name, "link", "set", "lo", "up")
        # its temporary folder is not seen from here, so the trainer takes it for another host
        script = f'mount -t tmpfs tmpfs "{hidden}" && TMPDIR="{hidden}" exec "$@"'
        command = [
            *("ip", "netns", "exec", name, "unshare", "--mount", "sh", "-c", script, "engine"),
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder)),
            *("--quantization", "fp8rl", "--load-format", "dummy", "--dtype", "bfloat16"),
            *("--host", FAR, "--port", str(PORT), "--api-key", KEY, "--fp8rl-listen", "any"),
            *("--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle", *options),
            *("--max-total-tokens", "2048", "--max-running-requests", "4"),
        ]
        with log.open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        address = f"http://{FAR}:{PORT}"
        await_start(process, address)
        yield address


def namespace() -> str:
    """The engine's, by the name of this process."""
    return f"fp8rl-{os.getpid()}"


def shape(device: str, rate: float, *where: str) -> None:
    """Bring a device up, at ``rate`` bits a second.

    Args:
        where: options that name its namespace.
    """
    ip(*where, "link", "set", device, "up")
    limits = ["tbf", "rate", f"{rate:.0f}", "burst", f"{max(rate * BURST_S / 8, 65536):.0f}"]
    call("tc", *where, "qdisc", "add", "dev", device, "root", *limits, "latency", "50ms")


def ip(*words: str) -> None:
    """One command of iproute2."""
    call("ip", *words)


def call(*words: str) -> None:
    """Run a command.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}; run it as root, on Linux")


BENCHMARK = Benchmark(
    jobs=tuple(Job(link, Case(link)) for link in RATES),
    measure=measure,
    limit_s=900.0,
    options=(Option("updates", "timed updates of a case", default=5),),
    gpu="unused",
)
