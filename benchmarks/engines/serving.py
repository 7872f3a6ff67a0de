"""One engine of a benchmark: its weights, its KV capacity, and the times of prefill and decode."""

import gc
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import measuring
from benchmarks.benchmark import Measurement
from benchmarks.engines import models, stock_push, traffic, weights
from benchmarks.engines.keywords import (
    Keywords,
    is_stock,
    kv_format,
    weight_format,
)

DEVICE = "cuda"
QUARTERS = 4
"""Prompts come in so many batches, each of which is a value of the prefill's time."""
DECODES = 3
BEGIN = 16
"""Tokens of a decode before those that are timed."""

Prompts = list[list[int]]


@dataclass(frozen=True)
class Load:
    """A batch of equal requests. ``new`` tokens of each are timed."""

    batch: int
    length: int
    new: int

    @property
    def name(self) -> str:
        """Sequences x tokens of each prompt."""
        return f"{self.batch}x{self.length}"

    @property
    def mean_length(self) -> float:
        """Tokens of a sequence in the middle of the timed decode."""
        return self.length + BEGIN + self.new / 2


def start(folder: str, keywords: Keywords) -> Any:
    """An engine that serves the ``config.json`` of ``folder``."""
    import sglang

    return sglang.Engine(model_path=folder, **keywords)


@contextmanager
def running(folder: Path, keywords: Keywords) -> Iterator[Any]:
    """The same, until the end of the context."""
    engine = start(str(folder), keywords)
    try:
        yield engine
    finally:
        engine.shutdown()


def give_weights(engine: Any, shape: models.Shape, keywords: Keywords) -> None:
    """The same random weights for every engine, in the form that it holds them in; but for one that
    quantizes dummy weights by itself, whose codes have the range of any others."""
    if is_stock(keywords):
        named = weights.shared(shape, DEVICE, weight_format(keywords))
        stock_push.push(engine, named, keywords.get("tp_size", 1))
    else:
        import trainer_bridge

        trainer_bridge.update(weights.shared(shape, DEVICE), engine, version=0)
    torch.cuda.empty_cache()


def generate(
    engine: Any, prompts: Prompts, new: int | Sequence[int], start_len: int = -1
) -> list[dict[str, Any]]:
    """``meta_info`` of each reply.

    Args:
        new: tokens to generate, for all prompts or for each.
        start_len: 0 for the logprobs of the prompts' own tokens as well.
    """
    each = [new] * len(prompts) if isinstance(new, int) else list(new)
    replies = engine.generate(
        input_ids=prompts,
        # without ``ignore_eos``, for which SGLang 0.5.23 holds room for whole answers
        sampling_params=[{"max_new_tokens": count, "temperature": 1.0} for count in each],
        return_logprob=True,
        logprob_start_len=start_len,
    )
    metas = [reply["meta_info"] for reply in replies]
    for meta, count in zip(metas, each, strict=True):
        got = len(meta["output_token_logprobs"])
        if got != count:
            raise RuntimeError(f"the engine answered a request for {count} tokens with {got}")
    return metas


def prompts_of(seed: int, count: int, length: int, vocab: int) -> Prompts:
    """Random token ids, the same in every process."""
    rng = random.Random(seed)
    return [rng.choices(range(1000, vocab - 1000), k=length) for _ in range(count)]


def assert_calibrated(engine: Any) -> None:
    """Check that no layer of an FP8 KV cache of ours waits for its scales."""
    if engine.fp8rl_control({"op": "layout"})["kv_cache"] is None:
        return
    if engine.fp8rl_control({"op": "kv"})["pending"]:
        raise RuntimeError("the first prefill after an update did not measure the KV scales")


