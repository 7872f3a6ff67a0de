"""What each mitigation does to logprobs on one GPU, and what it costs.

A job is an engine beside a BF16 trainer: rollouts, which the trainer scores, and the time of a
decode step.

  bf16, bf16-fp32-head         the noise that is there without FP8
  fp8, fp8-fp32-head           every layer that can be FP8; logits in FP32
  fp8-ends-bf16                the first and the last decoder layer in BF16
  fp8-ignore-list              the list of ``sgl-fp8rl precision`` for half the KL in BF16
  fp8-kv8                      an FP8 KV cache
  fp8-deterministic            --enable-deterministic-inference

Weights are random ones of a shape, or with --checkpoint those of a trained model, whose prompts
--prompts FILE.jsonl has; they come by an update. Without a GPU the model is a tiny one.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.benchmark import Benchmark, Job, Measurement, Option, Run
from benchmarks.engines import serving
from benchmarks.engines.keywords import ENGINE, FLASHINFER, OURS
from benchmarks.engines.serving import Load
from benchmarks.mitigations import measured, trainer
from benchmarks.mitigations.trainer import SHAPES, TINY
from sgl_fp8rl.sensitivity.groups import fp8_groups

# Beside the trainer, whose weights are there as well.
ON_GPU: dict[str, Any] = {
    "mem_fraction_static": 0.6,
    "cuda_graph_max_bs_decode": 32,
    "max_total_tokens": 65536,
    "max_running_requests": 64,
    **FLASHINFER,
}
ON_CPU: dict[str, Any] = {
    "mem_fraction_static": 0.5,
    "chunked_prefill_size": 2048,
    "max_total_tokens": 4096,
    "max_running_requests": 16,
}
NONE, ALL, ENDS, LIST = "none", "all", "ends", "list"
"""Which layers a case leaves in BF16: the last, those that ``precision`` lists for half the KL."""
FP32_HEAD = {"enable_fp32_lm_head": True}
KV8 = {"kv_cache_dtype": "fp8_e4m3", "attention_backend": None}  # the plugin chooses
PREDICTED = {
    "fp8": "all FP8",
    "fp8-ends-bf16": "first and last BF16",
    "fp8-ignore-list": "ignore list",
    "fp8-kv8": "all FP8, FP8 KV",
}
"""Arms, and the mitigation of ``precision`` that is the same."""


@dataclass(frozen=True)
class Case:
    """One mitigation. All run our plugin; under ``ALL`` it leaves every layer to SGLang's BF16."""

    name: str
    bf16: str = NONE
    engine: dict[str, Any] = field(default_factory=dict)
    """Keywords of ``sglang.Engine`` besides those of all."""

    def keywords(self, device: str) -> dict[str, Any]:
        """All keywords of ``sglang.Engine`` but the layers that stay BF16."""
        machine = ON_GPU if device == "cuda" else ON_CPU
        every = ENGINE | OURS | machine | self.engine
        return {name: value for name, value in every.items() if value is not None}


CASES = (
    Case("bf16", ALL),
    Case("bf16-fp32-head", ALL, FP32_HEAD),
    Case("fp8", NONE),
    Case("fp8-fp32-head", NONE, FP32_HEAD),
    Case("fp8-ends-bf16", ENDS),
    Case("fp8-ignore-list", LIST),
    Case("fp8-kv8", NONE, KV8),
    Case("fp8-deterministic", NONE, {"enable_deterministic_inference": True}),
)


@dataclass(frozen=True)
class Work:
    """What each engine does."""

    sequences: int
    trained_sequences: int
    """Of a checkpoint, whose responses may end early."""
    prompt: int
    new: int
    rollouts: int
    """Each gives a value of every metric."""
    decode: Load
    """Whose decode step is timed."""
    precision_tokens: int
    """That ``precision`` makes its list from."""


WORK = {
    "cuda": Work(32, 256, 128, 256, 4, Load(32, 512, 128), 2048),
    "cpu": Work(16, 64, 16, 24, 4, Load(4, 32, 16), 1024),
}


def measure(case: Case, run: Run) -> list[Measurement]:
    """Mismatch of rollouts and the time of a decode step; and what ``precision`` predicted.

    Raises:
        RuntimeError: the engine left other layers in BF16 than were named.
    """
    import trainer_bridge

    device = "cuda" if torch.cuda.is_available() else "cpu"
    options, work = {**run.options}, WORK[device]
    options["model"] = options["model"] or ("qwen3-8b" if device == "cuda" else TINY)
    trained = options["checkpoint"] is not None
    model = trainer.trainer_of(options, device)
    sequences = work.trained_sequences if trained or options["prompts"] else work.sequences
    prompts = trainer.prompts_of(options, model, sequences, work.prompt)
    precision = None
    if case.bf16 == LIST:
        precision = trainer.predicted(model, prompts, work.precision_tokens)
    layers = model.config.get_text_config().num_hidden_layers
    listed = [] if precision is None else precision["ignored_layers"]
    patterns = ignored_layers(case.bf16, layers, listed)
    trainer.save_config(options, run.folder)
    keywords = case.keywords(device) | {"fp8rl_ignored_layers": patterns}
    engine = serving.start(str(run.folder), keywords)
    trainer_bridge.update(model, engine, version=0)
    bf16 = measured.assert_left(engine, fp8_groups(model), patterns)
    found = measured.mismatch(engine, model, prompts, work.new, work.rollouts, ends=trained)
    decode = measured.fitting(work.decode, model)
    times = measured.timed(engine, decode, model)
    engine.shutdown()
    name = trainer.name_of(options, model)
    rollout = f"rollout {len(prompts)}x{'prompt' if trained else work.prompt}+{work.new}"
    values = {
        rollout: found | {"bf16_layers": [float(bf16)]},
        f"decode {decode.name}": {"decode_step_ms": times},
    }
    return [*serving.measurements(case.name, name, values), *predictions(precision, name)]


def ignored_layers(bf16: str, layers: int, listed: list[str]) -> tuple[str, ...]:
    """The patterns for a case's engine.

    Args:
        layers: decoder layers of the model.
        listed: what ``precision`` found.
    """
    ends = (r"re:layers\.0\.", rf"re:layers\.{layers - 1}\.")
    return {NONE: (), ALL: ("re:.",), ENDS: ends, LIST: tuple(listed)}[bf16]


def predictions(precision: dict[str, Any] | None, model: str) -> list[Measurement]:
    """What ``precision`` predicted of the engines that it knows, by arm."""
    if precision is None:
        return []
    mitigations = {mitigation["mitigation"]: mitigation for mitigation in precision["mitigations"]}
    case = f"precision of {precision['tokens']} tokens"
    made: list[Measurement] = []
    for arm, name in PREDICTED.items():
        found = mitigations[name]
        values = {
            "precision_kl": [found["kl"]],
            "precision_step_bytes": [found["step_bytes"]],
        }
        made += serving.measurements(arm, model, {case: values})
    return made


BENCHMARK = Benchmark(
    jobs=tuple(Job(case.name, case) for case in CASES),
    measure=measure,
    limit_s=240.0,
    options=(
        Option(
            "model", f"shape of the random model: {', '.join(SHAPES)}", None, str, in_command=False
        ),
        Option("layers", "of the random model, fewer than it has", in_command=False),
        Option("checkpoint", "folder of a trained model", None, Path, in_command=False),
        Option("prompts", "JSONL, as sgl-fp8rl precision takes it", None, Path, in_command=False),
    ),
    gpu="optional",
)
