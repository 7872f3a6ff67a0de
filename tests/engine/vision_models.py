"""Tiny random vision-language checkpoints of real architectures, and what processes their images.

As in ``models.py``, every dimension is a whole number of FP8 blocks, also in the vision tower: it
is BF16 by choice. Nothing is downloaded.
"""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from tests.engine import models

IMAGE, VIDEO, START, END, PAD = range(models.VOCAB - 5, models.VOCAB)
"""Tokens. IMAGE, between START and END, stands for one image in a prompt."""
_SPECIAL = {
    "<|image_pad|>": IMAGE,
    "<|video_pad|>": VIDEO,
    "<|vision_start|>": START,
    "<|vision_end|>": END,
    "<|pad|>": PAD,
}
_FIRST_WORD = 0x4E00
"""Words are single characters: SGLang decodes a prompt, and encodes it again with its images."""
_TOWER = {"depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2}


@dataclass(frozen=True)
class Family:
    """How one architecture differs from the common tiny decoder and tower."""

    text: dict[str, Any]
    mrope: dict[str, Any]
    tower: dict[str, Any]
    patch: int
    """Pixels, of each side."""
    processor: str
    video_processor: str


FAMILIES = {
    "qwen2_5_vl": Family(
        models.WIDE,
        {"mrope_section": [16, 24, 24]},
        {"fullatt_block_indexes": [1]},
        14,
        "Qwen2_5_VLProcessor",
        "Qwen2VLVideoProcessor",
    ),
    # Its tower also adds to what the first layer of the language model returns.
    "qwen3_vl": Family(
        {},
        {"mrope_section": [24, 20, 20], "mrope_interleaved": True},
        {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        16,
        "Qwen3VLProcessor",
        "Qwen3VLVideoProcessor",
    ),
}


def make_checkpoint(family: str, path: Path, seed: int = 0, *, tied: bool = False) -> Path:
    """Write configuration, weights, tokenizer and image processor into the folder ``path``.

    Args:
        family: a key of ``FAMILIES``.
        seed: of all weights.
        tied: whether the head is the embedding, as in the smaller published models.
    """
    spec = FAMILIES[family]
    text = models.COMMON | spec.text | {"tie_word_embeddings": tied}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, **spec.mrope}
    if text["head_dim"] is None:
        del text["head_dim"]
    config = transformers.AutoConfig.for_model(
        family,
        text_config=text,
        vision_config={**_TOWER, "out_hidden_size": text["hidden_size"], **spec.tower},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=tied,
    )
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    models.draw(path, seed)
    merged = (2 * spec.patch) ** 2  # pixels of one token
    getattr(transformers, spec.processor)(
        image_processor=transformers.Qwen2VLImageProcessor(
            patch_size=spec.patch,
            size={"shortest_edge": 4 * merged, "longest_edge": 16 * merged},
        ),
        tokenizer=_tokenizer(),
        video_processor=getattr(transformers, spec.video_processor)(),
    ).save_pretrained(path)
    return path


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = {chr(_FIRST_WORD + i): i for i in range(IMAGE)}
    tokenizer = Tokenizer(WordLevel(words | _SPECIAL, unk_token="<|pad|>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|pad|>",
        pad_token="<|pad|>",
        additional_special_tokens=list(_SPECIAL),
    )


def with_another_tower(path_in: Path, path_out: Path, seed: int) -> Path:
    """Copy a checkpoint with every tensor of the vision tower changed, as training changes it."""
    with TemporaryDirectory() as folder:  # not ``path_out``: tensors may be views of their file
        changed = models.named_tensors(models.perturb(path_in, folder, seed))
        tower = {name: tensor for name, tensor in changed if "visual." in name}
        assert 0 < len(tower) < len(changed)
        return models.with_tensors(path_in, path_out, tower)
