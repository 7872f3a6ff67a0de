"""A trainer's logprob pass and training step in BF16 and with ``fp8_forward``, random weights.

The pass is of the Qwen3-8B shape, without gradients; the step is forward, backward and AdamW of a
few of its layers, or of Qwen3-30B-A3B's, with a smaller vocabulary. In FP8 a layer's product is
DeepGEMM's where that is installed, and torch's block-scaled one beside it. Nothing is timed before
each product has been compared with the reference implementation on every shape. No engine runs, and
SGLang is not imported.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import measuring
from benchmarks.benchmark import LAYERS, Benchmark, Job, Measurement, Option, Run
from benchmarks.engines import models
from benchmarks.engines.models import MODELS, Shape
from sgl_fp8rl.ops import block_linear
from sgl_fp8rl.ops.reference import fp8_linear
from trainer_bridge.fp8.fp8_forward import convert_layers
from trainer_bridge.fp8.fp8_weights import FP8Parameter
from trainer_bridge.sources import hf_names
from trainer_bridge.sources.parameters import named_tensors

BF16 = torch.bfloat16
GIB = 1 << 30
LOGITS_AT_ONCE = 2048
"""Tokens whose logits are in memory together."""
ERROR = 2.0**-5
"""Of a product on a GPU against the reference, as a part of its largest element: the activation
codes are SGLang's. 0.014 where both formulas are computed on a CPU."""
TINY = {
    "qwen3-8b": Shape(hidden=256, intermediate=512, layers=2, heads=4, kv_heads=2, vocab=512),
    "qwen3-30b-a3b": Shape(
        hidden=256,
        intermediate=128,
        layers=2,
        heads=4,
        kv_heads=2,
        experts=8,
        experts_per_token=2,
        vocab=512,
    ),
}
"""For a machine without a GPU, whose times mean nothing."""


@dataclass(frozen=True)
class Spec:
    """What one job measures."""

    model: str
    batches: tuple[tuple[int, int], ...]
    """Sequences and tokens of each."""
    trains: bool = False
    layers: int | None = None
    """Fewer than the model has."""
    vocab: int | None = None


PASS = Spec("qwen3-8b", ((8, 2048), (32, 256)))
STEP = Spec("qwen3-8b", ((2, 2048),), trains=True, layers=6, vocab=32768)
EXPERTS = Spec("qwen3-30b-a3b", ((2, 2048),), trains=True, layers=4, vocab=32768)


def measure(spec: Spec, run: Run) -> list[Measurement]:
    """BF16, then the same model with codes, by each product that this machine has."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given, repeats = run.options["layers"], run.options["repeats"]
    shape = (MODELS if device.type == "cuda" else TINY)[spec.model]
    shape = replace(shape, layers=given or spec.layers or shape.layers)
    if device.type == "cuda":
        shape = replace(shape, vocab=spec.vocab or shape.vocab)
    model = trainer_of(shape, device)
    name = f"{spec.model}, {shape.layers} layers, random weights"
    if not spec.trains and shape == MODELS.get(spec.model):
        name = f"{spec.model}, random weights"
    measurements: list[Measurement] = []
    for arm in ("bf16", *(f"fp8_forward, {product}" for product in products(device))):
        product = arm.partition(", ")[2]
        with computed_by(product):
            quantize: dict[str, list[float]] = {}
            if product:
                for batch in spec.batches:
                    check(shape, tokens(*batch, shape.vocab, device).numel(), device)
                convert(model, shape)
                # as an update makes the codes of all weights anew
                quantize = {"quantize_ms": milliseconds(lambda: named_tensors(model), repeats)}
            for sequences, length in spec.batches:
                ids = tokens(sequences, length, shape.vocab, device)
                measured = (step if spec.trains else logprob_pass)(model, ids, repeats)
                place = {"arm": arm, "model": name, "case": f"{sequences}x{length}"}
                measurements.append(place | {"values": measured | quantize})
                print(measurements[-1], flush=True)
    return measurements


def trainer_of(shape: Shape, device: torch.device) -> Any:
    """A model of transformers in BF16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**models.config(shape))
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=BF16)


def convert(model: Any, shape: Shape) -> None:
    """Compute with codes what an engine of one rank keeps in FP8; once."""
    if any(hasattr(module, "fp8_parameters") for module in model.modules()):
        return
    names = {
        name
        for parameter in models.parameters(shape)
        if parameter.fp8
        for name, _ in hf_names.split(parameter.name, parameter.shape, shape.model_type)
    }
    convert_layers(model, names, BF16)


