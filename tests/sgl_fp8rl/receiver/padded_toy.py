"""A toy model whose matrices are cut inside of blocks, on one rank or more, and its bytes.

Loaders copy as SGLang's do, into parameters without padding; ``expected`` lays blocks out by hand.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_fp8rl.formats import BLOCK_FP8
from sgl_fp8rl.formats.padding import Padding, Shard, fit, fit_experts, pad_storage
from tests import oracle
from tests.engine.expected import cut
from tests.sgl_fp8rl.receiver import toy as toy_of_whole_blocks
from tests.sgl_fp8rl.receiver.toy import BF16, Model, Shapes, Tensors, Weights, fp8_storage

HIDDEN, HEADS, KV_HEADS, INNER, EXPERTS = 240, 448, 384, 384, 3
SHAPES: Shapes = {
    "q": (HEADS, HIDDEN),
    "k": (KV_HEADS, HIDDEN),
    "o": (HIDDEN, HEADS),
    **{f"{e}.{x}": (INNER, 256) for e in range(EXPERTS) for x in ("gate", "up")},
    **{f"{e}.down": (256, INNER) for e in range(EXPERTS)},
    "norm": (HIDDEN,),
}


def storage(rank: int, tp: int) -> tuple[Tensors, dict[str, Padding]]:
    """Parameters with padding, filled with what no update makes; and the padding."""
    heads, kv, inner = (Shard(n // tp, rank, tp) for n in (HEADS, KV_HEADS, INNER))
    paddings = {"qk": fit(BLOCK_FP8, [heads, kv], Shard(HIDDEN))[0]}
    paddings["o"] = fit(BLOCK_FP8, [Shard(HIDDEN)], heads)[0]
    both, _ = fit_experts(BLOCK_FP8, 256, inner)
    if both is not None:
        paddings["w13"], paddings["w2"] = both
    tensors = {"norm": torch.full((HIDDEN,), 9.0, dtype=BF16)}
    shapes: Shapes = {"w13": (2 * INNER // tp, 256), "w2": (256, INNER // tp)}
    shapes |= {name: each.shape for name, each in paddings.items() if each is not None}
    for name, shape in shapes.items():
        tensors |= fp8_storage(name, *((EXPERTS,) if name in ("w13", "w2") else ()), *shape)
    return tensors, {name: each for name, each in paddings.items() if each is not None}


def toy(rank: int = 0, tp: int = 1) -> Model:
    """The model of one tensor-parallel rank."""
    heads, kv, inner = HEADS // tp, KV_HEADS // tp, INNER // tp

    def load(model: Model, weights: Weights) -> None:
        for name, weight in weights:
            match name.split("."):
                case ["q"]:
                    target = model.data("qk").narrow(0, 0, heads)
                    target.copy_(weight.narrow(0, rank * heads, heads))
                case ["k"]:
                    target = model.data("qk").narrow(0, heads, kv)
                    target.copy_(weight.narrow(0, rank * kv, kv))
                case ["o"]:
                    model.data("o").copy_(weight.narrow(1, rank * heads, heads))
                case [expert, "down"]:
                    target = model.data("w2")[int(expert)]
                    target.copy_(weight.narrow(1, rank * inner, inner))
                case [expert, x]:
                    half = model.data("w13")[int(expert)].chunk(2)[x == "up"]
                    half.copy_(weight.narrow(0, rank * inner, inner))
                case _:
                    model.data(name).copy_(weight)

    tensors, paddings = storage(rank, tp)
    model = Model(tensors, load)
    for name, padding in paddings.items():
        scales = model.get_parameter(f"{name}_scale_inv")
        pad_storage(model.get_parameter(name), scales, padding, BLOCK_FP8.block)
    return model


def checkpoint(seed: int = 0) -> Tensors:
    """Random weights whose rows and columns differ in size, so that no block is like another."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in SHAPES.items():
        tensor = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            tensor *= torch.logspace(-2, 2, shape[0]).unsqueeze(1)
            tensor *= torch.logspace(-1, 1, shape[1])
        tensors[name] = tensor.to(BF16)
    return tensors


def quantized(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The same weights as codes and scales, by the oracle."""
    return toy_of_whole_blocks.quantized(tensors, [n for n, t in tensors.items() if t.dim() > 1])


def expected(
    tensors: Mapping[str, torch.Tensor], rank: int = 0, tp: int = 1
) -> dict[str, NDArray[np.uint8]]:
    """The bytes of each parameter of one rank once ``tensors`` are applied."""
    whole = {
        name: oracle.quantize_weight(tensor.float().numpy())
        for name, tensor in tensors.items()
        if tensor.dim() > 1
    }

    def rows(name: str) -> tuple[NDArray[np.generic], ...]:
        return cut(cut(whole[name], 0, rank, tp), 1, 0, 1)

    def columns(name: str) -> tuple[NDArray[np.generic], ...]:
        return cut(whole[name], 1, rank, tp)

    found = {"norm": tensors["norm"].view(torch.int16).numpy()}
    for i, end in enumerate(("", "_scale_inv")):
        found[f"qk{end}"] = np.concatenate([rows("q")[i], rows("k")[i]])
        found[f"o{end}"] = columns("o")[i]
        found[f"w13{end}"] = np.stack(
            [np.concatenate([rows(f"{e}.gate")[i], rows(f"{e}.up")[i]]) for e in range(EXPERTS)]
        )
        found[f"w2{end}"] = np.stack([columns(f"{e}.down")[i] for e in range(EXPERTS)])
    return {
        name: np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for name, array in found.items()
    }
