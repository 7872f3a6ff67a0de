"""One arm of the update benchmark, in this process: arms.py JOB writes the job's report.

The process is the trainer and holds the engine, both on one GPU. Stock SGLang answers an update
when its copies are queued, not when they are done, so its wall time may be short by the last of
them; ours answers when every kernel has ended.
"""

import itertools
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import cases, measuring, models, result_rows, stock_push, traffic, weights

DEVICE = "cuda"
WARM_UP = 2  # the second finds the weights where they were, so the third and later are mapped
WATCHED = 3
"""Updates after the timed ones, during which free memory is looked at; that may slow them."""
PROMPT = list(range(1000, 1064))
NEW_TOKENS = 4
COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "grammar_backend": "none",
    "log_level": "warning",
    "dtype": "bfloat16",
    "attention_backend": "flashinfer",
    "cuda_graph_max_bs_decode": 8,
    "cuda_graph_backend_prefill": "disabled",
    # half of a card of 141 GB: the trainer's BF16 weights must fit beside it
    "mem_fraction_static": 0.5,
    "max_total_tokens": 16384,
}

Update = Callable[[int], Any]
Logprobs = Callable[[], tuple[list[float], list[int] | None]]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Start the engine of ``job``, update it again and again, and report.

    Raises:
        RuntimeError: the case did not do what its name says.
    """
    import sglang

    case = cases.find(job["arm"], job["case"])
    shape = replace(models.MODELS[job["model"]], layers=job["layers"])
    folder = Path(job["folder"])
    copy_tb_s = measuring.copy_tb_s()
    (folder / "config.json").write_text(json.dumps(models.config(shape)))
    if case.checkpoint_layers is not None:
        weights.save(weights.hf_named(weights.bf16_module(shape, DEVICE)), folder)
        torch.cuda.empty_cache()
    started = time.perf_counter()
    engine = sglang.Engine(model_path=str(folder), **COMMON, **case.engine)
    start_s = time.perf_counter() - started
    # after the engine, which must not inherit the allocator's setting
    if case.mapped is False:
        use_expandable_segments()
    given, tensors = trainer(case, shape)
    update = stock_update(engine, given, case) if case.stock else our_update(engine, given)
    report = measure(
        update, lambda: weights.renew(tensors), lambda: logprobs(engine), job["updates"]
    )
    parameters = list(models.parameters(shape))
    engine.shutdown()
    return finish(report | {"copy_tb_s": copy_tb_s, "start_s": start_s}, case, parameters)


def trainer(case: cases.Case, shape: models.Shape) -> tuple[Any, list[torch.Tensor]]:
    """What the update is given, and the tensors that ``renew`` changes."""
    if case.source == "fp8":
        named = weights.fp8_named(shape, DEVICE)
        return named, [tensor for _, tensor in named]
    module = weights.bf16_module(shape, DEVICE)
    return (weights.hf_named(module) if case.stock else module), list(module.parameters())


def use_expandable_segments() -> None:
    """Take this process's next allocations from expandable segments, which cannot be exported."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    if not any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()):
        raise RuntimeError("the allocator did not take expandable segments; use another torch")


def stock_update(engine: Any, named: weights.Named, case: cases.Case) -> Update:
    """Stock SGLang's fastest colocated path: flattened buckets over CUDA IPC."""
    assert case.bucket_bytes is not None
    planned = list(stock_push.buckets(named, case.bucket_bytes))

    def update(version: int) -> None:
        for tensors, last in planned:
            stock_push.send(engine, tensors, last, f"update {version}")

    return update


def our_update(engine: Any, given: Any) -> Update:
    """``trainer_bridge.update``."""
    import trainer_bridge

    return lambda version: trainer_bridge.update(given, engine, version=version)


def logprobs(engine: Any) -> tuple[list[float], list[int] | None]:
    """Logprobs of the prompt's tokens, and the policy versions of new ones if the engine tells."""
    replies = engine.generate(
        input_ids=[PROMPT],
        sampling_params={"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
    )
    meta = replies[0]["meta_info"]
    values = [entry[0] for entry in meta["input_token_logprobs"][1:]]
    return values, meta.get("policy_version")


def measure(
    update: Update, renew: Callable[[], None], logprobs: Logprobs, updates: int
) -> dict[str, Any]:
    """Update to new values: warm-up, ``updates`` timed ones, and a few with an eye on memory.

    Extra memory is what is free before the first update, less the least that is free during later
    ones, less what the first generation takes for itself: a bucket that is kept counts.

    Raises:
        RuntimeError: the engine does not generate with the last weights.
    """
    torch.cuda.empty_cache()
    free = measuring.free_bytes()
    versions = itertools.count()

    def one() -> tuple[float, Any]:
        renew()
        version = next(versions)
        return measuring.timed(lambda: update(version))

    one()
    before = measuring.free_bytes()
    first, _ = logprobs()
    free -= before - measuring.free_bytes()
    for _ in range(WARM_UP - 1):
        one()
    timed = [one() for _ in range(updates)]
    extra = []
    for _ in range(WATCHED):
        renew()
        with measuring.LeastFree() as least:
            update(next(versions))
        extra.append((free - least.bytes) / 2**30)
    last, served = logprobs()
    version = next(versions) - 1
    if not all(map(math.isfinite, last)):
        raise RuntimeError("the engine's logprobs are not finite after the last update")
    if served is not None and set(served) != {version}:
        raise RuntimeError(f"the engine generated with version {served}, not with {version}")
    return {
        "times_ms": [ms for ms, _ in timed],
        "results": [result for _, result in timed],
        "extra_gib": extra,
        "logprob_changed": last != first,
        "policy_version": None if served is None else version,
    }


def finish(
    report: dict[str, Any], case: cases.Case, parameters: list[models.Parameter]
) -> dict[str, Any]:
    """Turn what was measured into the values of each metric.

    Raises:
        RuntimeError: an update did not carry the whole model, or weights were mapped where the
            case says a bucket, or the other way round.
    """
    results = report.pop("results")
    times_ms, extra_gib = report.pop("times_ms"), report.pop("extra_gib")
    ours = [] if case.stock else results
    mapped = [result.mapped_bytes for result in ours] or [0]
    if (case.mapped and not all(mapped)) or (case.mapped is False and any(mapped)):
        raise RuntimeError(f"'{case.name}' read {min(mapped)} to {max(mapped)} bytes in place")
    # our trainer side quantizes into the bucket, so that it holds what the engine keeps
    bucket = None if all(mapped) else "bf16" if case.stock else case.target
    payload = traffic.payload_bytes(parameters, bucket or case.source)
    if any(result.bytes != payload for result in ours):
        raise RuntimeError(f"an update carried {ours[0].bytes} bytes, the model has {payload}")
    report |= {
        "source": case.source,
        "parameters": sum(p.numel for p in parameters),
        "layers": sum("input_layernorm" in p.name for p in parameters),
        "mapped_share": min(mapped) / payload,
        "moved_bytes": traffic.update_traffic(parameters, case.source, case.target, bucket),
    }
    gpu_ms = [1e3 * result.gpu_seconds for result in ours if result.gpu_seconds is not None]
    values = result_rows.measured(times_ms, gpu_ms, parameters, report)
    for stage in ours[0].seconds if ours else ():
        if stage != "total":
            values[f"update_{stage}_ms"] = [1e3 * result.seconds[stage] for result in ours]
    return report | {"values": values | {"peak_extra_gib": extra_gib}}


if __name__ == "__main__":  # SGLang spawns its processes, which import this file again
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(job["report"]).write_text(json.dumps(run(job)))
