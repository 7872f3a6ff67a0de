"""One engine of the KV cache benchmark: capacity and speed, logprobs, or what scales cost."""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import kv_weights
import measuring
import models
import rows
import torch
import traffic
import weights
from kv_cases import CUT_LAYERS, CUT_VOCAB, ENGINE, FULL, MODEL, Case

DEVICE = "cuda"
WORK = ((128, 512, 256), (64, 8192, 256))
"""Sequences, tokens of each prompt, new tokens of each."""
QUARTERS = 4
"""Prompts come in so many batches, each of which is a value of the prefill's time."""
DECODES = 3
SEQUENCES, LENGTH = 16, 512
PROMPT, NEW = 256, 128
"""Of what is sampled to compare decode's logprobs."""
UPDATES = 40
BLOCK = 10
"""Updates of one way that are timed in a row: from one way to the other the engine opens the
weights' memory anew, which no loop does at each step."""
WARM_UP = 3  # of a block; from the second update on weights are mapped
KV_BYTES = {"auto": 2, "fp8_e4m3": 1}

Prompts = list[list[int]]


def start(case: Case, folder: str) -> Any:
    """The case's engine."""
    import sglang

    return sglang.Engine(model_path=folder, **case.keywords)


def generate(engine: Any, prompts: Prompts, new: int, start_len: int = -1) -> list[dict[str, Any]]:
    """``meta_info`` of each reply.

    Args:
        start_len: 0 for the logprobs of the prompts' own tokens as well.

    Raises:
        RuntimeError: a reply is short.
    """
    replies = engine.generate(
        input_ids=prompts,
        sampling_params={"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=start_len,
    )
    metas = [reply["meta_info"] for reply in replies]
    got = {len(meta["output_token_logprobs"]) for meta in metas}
    if got != {new}:
        raise RuntimeError(f"the engine answered a request for {new} tokens each with {got}")
    return metas


def prompts_of(seed: int, count: int, length: int, vocab: int) -> Prompts:
    """Random token ids, the same in every process."""
    rng = random.Random(seed)
    return [rng.choices(range(1000, vocab - 1000), k=length) for _ in range(count)]


def assert_calibrated(engine: Any) -> None:
    """Hold that no layer of an FP8 KV cache waits for its scales.

    Raises:
        RuntimeError: one does.
    """
    if engine.fp8rl_control({"op": "layout"})["kv_cache"] is None:
        return
    if engine.fp8rl_control({"op": "kv"})["pending"]:
        raise RuntimeError("the first prefill after an update did not measure the KV scales")


# ---- capacity and speed --------------------------------------------------------------------------


def speed(case: Case, shape: models.Shape, folder: str, copy_tb_s: float) -> list[rows.Report]:
    """KV capacity, prefill and decode of the whole model."""
    free = measuring.free_bytes()
    engine = start(case, folder)
    if not case.stock:
        import trainer_bridge

        trainer_bridge.update(kv_weights.shared(shape, DEVICE), engine, version=0)
        torch.cuda.empty_cache()
    values: dict[str, dict[str, list[float]]] = {
        "capacity": {
            "kv_tokens": [float(engine.get_server_info()["max_total_num_tokens"])],
            "kv_tokens_floor": [capacity(case, shape, free)],
        }
    }
    for seed, (batch, length, new) in enumerate(WORK):
        # whole chunks, as the timed ones: kernels for so many tokens are compiled here
        warm = max(QUARTERS, ENGINE["chunked_prefill_size"] // length)
        generate(engine, prompts_of(100 + seed, warm, length, shape.vocab), 16)
        if not case.stock:
            assert_calibrated(engine)
        values[f"{batch}x{length}"] = timed_work(
            engine, prompts_of(seed, batch, length, shape.vocab), new
        )
    values["capacity"]["copy_tb_s"] = [copy_tb_s]
    engine.shutdown()
    return [
        {"arm": case.arm, "case": name, "model": MODEL, "layers": shape.layers, "values": found}
        for name, found in values.items()
    ]


def timed_work(engine: Any, prompts: Prompts, new: int) -> dict[str, list[float]]:
    """``prefill_s`` of all prompts, and ``decode_step_ms`` with their KV in the prefix cache.

    A prefill value is the time of one batch of prompts times the number of batches; a step is the
    time of ``new`` tokens for all prompts over ``new``. That includes a short prefill: the last
    token of each prompt, or with pages of 64 tokens its last 64.
    """
    size = len(prompts) // QUARTERS
    prefill = [
        QUARTERS * seconds(lambda part=part: generate(engine, part, 1))  # type: ignore[misc]
        for part in (prompts[first : first + size] for first in range(0, len(prompts), size))
    ]
    generate(engine, prompts, 8)
    steps = [1e3 * seconds(lambda: generate(engine, prompts, new)) / new for _ in range(DECODES)]
    return {"prefill_s": prefill, "decode_step_ms": steps}


def seconds(action: Any) -> float:
    """Wall time."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def capacity(case: Case, shape: models.Shape, free: int) -> float:
    """Tokens that fit: the static share of what was free, less the weights, over a token's bytes.

    What the engine's process takes for itself (context, kernels, workspaces) is not taken off.
    """
    form = "fp8" if case.engine.get("quantization") else "bf16"
    held = traffic.payload_bytes(models.parameters(shape), form)
    token = KV_BYTES[case.engine.get("kv_cache_dtype", "auto")] * 2 * shape.layers
    token *= shape.kv_heads * shape.head_dim
    return (FULL["mem_fraction_static"] * free - held) / token


# ---- logprobs ------------------------------------------------------------------------------------


def cut_shape() -> models.Shape:
    """A few layers of the model."""
    return replace(models.MODELS[MODEL], layers=CUT_LAYERS, vocab=CUT_VOCAB)


def logprobs(case: Case, folder: str, to_score: dict[str, dict[str, Prompts]]) -> dict[str, Any]:
    """What this engine's logprobs are, for each set of weights (``kv_weights.PLANTED``).

    Args:
        to_score: by weights and arm, sequences whose last ``NEW`` tokens are to be scored.

    Returns:
        by weights: ``prefill``, logprobs of the same sequences in every process; ``sampled`` and
        ``decode``, whole sequences that were sampled here and the logprobs of their new tokens;
        ``scored``, by arm.
    """
    import trainer_bridge

    shape = cut_shape()
    engine = start(case, folder)
    found = {}
    same = prompts_of(7, SEQUENCES, LENGTH, shape.vocab)
    for version, planted in enumerate(kv_weights.PLANTED):
        module = kv_weights.module(shape, DEVICE, planted)
        scales = None
        if case.trainer_scales:
            scales = kv_weights.trainer_scales(module, shape, prompts_of(8, 8, LENGTH, shape.vocab))
        trainer_bridge.update(module, engine, version=version, kv_scales=scales)
        # the first prefill: an engine that measures its scales does so on other tokens
        generate(engine, prompts_of(8, 8, LENGTH, shape.vocab), 1)
        assert_calibrated(engine)
        prefill = [given(meta) for meta in generate(engine, same, 1, start_len=0)]
        begun = prompts_of(9, SEQUENCES, PROMPT, shape.vocab)
        metas = generate(engine, begun, NEW)
        sampled = [
            prompt + [token for _, token, *_ in meta["output_token_logprobs"]]
            for prompt, meta in zip(begun, metas, strict=True)
        ]
        found[planted] = {
            "prefill": prefill,
            "sampled": sampled,
            "decode": [[entry[0] for entry in meta["output_token_logprobs"]] for meta in metas],
            "scored": {
                arm: score(engine, sequences)
                for arm, sequences in {**to_score.get(planted, {}), case.arm: sampled}.items()
            },
        }
        del module
        torch.cuda.empty_cache()
    engine.shutdown()
    return found


def score(engine: Any, sequences: Prompts) -> list[list[float]]:
    """Prefill logprobs of the last ``NEW`` tokens of each sequence."""
    return [given(meta)[-NEW:] for meta in generate(engine, sequences, 1, start_len=0)]


def given(meta: dict[str, Any]) -> list[float]:
    """Logprobs of a prompt's own tokens; its first token has none."""
    return [entry[0] for entry in meta["input_token_logprobs"][1:]]


# ---- the cost of calibration ---------------------------------------------------------------------


def updates(case: Case, shape: models.Shape, folder: str) -> list[rows.Report]:
    """Updates with and without KV scales, in turn, from mapped memory.

    Raises:
        RuntimeError: one did not read the weights in place, or the scales are not in force.
    """
    import trainer_bridge

    engine = start(case, folder)
    module = weights.bf16_module(shape, DEVICE)
    scales = torch.ones(shape.layers, 3, shape.kv_heads, device=DEVICE)
    times: dict[str, list[float]] = {"with KV scales": [], "without KV scales": []}
    for version, (name, is_timed) in enumerate(turns()):
        weights.renew(module.parameters())
        scales.uniform_(0.5, 2.0)
        sent = scales if name == "with KV scales" else None
        ms, result = measuring.timed(
            lambda version=version, sent=sent: trainer_bridge.update(  # type: ignore[misc]
                module, engine, version=version, kv_scales=sent
            )
        )
        if is_timed and result.mapped_bytes < 0.99 * result.bytes:
            raise RuntimeError(f"update {version} read {result.mapped_bytes} bytes in place")
        if is_timed:
            times[name].append(ms)
        if sent is not None:
            held = torch.tensor(engine.fp8rl_control({"op": "kv"})["scales"])
            if not torch.equal(held, sent.amax(-1, keepdim=True).expand_as(sent).cpu()):
                raise RuntimeError(f"the scales of update {version} are not in force")
    engine.shutdown()
    return [
        {
            "arm": case.arm,
            "case": f"update, {name}",
            "model": MODEL,
            "layers": shape.layers,
            "values": {"update_wall_ms": found},
        }
        for name, found in times.items()
    ]


def turns() -> Iterator[tuple[str, bool]]:
    """Blocks with scales and without in turn, and whether an update is timed."""
    for _ in range(UPDATES // BLOCK):
        for name in ("with KV scales", "without KV scales"):
            for number in range(WARM_UP + BLOCK):
                yield name, number >= WARM_UP
