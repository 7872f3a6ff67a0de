"""One engine of the KV cache benchmark: capacity and speed, logprobs, or what scales cost."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks import kv_weights, measuring, models, result_rows, serving, weights
from benchmarks.kv_cases import CUT_LAYERS, CUT_VOCAB, MODEL, Case

WORK = (serving.Load(128, 512, 256), serving.Load(64, 8192, 256))
SEQUENCES, LENGTH = 16, 512
PROMPT, NEW = 256, 128
"""Of what is sampled to compare decode's logprobs."""
UPDATES = 40
BLOCK = 10
"""Updates of one way that are timed in a row: from one way to the other the engine opens the
weights' memory anew, which no loop does at each step."""
WARM_UP = 3  # of a block; from the second update on weights are mapped


# ---- capacity and speed --------------------------------------------------------------------------


def speed(case: Case, shape: models.Shape, folder: str) -> list[result_rows.Report]:
    """KV capacity, prefill and decode of the whole model."""
    values = serving.speed(case.keywords, shape, folder, WORK)
    return serving.reports(case.arm, MODEL, shape.layers, values)


# ---- logprobs ------------------------------------------------------------------------------------


def cut_shape() -> models.Shape:
    """A few layers of the model."""
    return replace(models.MODELS[MODEL], layers=CUT_LAYERS, vocab=CUT_VOCAB)


def logprobs(
    case: Case, folder: str, to_score: dict[str, dict[str, serving.Prompts]]
) -> dict[str, Any]:
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
    engine = serving.start(folder, case.keywords)
    found = {}
    same = serving.prompts_of(7, SEQUENCES, LENGTH, shape.vocab)
    for version, planted in enumerate(kv_weights.PLANTED):
        module = kv_weights.module(shape, serving.DEVICE, planted)
        scales = None
        if case.trainer_scales:
            scales = kv_weights.trainer_scales(
                module, shape, serving.prompts_of(8, 8, LENGTH, shape.vocab)
            )
        trainer_bridge.update(module, engine, version=version, kv_scales=scales)
        # the first prefill: an engine that measures its scales does so on other tokens
        serving.generate(engine, serving.prompts_of(8, 8, LENGTH, shape.vocab), 1)
        serving.assert_calibrated(engine)
        prefill = [given(meta) for meta in serving.generate(engine, same, 1, start_len=0)]
        begun = serving.prompts_of(9, SEQUENCES, PROMPT, shape.vocab)
        metas = serving.generate(engine, begun, NEW)
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


def score(engine: Any, sequences: serving.Prompts) -> list[list[float]]:
    """Prefill logprobs of the last ``NEW`` tokens of each sequence."""
    return [given(meta)[-NEW:] for meta in serving.generate(engine, sequences, 1, start_len=0)]


def given(meta: dict[str, Any]) -> list[float]:
    """Logprobs of a prompt's own tokens; its first token has none."""
    return [entry[0] for entry in meta["input_token_logprobs"][1:]]


# ---- the cost of calibration ---------------------------------------------------------------------


def updates(case: Case, shape: models.Shape, folder: str) -> list[result_rows.Report]:
    """Updates with and without KV scales, in turn, from mapped memory.

    Raises:
        RuntimeError: one did not read the weights in place, or the scales are not in force.
    """
    import trainer_bridge

    engine = serving.start(folder, case.keywords)
    module = weights.bf16_module(shape, serving.DEVICE)
    scales = torch.ones(shape.layers, 3, shape.kv_heads, device=serving.DEVICE)
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
