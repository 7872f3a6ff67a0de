"""``sgl-fp8rl precision``: load a BF16 model, and find which of its layers FP8 hurts."""

import functools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from sgl_fp8rl.formats import CHOICES
from sgl_fp8rl.tools.precision import kv, report, search, tokens
from sgl_fp8rl.tools.precision.divergence import Divergence
from sgl_fp8rl.tools.precision.groups import Group, fp8_groups
from sgl_fp8rl.tools.precision.replay import Replay

TOKENS = {"cuda": 4096, "cpu": 1024}
"""Measured by default."""


@dataclass(frozen=True)
class Options:
    """The command line. ``None``: the default depends on the device or the measurement."""

    model: str
    budget_kl: float | None = None
    """Nats per token; default half of the KL of FP8 in every layer."""
    prompts: Path | None = None
    tokens: int | None = None
    kv_cache: bool = False
    device: str | None = None
    dtype: torch.dtype = torch.float32
    """Dtype of the arithmetic; weights have BF16 values in either case."""
    seed: int = 0
    format: str = "block-fp8"
    """What the layers are in, as the engine's option names it."""
    ragged: str = "pad"
    """What becomes of layers whose sizes are not multiples of 128, likewise."""

    def __post_init__(self) -> None:
        if self.budget_kl is not None and not 0 <= self.budget_kl < math.inf:
            raise ValueError(f"--budget-kl is {self.budget_kl}; pass a number of nats, 0 or more")
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"--tokens is {self.tokens}; pass a positive integer")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device is cuda, but torch sees no GPU; use --device cpu")


def run(options: Options, output: Path | None) -> None:
    """Measure, print the report, and write it as JSON.

    Raises:
        ValueError: the model or the prompts cannot be measured.
        OSError: a file cannot be read or written.
    """
    if output is not None:
        output.touch()  # fails now, not after measuring
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        model = load(options.model, device, options.dtype)
        _groups(model, options)  # fails now, not after sampling
        found = measure(model, options, texts_of(model, options))
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


def texts_of(model: Any, options: Options) -> list[tokens.Text]:
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

    def tokenize(given: Any, /, *, begins: bool) -> list[int]:
        if isinstance(given, str):
            return list(loaded()(given, add_special_tokens=begins).input_ids)
        chat = loaded().apply_chat_template(given, add_generation_prompt=True, return_dict=False)
        return list(chat)

    return tokenize


def _groups(model: Any, options: Options) -> list[Group]:
    return fp8_groups(model, CHOICES[options.format], options.ragged)


def measure(model: Any, options: Options, texts: Sequence[tokens.Text]) -> dict[str, Any]:
    """The report, in the form of ``report.as_json``.

    Raises:
        ValueError: the model has no FP8 layers, or returns NaN.
    """
    groups = _groups(model, options)
    batches = tokens.batches_of(texts, model.device)
    replay = Replay(model, batches)
    with tqdm(total=len(groups), unit="layer", file=sys.stderr) as bar:

        def one(some: Sequence[Group]) -> Divergence:
            divergence = replay.divergence(some)
            bar.update()
            return divergence

        ranked = search.rank(groups, one)
    everything = search.point(ranked, 0, replay.divergence)
    budget = options.budget_kl
    if budget is None:
        budget = report.BUDGET_SHARE * everything.divergence.kl
    points = search.shortest(ranked, everything, budget, replay.divergence)
    ignored = tuple(damage.group for damage in ranked[: points[-1].ignored])
    facts = {
        "model": options.model,
        "format": options.format,
        "ragged": options.ragged,
        "device": _device_name(model.device),
        "arithmetic": str(model.dtype).removeprefix("torch."),
        "source": "sampled by the model"
        if options.prompts is None
        else "sampled from the prompts, or given",
        "seed": options.seed,
        "sequences": len(texts),
        "tokens": replay.tokens,
        "kl_noise": replay.noise(options.seed).kl,
    }
    mitigations = _mitigations(
        model, replay, batches, groups, ignored, everything, points[-1], options
    )
    return report.as_json(
        facts, ranked, points, budget, mitigations, report.Bytes.of(model, groups)
    )


def _mitigations(
    model: Any,
    replay: Replay,
    batches: list[tokens.Sequences],
    groups: list[Group],
    ignored: tuple[Group, ...],
    everything: search.Point,
    answer: search.Point,
    options: Options,
) -> list[report.Mitigation]:
    ends = tuple(group for group in groups if group.layer in (0, replay.layers - 1))
    inner = [group for group in groups if group not in ends]
    mitigations = [
        report.Mitigation("all FP8", (), everything.divergence),
        report.Mitigation("first and last BF16", ends, replay.divergence(inner)),
        report.Mitigation("ignore list", ignored, answer.divergence),
    ]
    if options.kv_cache:
        scales_L2 = kv.layer_scales(model, batches)
        with kv.rounded(scales_L2):
            for name, some in (("FP8 KV alone", []), ("all FP8, FP8 KV", groups)):
                bf16 = tuple(groups) if not some else ()
                mitigations.append(
                    report.Mitigation(name, bf16, replay.divergence(some, first_layer=0))
                )
    return mitigations


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
