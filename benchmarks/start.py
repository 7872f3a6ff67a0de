"""Engine starts of the Qwen3-8B shape on one GPU, and the DeepGEMM kernels that they compile.

One start each: ours with an empty DeepGEMM cache, ours with the kernels that this compiled, and
stock SGLang in block FP8 with the same kernels and without its warm-up. Then requests are served,
and kernels that are compiled late are counted. Other caches, FlashInfer's above all, are the
user's: on a new machine run it twice.
"""

# Nothing that imports torch may be imported here: importing SGLang is timed with all it loads.
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.benchmark import LAYERS, Benchmark, Job, Measurement, Option, Run
from benchmarks.engines import models
from benchmarks.engines.keywords import BLOCK_FP8

DEVICE = "cuda"
MODEL = "qwen3-8b"
GRAPHS = 32
ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "grammar_backend": "none",
    "log_level": "info",  # has the lines of the warm-up
    "attention_backend": "flashinfer",
    "cuda_graph_backend_prefill": "disabled",
    "chunked_prefill_size": 8192,
    "disable_radix_cache": True,
    "random_seed": 0,
    # the trainer's BF16 weights must fit beside it
    "mem_fraction_static": 0.6,
}
PRECOMPILE, FAST_WARM_UP = "SGLANG_JIT_DEEPGEMM_PRECOMPILE", "SGLANG_JIT_DEEPGEMM_FAST_WARMUP"
CACHE_VARIABLE = "SGLANG_DG_CACHE_DIR"
_AHEAD = re.compile(
    r"(?:Compiled DeepGEMM kernels in|DeepGEMM kernels side by side failed after) ([\d.]+) s"
)
_BAR_BEGINS = "DeepGEMM warmup:   0%"
_BAR_ENDS = re.compile(r"DeepGEMM warmup: 100%\|[^|]*\| (\d+)/\1 \[[^,\]]*, *([\d.]+)(it/s|s/it)\]")

LENGTHS = [1, 2, 700, 1000, 3001, 3333, 4095, 4096]
"""Lengths of single prompts, besides those beside a tile's edge and ``DRAWN`` random ones."""
EDGES = (16, 32, 64, 128, 192, 256, 320, 512, 1024, 1536, 2048)
DRAWN = 40
LARGEST_BATCH = 40
CHUNKED = (30, 900, 1800)
"""So many prompts at once, of lengths in this range: several share a chunk, at any boundary."""

Request = tuple[list[int], int]
"""Lengths of a batch's prompts, and the new tokens of each."""


@dataclass(frozen=True)
class Case:
    """One start."""

    arm: str
    name: str
    engine: dict[str, Any]
    """Keywords of ``sglang.Engine`` besides those that all starts share."""
    warm_up: bool = True
    """Whether DeepGEMM is to be warmed up."""


COLD = Case("fp8rl", "cold DeepGEMM cache", {"quantization": "fp8rl"})
CASES = (
    COLD,
    Case("fp8rl", "kernels compiled", {"quantization": "fp8rl"}),
    Case("stock-block-fp8", "kernels compiled, warm-up off", BLOCK_FP8, warm_up=False),
)


def measure(case: Case, run: Run) -> list[Measurement]:
    """Import SGLang, start the engine and serve; returns times and compiled kernels.

    Raises:
        RuntimeError: the engine did not answer a request in full, or the log has a warm-up of
            DeepGEMM where the case has none, or the other way round.
    """
    cache = run.shared
    os.environ[CACHE_VARIABLE] = str(cache)
    started = time.perf_counter()
    from sglang import Engine

    import_s = time.perf_counter() - started
    shape = models.MODELS[MODEL]
    shape = replace(shape, layers=run.options["layers"] or shape.layers)
    models.save_config(shape, run.folder)
    graphs = {"cuda_graph_max_bs_decode": run.options["graphs"]}
    before = kernels(cache)
    started = time.perf_counter()
    engine = Engine(model_path=str(run.folder), **ENGINE, **graphs, **case.engine)
    start_s = time.perf_counter() - started
    at_start = kernels(cache)
    if case.arm == "fp8rl":
        give_weights(engine, shape)
    serve(engine, shape.vocab)
    after = kernels(cache)
    engine.shutdown()
    warm_up_s = deep_gemm_s(run.log.read_text(errors="replace"))
    if (warm_up_s is not None) is not case.warm_up:
        raise RuntimeError(f"the log has {'no' if case.warm_up else 'a'} warm-up of DeepGEMM")
    values = {
        "start_s": [start_s],
        "import_s": [import_s],
        "deep_gemm_s": [warm_up_s or 0.0],
        "kernels_compiled": [(at_start - before).total()],
        "kernels_compiled_after_start": [(after - at_start).total()],
    }
    return [{"arm": case.arm, "model": MODEL, "case": case.name, "values": values}]


def deep_gemm_s(log: str) -> float | None:
    """Seconds of DeepGEMM's warm-up by an engine's log, or None where the log has none.

    Ours compiles ahead and logs how long; then a progress bar of SGLang's runs over the batch sizes
    of each weight shape, and its time is its count by its overall rate.
    """
    bars = log.split(_BAR_BEGINS)[1:]
    ended = [ends[-1] for bar in bars if (ends := _BAR_ENDS.findall(bar))]
    if not ended:
        return None
    seconds = sum(map(float, _AHEAD.findall(log)))
    for count, rate, unit in ended:
        seconds += int(count) / float(rate) if unit == "it/s" else int(count) * float(rate)
    return seconds


def kernels(cache: Path) -> Counter[str]:
    """How many kernels of each name DeepGEMM's cache folder holds."""
    return Counter(entry.name.split(".")[1] for entry in cache.glob("cache/kernel.*"))


def give_weights(engine: Any, shape: models.Shape) -> None:
    """Update an fp8rl engine on dummy weights, which is quarantined until then."""
    import trainer_bridge
    from benchmarks.engines import weights

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


def serve(engine: Any, vocab: int) -> None:
    """Serve all of ``requests``, one after the other.

    Raises:
        RuntimeError: an answer is short.
    """
    rng = random.Random(0)
    for count, (lengths, new) in enumerate(requests(rng), start=1):
        replies = engine.generate(
            input_ids=[rng.choices(range(vocab), k=length) for length in lengths],
            sampling_params={"max_new_tokens": new, "temperature": 0, "ignore_eos": True},
        )
        got = [len(reply["output_ids"]) for reply in replies]
        if got != [new] * len(lengths):
            raise RuntimeError(f"request {count} for {new} tokens each was answered with {got}")


def _job(case: Case) -> Job:
    return Job(
        f"{case.arm}/{case.name}",
        case,
        stock=not case.warm_up,
        needs=() if case == COLD else (f"{COLD.arm}/{COLD.name}",),
        environ={PRECOMPILE: None if case.warm_up else "0", FAST_WARM_UP: None},
    )


BENCHMARK = Benchmark(
    jobs=tuple(map(_job, CASES)),
    measure=measure,
    limit_s=480.0,
    options=(
        LAYERS,
        Option("graphs", "largest batch size of a CUDA graph", default=GRAPHS),
    ),
    facts={"engine": ENGINE},
)
