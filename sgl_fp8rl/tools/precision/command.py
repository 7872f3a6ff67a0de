"""``sgl-fp8rl precision``: load a BF16 model, and find which of its layers FP8 hurts."""

import functools
import json
import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from sgl_fp8rl.formats import FORMATS
from sgl_fp8rl.tools.precision import report, search, tokens
from sgl_fp8rl.tools.precision.groups import Group, fp8_groups
from sgl_fp8rl.tools.precision.replay import Replay

TOKENS = {"cuda": 4096, "cpu": 1024}
"""Measured by default."""


def check(options: Namespace) -> None:
    """Check numbers and the device."""
    if options.budget_kl is not None and not 0 <= options.budget_kl < math.inf:
        raise ValueError(f"--budget-kl is {options.budget_kl}; pass a number of nats, 0 or more")
    if options.tokens is not None and options.tokens < 1:
        raise ValueError(f"--tokens is {options.tokens}; pass a positive integer")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch sees no GPU; use --device cpu")


def run(options: Namespace) -> None:
    """Measure, print the report, and write it as JSON.

    Args:
        options: the command line, as ``cli.py`` parses it.

    Raises:
        ValueError: the model or the prompts cannot be measured.
        OSError: a file cannot be read or written.
    """
    check(options)
    output: Path | None = options.output
    if output is not None:
        output.touch()  # fails now, not after measuring
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        model = load(options.model, device, getattr(torch, options.dtype))
        # fails now, not after sampling
        groups = fp8_groups(model, FORMATS[options.format], options.ragged)
        found = measure(model, groups, texts_of(model, options), options)
    except torch.OutOfMemoryError:
        raise ValueError(
            f"{options.model} and its measurement do not fit into the GPU's memory; use fewer "
            f"--tokens, or --device cpu"
        ) from None
    print(report.render(found))
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n")


def first_line(error: BaseException) -> str:
    """The first line of its message, or its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def load(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Load a causal language model with BF16 weights from a folder or the hub.

    Args:
        dtype: dtype of the arithmetic. BF16 rounds so much after every change that it hides the
            effect of FP8 in a single layer; FP32 takes twice the memory.

    Raises:
        ValueError: there is no such model, or it is not in BF16.
    """
    try:
        from safetensors import SafetensorError
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise ValueError(
            f"precision requires transformers 5 ({error}); run pip install 'transformers>=5'"
        ) from None
    disable_progress_bar()
    if Path(name).is_absolute() and not (Path(name) / "config.json").exists():
        raise ValueError(f"{name} has no config.json; pass the folder of a model")
    try:
        config = AutoConfig.from_pretrained(name)
        is_quantized = getattr(config, "quantization_config", None) is not None
        if not is_quantized:
            model = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=torch.bfloat16)
    except torch.OutOfMemoryError:
        raise
    except (OSError, ImportError, LookupError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"{name} cannot be loaded ({first_line(error).rstrip('.')}); pass a folder, or a model "
            f"of the hub that is in the cache or that you may download"
        ) from None
    if is_quantized:
        raise ValueError(
            f"{name} is a quantized checkpoint; pass the BF16 model that it was made from"
        )
    return model.eval().to(device=device, dtype=dtype)


def texts_of(model: Any, options: Namespace) -> list[tokens.Text]:
    """The prompts and responses to measure on.

    Raises:
        ValueError: the prompts cannot be read, or the model samples NaN.
    """
    count = options.tokens or TOKENS["cuda" if model.device.type == "cuda" else "cpu"]
    if options.prompts is None:
        texts = tokens.from_nothing(model, count, options.seed)
    else:
        texts = tokens.read_texts(options.prompts, tokenizer(options.model))
    return tokens.complete(model, texts, count, options.seed)


def tokenizer(model: str) -> tokens.Tokenize:
    """The model's tokenizer, loaded when a text needs it."""

    @functools.cache
    def loaded() -> Any:
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(model)
        if not found("a").input_ids:  # without files, transformers makes an empty one
            raise ValueError(f"{model} has no tokenizer; pass prompts as lists of token ids")
        return found

    def tokenize(given: Any, *, begins: bool) -> list[int]:
        if isinstance(given, str):
            return list(loaded()(given, add_special_tokens=begins).input_ids)
        chat = loaded().apply_chat_template(given, add_generation_prompt=True, return_dict=False)
        return list(chat)

    return tokenize


def measure(
    model: Any, groups: Sequence[Group], texts: Sequence[tokens.Text], options: Namespace
) -> dict[str, Any]:
    """The report, in the form of ``report.as_json``.

    Raises:
        ValueError: the model returns NaN.
    """
    replay = Replay(model, tokens.batches_of(texts, model.device))
    ranked = search.rank(tqdm(groups, unit="layer", file=sys.stderr), replay.divergence)
    everything = search.point(ranked, 0, replay.divergence)
    budget = options.budget_kl
    if budget is None:
        budget = report.BUDGET_SHARE * everything.divergence.kl
    points = search.shortest(ranked, everything, budget, replay.divergence)
    facts = {
        "model": options.model,
        "format": options.format,
        "ragged": options.ragged,
        "device": torch.cuda.get_device_name(model.device)
        if model.device.type == "cuda"
        else "CPU",
        "arithmetic": str(model.dtype).removeprefix("torch."),
        "source": "sampled by the model"
        if options.prompts is None
        else "sampled from the prompts, or given",
        "seed": options.seed,
        "sequences": len(texts),
        "tokens": replay.tokens,
    }
    return report.as_json(facts, ranked, points, budget)
