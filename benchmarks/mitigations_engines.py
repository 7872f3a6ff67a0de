"""One engine of the benchmark of logprob mitigations, beside a BF16 trainer in the same process.

Shapes: B sequences, T tokens of the longest response, H hidden, V vocabulary.
"""

import copy
import itertools
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks import kv_weights, mitigations_cases, models, result_rows, serving
from benchmarks.mitigations_cases import Case, Work
from server_args import matches
from sgl_fp8rl.sensitivity import command, tokens
from sgl_fp8rl.sensitivity.groups import Group, fp8_groups
from sgl_fp8rl.sensitivity.tokens import Text
from trainer_bridge.metrics import mismatch_metrics

LOGITS_AT_ONCE = 1 << 28
"""Elements of FP32: 1 GiB."""
SEED = 31
METRICS = {
    "mismatch_kl_k3": "mismatch_kl_k3",
    "mismatch_kl_k1": "mismatch_kl_k1",
    "mismatch_ess": "ess",
    "logprob_error": "logprob_abs_diff_mean",
}
"""Rows, by what ``mismatch_metrics`` calls them."""
PREDICTED = {
    "fp8": "all FP8",
    "fp8-ends-bf16": "first and last BF16",
    "fp8-ignore-list": "ignore list",
    "fp8-kv8": "all FP8, FP8 KV",
}
"""Arms, and the mitigation of ``precision`` that is the same."""


