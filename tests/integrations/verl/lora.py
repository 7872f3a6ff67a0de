"""An adapter of PEFT's, and the checkpoint that is merged with it by hand."""

from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import save_file

from tests.engine import models

RANK, ALPHA = 4, 8
TARGETS = ["q_proj", "v_proj", "o_proj"]
PREFIX = "base_model.model."


def make(checkpoint: Path, folder: Path) -> tuple[Path, Path]:
    """Write both; their folders.

    What is added to a matrix are small multiples of a power of two, so that however it is computed
    it has the same bits.
    """
    adapter = folder / "adapter"
    weights, merged = {}, {}
    for name, base in models.named_tensors(checkpoint):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in TARGETS:
            continue
        random = torch.Generator().manual_seed(len(weights))
        a, b = (
            torch.randint(-2, 3, shape, generator=random) / 16
            for shape in ((RANK, base.shape[1]), (base.shape[0], RANK))
        )
        weights[f"{PREFIX}{module}.lora_A.weight"] = a
        weights[f"{PREFIX}{module}.lora_B.weight"] = b
        merged[name] = (base.float() + ALPHA / RANK * (b @ a)).bfloat16()
    assert merged
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS)
    config.save_pretrained(adapter)
    save_file(weights, adapter / "adapter_model.safetensors")
    return adapter, models.with_tensors(checkpoint, folder / "merged", merged)
