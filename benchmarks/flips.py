"""How much of an FP8 image an optimizer step of GRPO changes, by learning rate, step and layer.

The demo's task and loop (``examples.grpo``) on one rank, with an engine of FP8 weights that samples
under the policy of each step: on a GPU 118M parameters, as in the parity studies, on a CPU 13M.
What is compared is what an update sends: the codes and scales of the weights rounded to BF16, and
the bits of what stays BF16. The policy first learns from demonstrations, as in the demo, so that
some responses are right and others are not.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.benchmark import Benchmark, Job, Measurement, Option, Run
from benchmarks.parity import models
from examples.grpo import loop, tiny_model
from examples.grpo.engine import KEYWORDS, running_engine
from sgl_fp8rl.formats import BLOCK_FP8
from sgl_fp8rl.ops.delta import RECORD_BYTES
from trainer_bridge import update

SIZES: dict[str, dict[str, int]] = {
    "cpu": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    "cuda": models.DENSE["full"],
}
RATES = (1e-6, 3e-6, 1e-5)
"""Of an Adam, as RL of large models takes them."""
STEPS_KEPT = (1, 2, 5, 10, 20)
"""Steps that have a row of their own."""
DEMONSTRATIONS = 100
"""Training steps before GRPO."""
BATCH = 16, 8
"""Prompts, and responses to each."""
BF16 = ("embed_tokens", "lm_head")
Image = dict[str, dict[str, torch.Tensor]]
"""The bits of what an engine is sent of each matrix: "codes" and "scales", or "bf16"."""


@dataclass(frozen=True)
class Case:
    """One learning rate."""

    rate: float


def measure(case: Case, run: Run) -> list[Measurement]:
    """Train, and compare the images before and after each step."""
    torch.set_num_threads(2)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    store = f"file://{run.folder}/store"
    dist.init_process_group(loop.BACKENDS[device.type], init_method=store, rank=0, world_size=1)
    model = tiny_model.build_model(0, other=SIZES[device.type]).to(device)
    for step, loss in tiny_model.pretrain(model, 0, run.options["demonstrations"]):
        if step % 20 == 0:
            print(f"demonstrations, step {step}: loss {loss:.3f}", flush=True)
    folder = run.folder / "checkpoint"
    # masters stay as they are: at values of BF16, a first step would move few weights to the next
    tiny_model.save_checkpoint(model, folder)
    optimizer = torch.optim.AdamW(model.parameters(), case.rate, betas=(0.9, 0.95), weight_decay=0)
    prompts, group = BATCH
    config = loop.Config("", run.options["steps"], 0, prompts, group, 0, run.folder, {})
    found: dict[str, list[float]] = {}
    by_layer: dict[str, list[float]] = {}
    with running_engine(folder, "", 0, KEYWORDS[device.type]) as engine:
        before = image(model)
        for step in range(config.steps):
            update(model, engine, version=step)
            batch, rewards_PG, _ = loop.sample(engine, config, step)
            held = {name: p.detach().clone() for name, p in model.named_parameters()}
            loop.learn(model, optimizer, batch, rewards_PG)
            after = image(model)
            moved = torch.cat([(p - held[n]).flatten() for n, p in model.named_parameters()])
            values = changes(before, after) | {
                "reward": rewards_PG.mean().item(),
                "step_rms": moved.pow(2).mean().sqrt().item() / case.rate,
            }
            print(step, values, flush=True)
            for name, value in values.items():
                found.setdefault(name, []).append(value)
            for layer, value in codes_changed_by_layer(before, after).items():
                by_layer.setdefault(layer, []).append(value)
            before = after
    dist.destroy_process_group()
    cases: dict[str, dict[str, list[float]]] = {f"{case.rate:g}": found}
    for layer, shares in by_layer.items():
        cases[f"{case.rate:g}, layer {layer}"] = {"codes_changed": shares}
    for step in STEPS_KEPT:
        cases[f"{case.rate:g}, step {step}"] = {
            name: found[name][step - 1 : step] for name in ("codes_changed", "fp8_sent")
        }
    of = f"{model.num_parameters() / 1e6:.0f}M"
    return [
        {"arm": "fp8rl", "model": of, "case": name, "values": values}
        for name, values in cases.items()
        if all(values.values())
    ]


def image(model: torch.nn.Module) -> Image:
    """What an engine is sent of each matrix."""
    made: Image = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().to(torch.bfloat16)
        if parameter.dim() == 2 and not any(kept in name for kept in BF16):
            encoded = BLOCK_FP8.encode(weight)
            (suffix,) = BLOCK_FP8.suffixes
            codes, scales = encoded[""].view(torch.uint8), encoded[suffix].view(torch.int32)
            made[name] = {"codes": codes, "scales": scales}
        elif parameter.dim() == 2:
            made[name] = {"bf16": weight.view(torch.int16)}
    return made


def changes(before: Image, after: Image) -> dict[str, float]:
    """Shares of elements that changed, and bytes that a delta takes of those of an image."""

    share = partial(share_of, before, after)
    layers = [name for name in after if "codes" in after[name]]
    others = [name for name in after if "bf16" in after[name]]
    matrices = [share([name], "codes") for name in layers]
    kept = {next(each for each in BF16 if each in name): name for name in others}
    return {
        "codes_changed": share(layers, "codes"),
        "scales_changed": share(layers, "scales"),
        "codes_changed_least": min(matrices),
        "codes_changed_most": max(matrices),
        **{f"{short}_changed": share([name], "bf16") for short, name in kept.items()},
        "fp8_sent": RECORD_BYTES * share(layers, "codes", "scales", of=torch.uint8),
        "bf16_sent": RECORD_BYTES * share(others, "bf16", of=torch.uint8),
    }


def codes_changed_by_layer(before: Image, after: Image) -> dict[str, float]:
    """Shares of the codes of each decoder layer that changed, by its number."""
    layers: dict[str, list[str]] = {}
    for name in after:
        if "codes" in after[name] and (found := re.search(r"\.layers\.(\d+)\.", name)):
            layers.setdefault(found[1], []).append(name)
    return {layer: share_of(before, after, names, "codes") for layer, names in layers.items()}


def share_of(
    before: Image, after: Image, names: Iterable[str], *parts: str, of: torch.dtype | None = None
) -> float:
    """Of elements that differ, or of those of another type in the same memory."""
    pairs = [(before[name][part], after[name][part]) for name in names for part in parts]
    if of is not None:
        pairs = [(one.view(of), other.view(of)) for one, other in pairs]
    changed = sum(int((one != other).sum()) for one, other in pairs)
    return changed / sum(one.numel() for one, _ in pairs)


BENCHMARK = Benchmark(
    jobs=tuple(Job(f"{rate:g}", Case(rate)) for rate in RATES),
    measure=measure,
    limit_s=1800.0,
    options=(
        Option("steps", "GRPO steps of a learning rate", default=20),
        Option("demonstrations", "training steps before", default=DEMONSTRATIONS),
    ),
    gpu="optional",
)
