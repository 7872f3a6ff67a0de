"""What is left of the mismatch when the trainer computes with the engine's codes.

Engines in BF16 and in FP8, with a BF16 and with an FP8 KV cache, sample from the same random
weights. The trainer computes the logprobs of each engine's tokens in BF16, and with ``fp8_forward``
where the engine is FP8, also with K and V fake-quantized: one-sided k3 against the engine's own
logprobs, in nats. Then it is trained for some steps, each of which updates the FP8 engine and
compares its codes with the trainer's.
"""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

import trainer_bridge
from benchmarks.benchmark import LAYERS, Benchmark, Job, Measurement, Option, Run
from benchmarks.engines import serving
from benchmarks.engines.models import MODELS
from benchmarks.fp8_forward import TINY, trainer_of
from trainer_bridge.session.kept import KEPT

PROMPTS, LENGTH = 16, 64
NEW_TOKENS = 128
VOCAB = 32768
ALL_BF16 = "re:.*"
"""Pattern of layers that stay BF16: every one."""
LEARNING_RATE = 1e-3
"""Of SGD, whose gradients are of a random model's own samples; most codes stay as they are."""
FP8_KV = {"kv_cache_dtype": "fp8_e4m3"}
ALL_FP8 = "FP8, FP8 KV"
ENGINES: dict[str, dict[str, Any]] = {
    "BF16": {"fp8rl_ignored_layers": (ALL_BF16,)},
    "BF16, FP8 KV": {"fp8rl_ignored_layers": (ALL_BF16,), **FP8_KV},
    "FP8": {},
    ALL_FP8: FP8_KV,  # the last: from then on the trainer computes with codes
}


@dataclass(frozen=True)
class Spec:
    """One model."""

    model: str
    layers: int


def measure(spec: Spec, run: Run) -> list[Measurement]:
    """Each engine after the other, then the steps."""
    on_gpu = torch.cuda.is_available()
    shape = replace(
        MODELS[spec.model] if on_gpu else TINY[spec.model],
        layers=run.options["layers"] or spec.layers,
        vocab=VOCAB if on_gpu else TINY[spec.model].vocab,
    )
    device = torch.device("cuda" if on_gpu else "cpu")
    model = trainer_of(shape, device).eval()
    model.save_pretrained(run.folder / "checkpoint")
    name = f"{spec.model}, {shape.layers} layers, random weights"
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(shape.vocab, (PROMPTS, LENGTH), generator=generator).tolist()
    measurements: list[Measurement] = []

    def add(engine: str, trainer: str, values: dict[str, list[float]]) -> None:
        measurements.append({"arm": trainer, "model": name, "case": engine, "values": values})
        print(measurements[-1], flush=True)

    sampled = {}
    for kind, keywords in ENGINES.items():
        with engine_of(run, **keywords) as engine:
            sampled[kind] = rollout_of(engine, prompts)
            add(kind, "bf16", k3(model, sampled[kind]))
            if kind == ALL_FP8:
                fp8 = trainer_bridge.fp8_forward(model, engine)
                fp8.check(engine)
                for each in ("FP8", ALL_FP8):
                    add(each, "fp8_forward", k3(model, sampled[each]))
                fp8.sync_kv_scales(engine)
                add(ALL_FP8, "fp8_forward, FP8 KV", k3(model, sampled[ALL_FP8]))
    with engine_of(run) as engine:
        fp8.sync_kv_scales(engine)
        add("FP8", "fp8_forward, trained", steps(model, fp8, engine, prompts, run.options["steps"]))
    return measurements


def steps(
    model: Any, fp8: Any, engine: Any, prompts: list[list[int]], count: int
) -> dict[str, list[float]]:
    """Train, update and compare codes; what is left of the mismatch at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    ids = torch.tensor(prompts, device=next(model.parameters()).device)
    before = engine_codes(engine)
    for step in range(count):
        some = ids[step % len(ids) :][:2]
        loss = model(some, labels=some).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trainer_bridge.update(model, engine, version=step)
        fp8.check(engine)
    if engine_codes(engine) == before:
        raise RuntimeError("the steps changed no code, so their digests say nothing")
    return {**k3(model, rollout_of(engine, prompts)), "steps": [float(count)]}


def engine_codes(engine: Any) -> Any:
    """What tells one version of an engine's weights from another."""
    found = KEPT.connection_to(engine).client.control({"op": "digest"})
    return [{name: each["sha256"] for name, each in rank.items()} for rank in found["ranks"]]


def engine_of(run: Run, **keywords: Any) -> AbstractContextManager[Any]:
    """An engine that serves the checkpoint."""
    common: dict[str, Any] = {
        "quantization": "fp8rl",
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "grammar_backend": "none",
        "log_level": "warning",
        "dtype": "bfloat16",
        "max_total_tokens": 2 * PROMPTS * (LENGTH + NEW_TOKENS),
        "max_running_requests": PROMPTS,
    }
    if torch.cuda.is_available():
        common |= {"mem_fraction_static": 0.4, "cuda_graph_max_bs_decode": PROMPTS}
        common |= {"cuda_graph_backend_prefill": "disabled", "attention_backend": "flashinfer"}
    return serving.running(run.folder / "checkpoint", common | keywords)


def rollout_of(engine: Any, prompts: list[list[int]]) -> trainer_bridge.Rollout:
    """A response to each prompt, all of a length."""
    sampling = {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return trainer_bridge.rollout(engine, prompts, sampling)


@torch.no_grad()
def k3(model: Any, rollout: trainer_bridge.Rollout) -> dict[str, list[float]]:
    """One-sided, of the tokens that the engine sampled; and the logprobs' mean difference."""
    found = trainer_bridge.response_logprobs(
        model, rollout.prompt_tokens, rollout.tokens, rollout.temperature
    )
    metrics = trainer_bridge.mismatch_metrics(
        found.cpu(), rollout.logprobs_BT.cpu(), rollout.mask_BT.cpu()
    )
    if not math.isfinite(metrics["mismatch_kl_k3"]):
        raise RuntimeError("the mismatch is not finite")
    return {"k3": [metrics["mismatch_kl_k3"]]}


BENCHMARK = Benchmark(
    jobs=(
        Job("dense", Spec("qwen3-8b", 6)),
        Job("experts", Spec("qwen3-30b-a3b", 4)),
    ),
    measure=measure,
    limit_s=480.0,
    options=(LAYERS, Option("steps", "of training, each with an update", default=200)),
    gpu="optional",
)
