"""Errors of logprobs under an FP8 KV cache, against prefill over a BF16 one.

Each scheme of scales samples in a process of its own and leaves what it found in the shared folder.
The reference, which runs last, scores all samples and returns the measurements.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.benchmark import Measurement, Run
from benchmarks.engines import kv_weights, models, serving
from benchmarks.engines.keywords import Keywords

CUT_LAYERS = 6
CUT_VOCAB = 32768
CUT_MODEL = f"qwen3-8b, {CUT_LAYERS} layers"
SEQUENCES, LENGTH = 16, 512
PROMPT, NEW = 256, 128
"""Of what is sampled to compare decode's logprobs."""

Logprobs = list[list[float]]
Found = dict[str, dict[str, Any]]
"""By set of weights (``kv_weights.PLANTED``): ``prefill``, logprobs of the same sequences in every
process; ``sampled`` and ``decode``, whole sequences that were sampled here and the logprobs of
their new tokens; ``scored``, by arm, prefill logprobs of the new tokens that the arm sampled."""


@dataclass(frozen=True)
class Work:
    """One engine."""

    arm: str
    keywords: Keywords
    trainer_scales: bool
    is_reference: bool


def cut(shape: models.Shape) -> models.Shape:
    """A few layers of the model."""
    return replace(shape, layers=CUT_LAYERS, vocab=CUT_VOCAB)


def measure(work: Work, shape: models.Shape, run: Run) -> list[Measurement]:
    """Measurements of all engines if this is the reference, else none.

    Raises:
        RuntimeError: an engine answered in part, or did not measure its KV scales.
    """
    others = {}
    if work.is_reference:
        others = dict(json.loads(path.read_text()) for path in sorted(run.shared.glob("*.json")))
    found = logprobs(work, shape, str(run.folder), others)
    if work.is_reference:
        return measurements(found, others, work.arm)
    order = len(list(run.shared.glob("*.json")))
    path = Path(run.shared) / f"{order:02d}.json"
    path.write_text(json.dumps([work.arm, found]))
    return []


def logprobs(work: Work, shape: models.Shape, folder: str, others: dict[str, Found]) -> Found:
    """What this engine's logprobs are. It scores its own samples and those of ``others``."""
    import trainer_bridge

    engine = serving.start(folder, work.keywords)
    found = {}
    same = serving.prompts_of(7, SEQUENCES, LENGTH, shape.vocab)
    for version, planted in enumerate(kv_weights.PLANTED):
        module = kv_weights.module(shape, serving.DEVICE, planted)
        scales = None
        if work.trainer_scales:
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
        to_score = {arm: other[planted]["sampled"] for arm, other in others.items()}
        found[planted] = {
            "prefill": prefill,
            "sampled": sampled,
            "decode": [[entry[0] for entry in meta["output_token_logprobs"]] for meta in metas],
            "scored": {
                arm: score(engine, sequences)
                for arm, sequences in {**to_score, work.arm: sampled}.items()
            },
        }
        del module
        torch.cuda.empty_cache()
    engine.shutdown()
    return found


def measurements(
    reference: Found, others: dict[str, Found], reference_arm: str
) -> list[Measurement]:
    """Mean |difference| of each sequence's logprobs to those of prefill over BF16 KV.

    ``logprob_error`` of prefill on the same sequences, ``logprob_error_decode`` of decode on the
    sequences that were sampled. The reference has the second one only: its own decode's.
    """
    made: list[Measurement] = []
    for arm, found in {**others, reference_arm: reference}.items():
        for planted, mine in found.items():
            wanted = reference[planted]
            values = {"logprob_error_decode": distances(mine["decode"], wanted["scored"][arm])}
            if arm != reference_arm:
                values["logprob_error"] = distances(mine["prefill"], wanted["prefill"])
            case = f"logprobs, {planted}"
            made.append({"arm": arm, "case": case, "model": CUT_MODEL, "values": values})
    return made


def distances(some: Logprobs, others: Logprobs) -> list[float]:
    """Mean |difference| of each pair of rows."""
    return [
        fmean(abs(a - b) for a, b in zip(mine, theirs, strict=True))
        for mine, theirs in zip(some, others, strict=True)
    ]


def score(engine: Any, sequences: serving.Prompts) -> Logprobs:
    """Prefill logprobs of the last ``NEW`` tokens of each sequence."""
    return [given(meta)[-NEW:] for meta in serving.generate(engine, sequences, 1, start_len=0)]


def given(meta: dict[str, Any]) -> list[float]:
    """Logprobs of a prompt's own tokens; its first token has none."""
    return [entry[0] for entry in meta["input_token_logprobs"][1:]]
