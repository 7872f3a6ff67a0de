"""Full updates of an engine on another host by one trainer rank, and by two with a link each.

Needs Linux, root and iproute2, no GPU. The engine runs in a namespace of its own (``links.py``),
the second rank in another one, behind a link of its own to the engine. Parameters are sharded by
rows over the ranks, which gather them over another link that is not shaped. All share the CPU.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.benchmark import Benchmark, Job, Measurement, Option, Run
from benchmarks.engines import models, weights
from benchmarks.links import FAR, KEY, MODEL, RATES, SHAPE, engine_behind, ip, namespace, shape

BUCKET = "128MiB"
"""Two slots of 32 MiB for each rank, of which the model fills four."""
LINK, FAR_END = "10.77.2.1", "10.77.2.2"
"""The second rank's link to the engine."""
MEET, MEET_END, MEET_PORT = "10.77.3.1", "10.77.3.2", 30124
"""By which the ranks meet; not shaped."""
WARM_UP = 1
"""The first update of an engine of dummy weights is BF16."""


@dataclass(frozen=True)
class Case:
    """One link, and how many ranks have one each."""

    link: str
    ranks: int


def measure(case: Case, run: Run) -> list[Measurement]:
    """Start the engine and the ranks, and update it again and again."""
    rate, updates = RATES[case.link], run.options["updates"]
    models.save_config(SHAPE, run.folder)
    os.environ["FP8RL_KEY"] = KEY
    with ExitStack() as stack:
        options = "--fp8rl-bucket-bytes", BUCKET
        engine = stack.enter_context(engine_behind(rate, run.folder, run.log, *options))
        if case.ranks == 2:
            stack.enter_context(second_rank(rate, updates, run.log))
            os.environ["GLOO_SOCKET_IFNAME"] = "fp8rl4"
        found = train(0, case.ranks, engine, updates)
    values = {
        "update_wall_ms": [1e3 * seconds for seconds, _ in found],
        "network_mb": [size / 1e6 for _, size in found],
        "link_ms": [8e3 * size / case.ranks / rate for _, size in found],
    }
    name = f"{case.link}, {'one rank' if case.ranks == 1 else 'two ranks'}"
    return [{"arm": "fp8rl", "model": MODEL, "case": name, "values": values}]


def train(rank: int, ranks: int, engine: str | None, updates: int) -> list[tuple[float, int]]:
    """One rank: seconds and bytes of each timed update."""
    import trainer_bridge

    torch.manual_seed(0)  # ranks hold the same weights
    whole = weights.hf_named(weights.bf16_module(SHAPE, "cpu"))
    address = f"tcp://{MEET if ranks > 1 else '127.0.0.1'}:{MEET_PORT}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    named = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole}
    found = []
    for version in range(WARM_UP + updates):
        dist.barrier()
        started = time.perf_counter()
        result = trainer_bridge.update(named, engine, version=version)
        found.append((time.perf_counter() - started, result.network_bytes))
    dist.destroy_process_group()
    return found[WARM_UP:]


@contextmanager
def second_rank(rate: float, updates: int, log: Path) -> Iterator[None]:
    """Another rank of the trainer, behind a link of its own to the engine."""
    far, near = namespace(), f"{namespace()}-rank1"
    with ExitStack() as stack:
        ip("netns", "add", near)
        stack.callback(ip, "netns", "del", near)
        ip("link", "add", "fp8rl2", "netns", near, "type", "veth", "peer", "fp8rl3", "netns", far)
        ip("-n", near, "addr", "add", f"{LINK}/24", "dev", "fp8rl2")
        ip("-n", far, "addr", "add", f"{FAR_END}/24", "dev", "fp8rl3")
        shape("fp8rl2", rate, "-n", near)
        shape("fp8rl3", rate, "-n", far)
        ip("-n", near, "route", "add", FAR, "via", FAR_END)
        ip("link", "add", "fp8rl4", "type", "veth", "peer", "name", "fp8rl5", "netns", near)
        ip("addr", "add", f"{MEET}/24", "dev", "fp8rl4")
        ip("-n", near, "addr", "add", f"{MEET_END}/24", "dev", "fp8rl5")
        ip("link", "set", "fp8rl4", "up")
        for device in ("fp8rl5", "lo"):
            ip("-n", near, "link", "set", device, "up")
        module = [sys.executable, "-m", "benchmarks.far_ranks", json.dumps([1, 2, None, updates])]
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", near, *module],
                stdout=output,
                stderr=output,
                env=os.environ | {"GLOO_SOCKET_IFNAME": "fp8rl5"},
            )
        stack.callback(process.wait)
        stack.callback(process.terminate)  # it has ended, unless this rank failed
        yield


BENCHMARK = Benchmark(
    jobs=tuple(
        Job(f"{link}/{ranks}", Case(link, ranks))
        for link in ("100 Mb/s", "1 Gb/s")
        for ranks in (1, 2)
    ),
    measure=measure,
    limit_s=900.0,
    options=(Option("updates", "timed updates of a case", default=5),),
    gpu="unused",
)

if __name__ == "__main__":
    train(*json.loads(sys.argv[1]))