def products(device: torch.device) -> list[str]:
    """What can multiply codes here, the one that is used first."""
    chosen = block_linear.product_of(torch.empty(0, dtype=BF16, device=device))
    return [chosen, *(["torch"] if chosen == "deep_gemm" else [])]


@contextmanager
def computed_by(product: str) -> Iterator[None]:
    """Have this product multiply codes on GPUs."""
    if not product or product == "reference":
        yield
        return
    with patch.object(block_linear, "_product_on", lambda device: product):
        yield


def check(shape: Shape, tokens: int, device: torch.device) -> None:
    """Compare the product with the reference, which also compiles it for so many tokens."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = {p.shape for p in models.parameters(shape) if p.fp8}
    for size in sorted(shapes):
        *experts, N, K = size
        E = experts[0] if experts else 1
        rows = tokens * (shape.experts_per_token if experts else 1)
        x = torch.randn(rows, K, generator=generator, device=device, dtype=BF16)
        weight = torch.randn(E, N, K, generator=generator, device=device, dtype=BF16)
        found_codes = FP8Parameter("weight", BF16).codes(weight)
        codes, scales = found_codes.codes_NK, found_codes.scale_inv_nk
        counts = [rows // E + (expert < rows % E) for expert in range(E)]
        if experts:
            found = block_linear.linear_by_expert(x, counts, codes, scales)
        else:
            found = block_linear.linear(x, codes[0], scales[0])
        parts = zip(x.float().split(counts), codes, scales, strict=True)
        exact = torch.cat([fp8_linear(*part) for part in parts if len(part[0])])
        error = ((found.float() - exact).abs().max() / exact.abs().max()).item()
        print(f"{size} of {rows} rows: error {error:.4f}", flush=True)
        if not error < ERROR:
            raise RuntimeError(f"the product of {size} with {rows} rows is off by {error:.3g}")


def tokens(sequences: int, length: int, vocab: int, device: torch.device) -> torch.Tensor:
    """Random token ids."""
    if device.type == "cpu":
        sequences, length = min(sequences, 2), min(length, 32)
    generator = torch.Generator(device).manual_seed(length)
    return torch.randint(vocab, (sequences, length), generator=generator, device=device)


def logprobs(model: Any, ids_BL: torch.Tensor) -> torch.Tensor:
    """Of each token but the first, given those before it."""
    hidden = model.get_decoder()(ids_BL, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    targets = ids_BL[:, 1:].flatten()
    parts = zip(hidden.split(LOGITS_AT_ONCE), targets.split(LOGITS_AT_ONCE), strict=True)
    return torch.cat(
        [
            model.lm_head(rows).float().log_softmax(-1).gather(-1, wanted[:, None])[:, 0]
            for rows, wanted in parts
        ]
    )


def logprob_pass(model: Any, ids: torch.Tensor, repeats: int) -> dict[str, list[float]]:
    """Time and memory of a pass; the codes are made before it."""
    model.eval()

    def run() -> None:
        with torch.no_grad():
            logprobs(model, ids)

    run()  # compiles
    with peak(ids.device) as values:
        values["pass_ms"] = milliseconds(run, repeats)
    return values


def step(model: Any, ids: torch.Tensor, repeats: int) -> dict[str, list[float]]:
    """Time and memory of a step, and of one under activation checkpointing."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7)
    found: dict[str, list[float]] = {}

    def run() -> None:
        (-logprobs(model, ids).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for name, enable in (
        ("step", model.gradient_checkpointing_disable),
        ("checkpointed_step", model.gradient_checkpointing_enable),
    ):
        enable()
        run()
        with peak(ids.device) as values:
            found[f"{name}_ms"] = milliseconds(run, repeats)
        found |= {f"{name}_{metric}": value for metric, value in values.items()}
    model.gradient_checkpointing_disable()
    return found


def milliseconds(action: Callable[[], object], repeats: int) -> list[float]:
    """Wall time of each call but the first, which compiles."""
    action()
    return [measuring.timed(action)[0] for _ in range(repeats)]


@contextmanager
def peak(device: torch.device) -> Iterator[dict[str, list[float]]]:
    """The most that torch has allocated inside of the context, where there is a GPU."""
    values: dict[str, list[float]] = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield values
    if device.type == "cuda":
        values["peak_gib"] = [torch.cuda.max_memory_allocated(device) / GIB]


BENCHMARK = Benchmark(
    jobs=(Job("pass", PASS), Job("step", STEP), Job("experts", EXPERTS)),
    measure=measure,
    limit_s=180.0,
    options=(LAYERS, Option("repeats", "of each time", default=5)),
    gpu="optional",
)
