"""The BF16 trainer of the mitigations benchmark, its prompts, and the result of ``precision``.

Shapes: B sequences, T tokens of the longest response, H hidden, V vocabulary.
"""

import copy
import itertools
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.engines import kv_weights, models, serving
from benchmarks.engines.models import MODELS, Shape
from sgl_fp8rl.sensitivity import command, tokens
from sgl_fp8rl.sensitivity.tokens import Text

LOGITS_AT_ONCE = 1 << 28
"""Elements of FP32: 1 GiB."""
SEED = 31
TINY = "tiny"
SHAPES = MODELS | {
    TINY: Shape(hidden=256, intermediate=512, layers=4, heads=4, kv_heads=2, vocab=4096)
}
"""The tiny one is for a machine without a GPU."""

Options = Mapping[str, Any]
"""``model``, ``layers``, and paths or None: ``checkpoint``, ``prompts``."""


def trainer_of(options: Options, device: str) -> Any:
    """The trainer's model in BF16: a checkpoint's, or one with random weights of a shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if options["checkpoint"] is not None:
        return command.load(options["checkpoint"], torch.device(device), torch.bfloat16)
    shape = shape_of(options)
    config = AutoConfig.for_model(**models.config(shape))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(kv_weights.module(shape, device, kv_weights.PLANTED[0]).state_dict())
    return model.eval()


def shape_of(options: Options) -> models.Shape:
    """The shape with random weights, perhaps with fewer layers."""
    shape = SHAPES[options["model"]]
    return shape if options["layers"] is None else replace(shape, layers=options["layers"])


def name_of(options: Options, model: Any) -> str:
    """What rows call the model."""
    if options["checkpoint"] is None:
        layers = options["layers"]
        cut = "" if layers is None else f", {layers} layers"
        return f"{options['model']}{cut}, random weights"
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    return f"{model.config.model_type} of {millions:.1f} M parameters, trained"


def prompts_of(options: Options, model: Any, sequences: int, length: int) -> list[list[int]]:
    """The prompts of every rollout, the same in each process.

    Args:
        sequences: how many.
        length: tokens of a random prompt; those of a checkpoint have their own.
    """
    if options["prompts"] is not None:
        tokenize = command.tokenizer(options["checkpoint"] or "")
        texts = tokens.read_texts(Path(options["prompts"]), tokenize)
    elif options["checkpoint"] is not None:
        texts = tokens.from_nothing(model, sequences * tokens.LENGTH, SEED)
    else:
        return serving.prompts_of(SEED, sequences, length, shape_of(options).vocab)
    return [text.prompt for text in itertools.islice(itertools.cycle(texts), sequences)]


def save_config(options: Options, folder: Path) -> None:
    """``config.json``, from which the engine starts; its weights come by an update."""
    if options["checkpoint"] is not None:
        shutil.copy(Path(options["checkpoint"]) / "config.json", folder)
    else:
        models.save_config(shape_of(options), folder)


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


def predicted(model: Any, prompts: list[list[int]], count: int) -> dict[str, Any]:
    """The result of ``precision`` for half the KL, on ``count`` tokens after the same prompts."""
    exact = copy.deepcopy(model).float()
    options = command.Options(model="", kv_cache=True, seed=SEED)
    texts = [Text(prompt, None) for prompt in prompts]
    texts = tokens.complete(exact, texts, count, SEED)
    precision = command.measure(exact, options, texts)
    del exact
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return precision