def trainer_of(job: dict[str, Any], device: str) -> Any:
    """The trainer's model in BF16: a checkpoint's, or one with random weights of a shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if job["checkpoint"] is not None:
        return command.load(job["checkpoint"], torch.device(device), torch.bfloat16)
    shape = shape_of(job)
    config = AutoConfig.for_model(**models.config(shape))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(kv_weights.module(shape, device, kv_weights.PLANTED[0]).state_dict())
    return model.eval()


def shape_of(job: dict[str, Any]) -> models.Shape:
    """The shape with random weights, perhaps with fewer layers."""
    shape = mitigations_cases.SHAPES[job["model"]]
    return shape if job["layers"] is None else replace(shape, layers=job["layers"])


def name_of(job: dict[str, Any], model: Any) -> str:
    """What rows call the model."""
    if job["checkpoint"] is None:
        return mitigations_cases.random_name(job["model"], job["layers"])
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    return f"{model.config.model_type} of {millions:.1f} M parameters, trained"


def measure(case: Case, job: dict[str, Any]) -> list[result_rows.Report]:
    """Mismatch of rollouts and the time of a decode step; and what ``precision`` said before.

    Raises:
        RuntimeError: the engine left other layers in BF16 than it was told to.
    """
    import trainer_bridge

    device = "cuda" if torch.cuda.is_available() else "cpu"
    work = mitigations_cases.WORK[device]
    model = trainer_of(job, device)
    prompts = prompts_of(job, model, work)
    said = predicted(model, prompts, work) if case.bf16 == mitigations_cases.LIST else None
    layers = model.config.get_text_config().num_hidden_layers
    listed = [] if said is None else said["ignored_layers"]
    patterns = mitigations_cases.ignored_layers(case.bf16, layers, listed)
    save_config(job, Path(job["folder"]))
    keywords = case.keywords(device) | {"fp8rl_ignored_layers": patterns}
    engine = serving.start(job["folder"], keywords)
    trainer_bridge.update(model, engine, version=0)
    bf16 = assert_left(engine, fp8_groups(model), patterns)
    found = mismatch(engine, model, prompts, work, ends=job["checkpoint"] is not None)
    decode = fitting(work.decode, model)
    times = timed(engine, decode, model)
    engine.shutdown()
    common = {"arm": case.name, "model": name_of(job, model), "layers": layers}
    prompt = work.prompt if job["checkpoint"] is None else "prompt"
    rollout = f"rollout {len(prompts)}x{prompt}+{work.new}"
    return [
        common | {"case": rollout, "values": found | {"bf16_layers": [float(bf16)]}},
        common | {"case": f"decode {decode.name}", "values": {"decode_step_ms": times}},
        *predictions(said, common),
    ]


def prompts_of(job: dict[str, Any], model: Any, work: Work) -> list[list[int]]:
    """The prompts of every rollout, the same in each process."""
    if job["prompts"] is not None:
        tokenize = command.tokenizer(job["checkpoint"] or "")
        texts = tokens.read_texts(Path(job["prompts"]), tokenize)
    elif job["checkpoint"] is not None:
        texts = tokens.from_nothing(model, work.trained_sequences * tokens.LENGTH, SEED)
    else:
        return serving.prompts_of(SEED, work.sequences, work.prompt, shape_of(job).vocab)
    count = work.trained_sequences
    return [text.prompt for text, _ in zip(itertools.cycle(texts), range(count), strict=False)]


def save_config(job: dict[str, Any], folder: Path) -> None:
    """``config.json``, from which the engine starts; its weights come by an update."""
    if job["checkpoint"] is not None:
        shutil.copy(Path(job["checkpoint"]) / "config.json", folder)
    else:
        (folder / "config.json").write_text(json.dumps(models.config(shape_of(job))))


def assert_left(engine: Any, groups: list[Group], patterns: Sequence[str]) -> int:
    """How many layers the engine left in BF16.

    Raises:
        RuntimeError: they are not those that the patterns name.
    """
    formats = {x["name"]: x["format"] for x in engine.fp8rl_control({"op": "layers"})["layers"]}
    named = {group.name for group in groups if any(matches(p, group.name) for p in patterns)}
    left = {group.name for group in groups if formats[group.name] == "bf16"}
    if left != named:
        raise RuntimeError(f"the engine left {sorted(left ^ named)} in another format than named")
    return len(left)


# ---- what is measured ----------------------------------------------------------------------------


def mismatch(
    engine: Any, model: Any, prompts: list[list[int]], work: Work, *, ends: bool
) -> dict[str, list[float]]:
    """Metrics of each rollout against the trainer's logprobs.

    Args:
        ends: whether a response may end before its last token.
    """
    import trainer_bridge

    # the first prefill: an engine that measures KV scales does so on other tokens
    serving.generate(engine, prompts_like(prompts), 1)
    serving.assert_calibrated(engine)
    sampling = {"temperature": 1.0, "max_new_tokens": work.new, "ignore_eos": not ends}
    found: dict[str, list[float]] = {name: [] for name in METRICS}
    for number in range(work.rollouts):
        # read in deterministic inference alone, where all rollouts would be the same otherwise
        seeded = sampling | {"sampling_seed": number}
        rollout = trainer_bridge.rollout(engine, prompts, seeded, expected_version=0)
        trainer_BT = response_logprobs(model, rollout)
        metrics = mismatch_metrics(trainer_BT, rollout.logprobs_BT, rollout.mask_BT)
        for name, metric in METRICS.items():
            found[name].append(metrics[metric])
    return found


def prompts_like(prompts: list[list[int]]) -> list[list[int]]:
    """Other prompts of the same lengths and tokens: each token is the next one in the list."""
    every = [token for prompt in prompts for token in prompt]
    shifted = iter([*every[1:], every[0]])
    return [[next(shifted) for _ in prompt] for prompt in prompts]


@torch.inference_mode()
def response_logprobs(model: Any, rollout: Any) -> torch.Tensor:
    """The trainer's logprobs of the sampled tokens, FP32 [B, T] on the CPU.

    The model computes in BF16, its head in FP32, whatever the engine's head does: what is measured
    is the engine's part of the mismatch.
    """
    head_VH = model.get_output_embeddings().weight.float()
    found = []
    for prompt, response in zip(rollout.prompt_tokens, rollout.tokens, strict=True):
        ids = torch.tensor([prompt + response], device=model.device)
        hidden_TH = model.get_decoder()(ids, use_cache=False).last_hidden_state[0]
        hidden_TH = hidden_TH[len(prompt) - 1 : -1].float()
        parts = [
            (part_TH @ head_VH.T).log_softmax(-1)
            for part_TH in hidden_TH.split(max(1, LOGITS_AT_ONCE // len(head_VH)))
        ]
        logprobs_TV = torch.cat(parts) if len(parts) > 1 else parts[0]
        found.append(logprobs_TV.gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu())
    return pad_sequence(found, batch_first=True)


def fitting(load: serving.Load, model: Any) -> serving.Load:
    """The load, cut to the model's context."""
    context = model.config.get_text_config().max_position_embeddings
    length = min(load.length, context // 4)
    return serving.Load(load.batch, length, min(load.new, context // 4))


def timed(engine: Any, load: serving.Load, model: Any) -> list[float]:
    """Milliseconds of a decode step."""
    vocab = model.config.get_text_config().vocab_size
    rng = random.Random(SEED)
    prompts = [rng.choices(range(vocab), k=load.length) for _ in range(load.batch)]
    return serving.timed_work(engine, prompts, load.new)["decode_step_ms"]


# ---- what precision says -------------------------------------------------------------------------


def predicted(model: Any, prompts: list[list[int]], work: Work) -> dict[str, Any]:
    """The report of ``precision`` for half the KL, on samples from the same prompts."""
    exact = copy.deepcopy(model).float()
    options = command.Options(model="", kv_cache=True, seed=SEED)
    texts = [Text(prompt, None) for prompt in prompts]
    texts = tokens.complete(exact, texts, work.precision_tokens, SEED)
    said = command.measure(exact, options, texts)
    del exact
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return said


def predictions(said: dict[str, Any] | None, common: dict[str, Any]) -> list[result_rows.Report]:
    """What ``precision`` said of the engines that it knows, by arm."""
    if said is None:
        return []
    mitigations = {mitigation["lever"]: mitigation for mitigation in said["levers"]}
    case = f"precision of {said['tokens']} tokens"
    return [
        common
        | {"arm": arm, "case": case}
        | {
            "values": {
                "precision_kl": [mitigations[mitigation]["kl"]],
                "precision_step_bytes": [mitigations[mitigation]["step_bytes"]],
            }
        }
        for arm, mitigation in PREDICTED.items()
    ]
