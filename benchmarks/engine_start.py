"""One start of the start benchmark, in this process: engine_start.py JOB writes the job's report.

Only light modules are imported above ``run``, so that importing SGLang is timed with all it loads,
and so that SGLang's own processes, which import this file again, start as they do for anyone.
"""

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import models

DEVICE = "cuda"
LENGTHS = [1, 2, 700, 1000, 3001, 3333, 4095, 4096]
"""Lengths of single prompts, besides those beside a tile's edge and ``DRAWN`` random ones."""
EDGES = (16, 32, 64, 128, 192, 256, 320, 512, 1024, 1536, 2048)
DRAWN = 40
LARGEST_BATCH = 40
CHUNKED = (30, 900, 1800)
"""So many prompts at once, of lengths in this range: several share a chunk, at any boundary."""

Request = tuple[list[int], int]
"""Lengths of a batch's prompts, and the new tokens of each."""


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Import SGLang, start the engine of ``job``, serve, and report times and compiled kernels.

    Raises:
        RuntimeError: the engine did not answer a request in full.
    """
    started = time.perf_counter()
    from sglang import Engine

    import_s = time.perf_counter() - started
    folder, cache = Path(job["folder"]), Path(job["cache"])
    shape = replace(models.MODELS[job["model"]], layers=job["layers"])
    (folder / "config.json").write_text(json.dumps(models.config(shape)))
    before = kernels(cache)
    started = time.perf_counter()
    engine = Engine(model_path=str(folder), **job["engine"])
    start_s = time.perf_counter() - started
    at_start = kernels(cache)
    if job["engine"]["quantization"] == "fp8rl":
        give_weights(engine, shape)
    count = serve(engine, shape.vocab)
    after = kernels(cache)
    engine.shutdown()
    return {
        "layers": shape.layers,
        "requests": count,
        "late": after - at_start,
        "values": {
            "start_s": [start_s],
            "import_s": [import_s],
            "kernels_compiled": [(at_start - before).total()],
            "kernels_compiled_after_start": [(after - at_start).total()],
        },
    }


def kernels(cache: Path) -> Counter[str]:
    """How many kernels of each name DeepGEMM's cache folder holds."""
    return Counter(entry.name.split(".")[1] for entry in cache.glob("cache/kernel.*"))


def give_weights(engine: Any, shape: models.Shape) -> None:
    """Update an fp8rl engine on dummy weights, which is quarantined until then."""
    import trainer_bridge
    from benchmarks import weights

    trainer_bridge.update(weights.bf16_module(shape, DEVICE), engine, version=0)


def requests(rng: random.Random) -> Iterator[Request]:
    """Prefill at odd sizes, decode at each batch size, and chunks of several prompts."""
    beside = [edge + step for edge in EDGES for step in (-1, 0, 1)]
    drawn = [rng.randrange(1, max(LENGTHS) + 1) for _ in range(DRAWN)]
    for length in sorted({*LENGTHS, *beside, *drawn}):
        yield [length], 1
    for batch in range(1, LARGEST_BATCH + 1):
        yield [3] * batch, 6
    prompts, least, most = CHUNKED
    yield [rng.randrange(least, most) for _ in range(prompts)], 2


def serve(engine: Any, vocab: int) -> int:
    """Serve all of ``requests``, one after the other; their number."""
    rng = random.Random(0)
    count = 0
    for count, (lengths, new) in enumerate(requests(rng), start=1):
        replies = engine.generate(
            input_ids=[rng.choices(range(vocab), k=length) for length in lengths],
            sampling_params={"max_new_tokens": new, "temperature": 0, "ignore_eos": True},
        )
        got = [len(reply["output_ids"]) for reply in replies]
        if got != [new] * len(lengths):
            raise RuntimeError(f"request {count} for {new} tokens each was answered with {got}")
    return count


if __name__ == "__main__":  # SGLang spawns its processes, which import this file again
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(job["report"]).write_text(json.dumps(run(job)))
