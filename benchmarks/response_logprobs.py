"""``response_logprobs`` of a model of 2 layers, forward and backward: in chunks, with entropies,
with all logits in memory, and what the model takes without its head.

Hidden size and vocabulary are Qwen3-8B's, weights are random in BF16, prompts as long as responses.
``extra_gib`` is the peak over what was allocated before: gradients are in it. ``fits`` is 0 where
the GPU's memory was not enough. No engine runs, and SGLang is not imported.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import measuring
from benchmarks.benchmark import Benchmark, Job, Measurement, Option, Run
from benchmarks.engines.models import MODELS
from benchmarks.fp8_forward import GIB, TINY, tokens, trainer_of
from trainer_bridge import response_logprobs
from trainer_bridge.rollouts import head
from trainer_bridge.rollouts.chunks import After

CHECKED = 4
"""Sequences whose logprobs are compared before any are timed."""
Step = Callable[[], object]


@dataclass(frozen=True)
class Spec:
    """What the job measures."""

    batches: tuple[tuple[int, int], ...] = ((32, 256), (128, 256))
    """Sequences, and tokens of each response."""
    layers: int = 2


def measure(spec: Spec, run: Run) -> list[Measurement]:
    """Each arm of each batch, one after the other with the same model."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = (MODELS if device.type == "cuda" else TINY)["qwen3-8b"]
    model = trainer_of(replace(shape, layers=spec.layers), device)
    measurements: list[Measurement] = []
    for sequences, length in spec.batches:
        case = f"{sequences}x{length}"
        if not run.wants(case):
            continue
        ids = tokens(sequences, 2 * length, shape.vocab, device)
        prompts, responses = (part.tolist() for part in ids.chunk(2, 1))
        off = difference(model, prompts[:CHECKED], responses[:CHECKED])
        for arm, step in arms(model, ids, prompts, responses).items():
            with all_logits() if arm == "all logits" else nullcontext():
                values = times(model, step, device, run.options["repeats"])
            if arm == "chunks":
                values["logprob_abs_diff_max"] = [off]
            place = {"arm": arm, "model": f"qwen3-8b, {spec.layers} layers, random weights"}
            measurements.append({**place, "case": case, "values": values})
            print(measurements[-1], flush=True)
    return measurements


def arms(model: Any, ids: torch.Tensor, prompts: Any, responses: Any) -> dict[str, Step]:
    """What is timed, by name."""

    def without_head() -> None:
        model.get_decoder()(ids, use_cache=False).last_hidden_state.sum().backward()

    def logprobs() -> None:
        response_logprobs(model, prompts, responses).sum().backward()

    def entropies() -> None:
        logprobs_BT, entropy_BT = response_logprobs(model, prompts, responses, entropy=True)
        (logprobs_BT + entropy_BT).sum().backward()

    return {
        "without head": without_head,
        "chunks": logprobs,
        "chunks, entropies": entropies,
        "all logits": logprobs,
    }


@contextmanager
def all_logits() -> Iterator[None]:
    """Have all logits in memory, as for a model whose head is not known."""
    with patch.object(head, "_head_of", lambda model: (None, After())):
        yield


@torch.no_grad()
def difference(model: Any, prompts: Any, responses: Any) -> float:
    """Between the logprobs of chunks and those of all logits, the largest."""
    in_chunks = response_logprobs(model, prompts, responses)
    with all_logits():
        return float((response_logprobs(model, prompts, responses) - in_chunks).abs().max())


def times(model: Any, step: Step, device: torch.device, repeats: int) -> dict[str, list[float]]:
    """Time and memory of a step, after one that is not timed."""
    found: dict[str, list[float]] = {"fits": [1.0], "step_ms": []}
    for _ in range(1 + repeats):
        model.zero_grad()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        try:
            found["step_ms"].append(measuring.timed(step)[0])
        except torch.cuda.OutOfMemoryError:
            return {"fits": [0.0]}
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
            found["extra_gib"] = [(peak - before) / GIB]
    return found | {"step_ms": found["step_ms"][1:]}


BENCHMARK = Benchmark(
    jobs=(Job("logprobs", Spec()),),
    measure=measure,
    limit_s=300.0,
    options=(Option("repeats", "of each time", default=5),),
    gpu="optional",
)
