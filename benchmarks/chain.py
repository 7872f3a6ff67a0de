"""Versions through a folder: their bytes, and the time to publish one and to read it.

Weights and steps are those of the benchmark ``links``: Gaussian, with FP32 masters. Publisher and
follower have the cores of one CPU, one after the other; copying the folder is not timed.
"""

import time

from benchmarks.benchmark import Benchmark, Job, Measurement, Option, Run
from benchmarks.engines import models, weights
from benchmarks.links import MODEL, SHAPE, STEPS

ENGINE = {
    "quantization": "fp8rl",
    "load_format": "dummy",
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "max_total_tokens": 2048,
    "max_running_requests": 4,
    "sleep_on_idle": True,
}


def measure(_: None, run: Run) -> list[Measurement]:
    """Publish steps of each size, after a version that is whole."""
    import sglang

    import trainer_bridge
    from trainer_bridge.chain import ChainFollower, ChainPublisher, files
    from trainer_bridge.chain.index import read_index

    models.save_config(SHAPE, run.folder)
    module = weights.bf16_module(SHAPE, "cpu")
    masters = weights.masters_of(module)
    engine = sglang.Engine(model_path=str(run.folder), **ENGINE)
    trainer_bridge.update(module, engine, version=0)  # dummy weights do not know their layers
    found: list[Measurement] = []
    for step in STEPS:
        folder = run.folder / f"{step:g}"
        publisher = ChainPublisher(folder, engine, anchor_every=1000)
        follower = ChainFollower(folder)
        values: dict[str, list[float]] = {
            name: [] for name in ("files_mb", "of_whole", "publish_s", "advance_s")
        }
        for version in range(run.options["versions"] + 1):
            weights.take_step(module, masters, step)
            started = time.perf_counter()
            nbytes = publisher.publish(module, version=version, run="benchmark")
            published = time.perf_counter()
            follower.advance()
            ended = time.perf_counter()
            if follower.policy is None or follower.policy.version != version:
                raise RuntimeError(f"the follower is at {follower.policy}, not at {version}")
            times = {"publish_s": [published - started], "advance_s": [ended - published]}
            if version == 0:
                whole = nbytes
                if step == STEPS[0]:
                    (link,) = read_index(folder).links
                    tensors = sum(t.nbytes for _, t in files.read(folder, link.anchor))
                    of_whole = {"files_mb": [whole / 1e6], "of_whole": [whole / tensors]}
                    found.append(_measurement("whole", of_whole | times))
                continue
            for name, value in times.items():
                values[name] += value
            values["files_mb"].append(nbytes / 1e6)
            values["of_whole"].append(nbytes / tensors)
        found.append(_measurement(f"steps of {step:g}", values))
    engine.shutdown()
    return found


def _measurement(case: str, values: dict[str, list[float]]) -> Measurement:
    return {"arm": "fp8rl", "model": MODEL, "case": case, "values": values}


BENCHMARK = Benchmark(
    jobs=(Job("chain", None),),
    measure=measure,
    limit_s=900.0,
    options=(Option("versions", "of each size of steps", default=5),),
    gpu="unused",
)
