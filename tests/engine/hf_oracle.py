"""Logprobs by transformers in FP32, from the weights that an FP8 engine should hold.

The FP8 layers are quantized and dequantized by ``tests.oracle``; activations are not quantized.
A fault is planted in the weights to see what an engine that has it would answer: a comparison
that cannot tell the fault from the healthy weights proves nothing.
"""

import math
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests import oracle
from tests.engine import models

YARN = (0.1 * math.log(models.MLA["rope_parameters"]["factor"]) + 1.0) ** 2
"""By which DeepSeek's own code scales its attention's logits where mscale_all_dim is 1
(modeling_deepseek.py of DeepSeek-V2). transformers 5.19's class of V2 does so, that of 5.12 does
not; both classes of V3 do."""
Fault = Callable[[models.Tensors, list[str]], None]


def prompt_logprobs(
    path: Path | str,
    token_ids: Sequence[int],
    *,
    fault: Fault | None = None,
    fp8: bool = True,
    fmt: str = "block-fp8",
    prepare: Callable[[Any], None] | None = None,
) -> list[float]:
    """Logprob of each token given those before it.

    Args:
        path: a checkpoint of ``tests.engine.models``.
        token_ids: T token ids.
        fault: plants a fault in layer 0, see below.
        fp8: with ``False`` the weights stay BF16.
        fmt: of the engine's layers, as the option ``format`` has it.
        prepare: changes the model before it computes.

    Returns:
        T - 1 natural logarithms, of the second token to the last.
    """
    from transformers import AutoModelForCausalLM

    names = models.fp8_names(path) if fp8 else []
    tensors = {name: tensor.float() for name, tensor in models.named_tensors(path)}
    for name in names:
        tensors[name] = _dequantize(*_quantize(tensors[name], fmt))
    if fault is shift_scales:
        shift_scales(tensors, names, fmt)
    elif fault is not None:
        fault(tensors, names)
    with tempfile.TemporaryDirectory() as folder:
        # Through a checkpoint, because only from_pretrained stacks experts as the class has them.
        shutil.copy(Path(path) / "config.json", folder)
        save_file(tensors, Path(folder) / models.WEIGHTS, metadata={"format": "pt"})
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    if info["missing_keys"] or info["unexpected_keys"]:
        raise RuntimeError(f"transformers did not load {path} completely: {info}")
    if "kv_lora_rank" in model.config.to_dict():
        scale_mla(model, YARN)
    if prepare is not None:
        prepare(model)
    ids_T = torch.tensor(token_ids)
    with torch.inference_mode():
        logprobs_TV = model(ids_T[None]).logits[0].double().log_softmax(-1)
    return [float(x) for x in logprobs_TV[:-1].gather(-1, ids_T[1:, None]).squeeze(-1)]


def scale_mla(model: Any, factor: float) -> None:
    """Scale the logits of MLA's attention, whatever this version of transformers does."""
    for layer in model.model.layers:
        layer.self_attn.scaling = factor / math.sqrt(layer.self_attn.qk_head_dim)


def _quantize(weight: torch.Tensor, fmt: str) -> tuple[oracle.Codes, oracle.F32]:
    return oracle.quantize_weight(weight.numpy(), power_of_two=fmt.endswith("ue8m0"))


def _dequantize(codes: oracle.Codes, scale: oracle.F32) -> torch.Tensor:
    return torch.from_numpy(oracle.dequantize_weight(codes, scale).astype(np.float32))


def _swap(tensors: models.Tensors, pairs: list[tuple[str, str]]) -> None:
    if not pairs:
        raise ValueError("this checkpoint has nothing to swap in layer 0")
    for a, b in pairs:
        tensors[a], tensors[b] = tensors[b], tensors[a]


def swap_gate_up(tensors: models.Tensors, names: list[str]) -> None:
    """Exchange gate and up of layer 0, in every expert; also where they are fused."""
    fused = [n for n in tensors if "layers.0." in n and n.endswith("gate_up_proj.weight")]
    for name in fused:
        tensors[name] = torch.cat(tensors[name].chunk(2)[::-1])
    gates = [n for n in tensors if re.search(r"layers\.0\..*\b(gate_proj|w1)\.weight$", n)]
    other = {"gate_proj": "up_proj", "w1": "w3"}
    if not fused:
        ups = [re.sub("gate_proj|w1", lambda m: other[m.group()], n) for n in gates]
        _swap(tensors, list(zip(gates, ups, strict=True)))


def misroute_expert(tensors: models.Tensors, names: list[str]) -> None:
    """Exchange experts 0 and 1 of layer 0: the router sends tokens to the wrong one."""
    first = [n for n in tensors if "layers.0." in n and ".experts.0." in n]
    _swap(tensors, [(n, n.replace(".experts.0.", ".experts.1.")) for n in first])


def shift_scales(tensors: models.Tensors, names: list[str], fmt: str = "block-fp8") -> None:
    """Give each block of one quantized tensor of layer 0 the scale of its neighbour, or each row
    that of the row a block on: next to it they are alike."""
    by_block = fmt.startswith("block-fp8")
    fits = [n for n in names if by_block or len(tensors[n]) > models.BLOCK]
    name = [n for n in fits if "layers.0." in n][-1]
    # Quantizing fake-quantized values again gives the same codes and scales.
    codes, scale = _quantize(tensors[name], fmt)
    shift, axis = (1, -1) if by_block else (models.BLOCK, -2)
    tensors[name] = _dequantize(codes, np.roll(scale, shift, axis))


def stale_kv_b(tensors: models.Tensors, names: list[str]) -> None:
    """Attend with tensors that were derived from the kv_b_proj of another policy."""
    for name, tensor in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            tensors[name] = models.perturbed(name, tensor, seed=2).float()


def mean_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """Mean of ``|a - b|`` over tokens."""
    return float(np.mean(np.abs(np.subtract(a, b))))