def warm_up(engine: Any, load: Load, seed: int, shape: models.Shape, keywords: Keywords) -> None:
    """Prompts as long as the timed ones in whole chunks, into an empty cache: kernels for so many
    tokens are compiled here, and an engine that measures its KV scales does so."""
    stock_push.flush(engine)
    count = max(QUARTERS, keywords["chunked_prefill_size"] // load.length)
    generate(engine, prompts_of(100 + seed, count, load.length, shape.vocab), BEGIN)
    if not is_stock(keywords):
        assert_calibrated(engine)


def speed(
    keywords: Keywords, shape: models.Shape, folder: str, loads: Sequence[Load]
) -> dict[str, dict[str, list[float]]]:
    """Values by case: ``capacity``, and each load's prefill and decode."""
    copy_tb_s = measuring.copy_tb_s()
    free = measuring.idle_bytes()
    engine = start(folder, keywords)
    give_weights(engine, shape, keywords)
    values: dict[str, dict[str, list[float]]] = {
        "capacity": {
            "kv_tokens": [kv_tokens(engine)],
            "kv_tokens_floor": [capacity(keywords, shape, free)],
            "copy_tb_s": [copy_tb_s],
        }
    }
    for seed, load in enumerate(loads):
        warm_up(engine, load, seed, shape, keywords)
        prompts = prompts_of(seed, load.batch, load.length, shape.vocab)
        values[load.name] = timed_work(engine, prompts, load.new) | {
            "decode_floor_ms": [decode_floor_ms(keywords, shape, load, copy_tb_s)]
        }
    engine.shutdown()
    return values


def kv_tokens(engine: Any) -> float:
    """Tokens that the engine's KV cache holds."""
    return float(engine.get_server_info()["max_total_num_tokens"])


def timed_work(engine: Any, prompts: Prompts, new: int) -> dict[str, list[float]]:
    """``prefill_s`` of all prompts, and ``decode_step_ms`` with their KV in the prefix cache.

    A prefill value is the time of one batch of prompts times the number of batches. A step is the
    time of ``BEGIN + new`` tokens for all prompts less that of ``BEGIN``, over ``new``: the prefill
    of what is not in the prefix cache (one token of a prompt, or its last page) is in both.
    """
    size = len(prompts) // QUARTERS
    gc.disable()  # a full collection of what SGLang imports takes 0.4 s, between any two replies
    prefill = [
        QUARTERS * seconds(lambda part=part: generate(engine, part, 1))
        for part in (prompts[first : first + size] for first in range(0, len(prompts), size))
    ]
    generate(engine, prompts, BEGIN)
    steps = []
    for _ in range(DECODES):
        short = seconds(lambda: generate(engine, prompts, BEGIN))
        steps.append(1e3 * (seconds(lambda: generate(engine, prompts, BEGIN + new)) - short) / new)
    gc.enable()
    return {"prefill_s": prefill, "decode_step_ms": steps}


def seconds(action: Any) -> float:
    """Wall time."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def capacity(keywords: Keywords, shape: models.Shape, free: int) -> float:
    """Tokens that fit: the static share of what was free, less the weights, over a token's bytes.

    Ranks share weights and KV evenly. What the engine's processes take for themselves (context,
    kernels, workspaces) is not taken off.
    """
    held = traffic.payload_bytes(models.parameters(shape), weight_format(keywords))
    static = float(keywords["mem_fraction_static"] * free * keywords.get("tp_size", 1))
    return (static - held) / traffic.kv_token_bytes(shape, kv_format(keywords))


def decode_floor_ms(keywords: Keywords, shape: models.Shape, load: Load, copy_tb_s: float) -> float:
    """Least time of a step: the weights and the KV cache, read once at the bandwidth of a copy."""
    token = traffic.kv_token_bytes(shape, kv_format(keywords))
    weights = traffic.step_weight_bytes(
        models.parameters(shape), weight_format(keywords), shape.experts_read(load.batch)
    )
    moved = (weights + load.batch * load.mean_length * token) / keywords.get("tp_size", 1)
    return traffic.floor_ms(round(moved), copy_tb_s)


def measurements(
    arm: str, model: str, values: dict[str, dict[str, list[float]]]
) -> list[Measurement]:
    """A measurement of each case."""
    common = {"arm": arm, "model": model}
    return [common | {"case": name, "values": found} for name, found in values.items()]
