"""Logprobs of a long prompt's last tokens under an FP8 KV cache, against those over a BF16 one.

Whole engines of a few layers, one after the other, on the same weights and prompts. A prompt takes
two chunks, so the second attends to the first through the cache.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.benchmark import Measurement
from benchmarks.engines import kv_weights, models, serving
from benchmarks.engines.keywords import ENGINE, OURS, OURS_KV8, SMALL, Keywords
from benchmarks.kv import logprobs

MODEL = "qwen3-8b"
PROMPTS, LENGTH, LAST = 4, 30000, 100
CALIBRATION = 8, 512
"""Prompts and tokens of the first prefill, on which engines measure their scales."""
PLANTED = (*kv_weights.PLANTED, kv_weights.Q_BEYOND)
ROOM: Keywords = {"max_total_tokens": 1 << 17}


@dataclass(frozen=True)
class Arm:
    """One way to prefill."""

    name: str
    engine: Keywords
    q_scale: float | None = None
    """Of all layers, in the place of the measured one."""


REFERENCE = Arm("fp8rl, BF16 KV", OURS)
ARMS = (
    Arm("fp8rl-kv8, FA3", OURS_KV8),
    Arm("fp8rl-kv8, FlashInfer", {**OURS_KV8, "prefill_attention_backend": "flashinfer"}),
    # as SGLang's own call of FA3 casts q
    Arm("fp8rl-kv8, FA3, bare q", OURS_KV8, q_scale=1.0),
    Arm("fp8rl-kv8, FA3, unit scales", {**OURS_KV8, "fp8rl_kv_scheme": "unit"}),
)


def measurements(folder: Path) -> list[Measurement]:
    """``logprob_error`` of each arm on each set of weights: a prompt's mean |difference|, nats."""
    shape = logprobs.cut(models.MODELS[MODEL])
    models.save_config(shape, folder)
    wanted = _last_logprobs(REFERENCE, shape, folder)
    made: list[Measurement] = []
    for arm in ARMS:
        found = _last_logprobs(arm, shape, folder)
        for planted, rows in found.items():
            values = {"logprob_error": logprobs.distances(rows, wanted[planted])}
            case = f"last {LAST} of {LENGTH}, {planted}"
            made.append(
                {"arm": arm.name, "model": logprobs.CUT_MODEL, "case": case, "values": values}
            )
    return made


def _last_logprobs(arm: Arm, shape: models.Shape, folder: Path) -> dict[str, logprobs.Logprobs]:
    """By set of weights, for each prompt."""
    import trainer_bridge

    engine = serving.start(str(folder), ENGINE | SMALL | ROOM | arm.engine)
    prompts = serving.prompts_of(21, PROMPTS, LENGTH, shape.vocab)
    found, version = {}, 0
    for planted in PLANTED:
        module = kv_weights.module(shape, serving.DEVICE, planted)
        trainer_bridge.update(module, engine, version=version)
        serving.generate(engine, serving.prompts_of(8, *CALIBRATION, shape.vocab), 1)
        serving.assert_calibrated(engine)
        if arm.q_scale is not None:
            version += 1
            scales = torch.tensor(engine.fp8rl_control({"op": "kv"})["scales"])
            scales[:, 2] = arm.q_scale
            trainer_bridge.update(module, engine, version=version, kv_scales=scales)
        metas = serving.generate(engine, prompts, 1, start_len=LENGTH - LAST - 1)
        found[planted] = [_given(meta) for meta in metas]
        version += 1
        del module
        torch.cuda.empty_cache()
    engine.shutdown()
    return found


def _given(meta: dict[str, Any]) -> list[float]:
    given = logprobs.given(meta)
    if len(given) != LAST:
        raise RuntimeError(f"the engine answered with the logprobs of {len(given)} tokens")
    return given
