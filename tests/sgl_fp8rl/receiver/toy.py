"""Small models with SGLang-like storage and loaders, and the bytes that an update must leave.

``storage`` and ``load`` copy as SGLang does: stacked q/k/v, gate/up inside of a stack of experts, a
padded vocabulary, slices of a tensor-parallel rank. ``expected`` computes the same storage in NumPy
with ``tests.oracle``, from whole HF tensors: quantize, then slice, then stack.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sgl_fp8rl.protocol.manifest import describe
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from sgl_fp8rl.receiver.routes.route_tracer import record_routes
from sgl_fp8rl.receiver.session import Session
from sgl_fp8rl.receiver.writers.shared_memory import Bucket, Slot
from sgl_fp8rl.receiver.writers.weight_writer import rows_of
from tests import oracle

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
Tensors = dict[str, torch.Tensor]
Weights = Iterable[tuple[str, torch.Tensor]]
Shapes = dict[str, tuple[int, ...]]

HIDDEN, HEADS, INNER, EXPERTS, VOCAB, PADDED = 128, 256, 256, 2, 300, 320
SHAPES: Shapes = {
    "embed.weight": (VOCAB, HIDDEN),
    **{f"attn.{x}.weight": (HEADS, HIDDEN) for x in "qkv"},
    **{f"attn.{x}.bias": (HEADS,) for x in "qkv"},
    "attn.o.weight": (HIDDEN, HEADS),
    **{f"mlp.experts.{e}.{x}.weight": (INNER, HIDDEN) for e in (0, 1) for x in ("gate", "up")},
    **{f"mlp.experts.{e}.down.weight": (HIDDEN, INNER) for e in (0, 1)},
    "mlp.router.weight": (EXPERTS, HIDDEN),
    "norm.weight": (HIDDEN,),
}
FP8_NAMES = [name for name in SHAPES if name.startswith(("attn", "mlp.exp")) and "weight" in name]


def copy_all(model: "Model", weights: Weights) -> None:
    """A loader that copies each tensor into the parameter of its name."""
    for name, weight in weights:
        model.data(name).copy_(weight)


class Model(nn.Module):
    """Parameters by dotted name, and a loader."""

    def __init__(
        self, storage: Tensors, loader: Callable[["Model", Weights], None] = copy_all
    ) -> None:
        super().__init__()
        for name, tensor in storage.items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(last, nn.Parameter(tensor, requires_grad=False))
        self.loader = loader

    def load_weights(self, weights: Weights) -> None:
        self.loader(self, weights)

    def data(self, name: str) -> torch.Tensor:
        """What SGLang's loaders write into: ``param.data``."""
        return self.get_parameter(name).data


def fp8_storage(name: str, *shape: int) -> Tensors:
    """Codes and scales that no update makes, so that what was not written shows."""
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    codes = torch.full(shape, 7.0).to(FP8)
    return {name: codes, f"{name}_scale_inv": torch.full(blocks, -5.0)}


def storage(tp: int = 1) -> Tensors:
    return {
        "embed.weight": torch.full((PADDED, HIDDEN), 9.0, dtype=BF16),
        **fp8_storage("attn.qkv.weight", 3 * HEADS // tp, HIDDEN),
        "attn.qkv.bias": torch.full((3 * HEADS // tp,), 9.0, dtype=BF16),
        **fp8_storage("attn.o.weight", HIDDEN, HEADS // tp),
        **fp8_storage("mlp.w13_weight", EXPERTS, 2 * INNER // tp, HIDDEN),
        **fp8_storage("mlp.w2_weight", EXPERTS, HIDDEN, INNER // tp),
        "mlp.router.weight": torch.full((EXPERTS, HIDDEN), 9.0),
        "norm.weight": torch.full((HIDDEN,), 9.0, dtype=BF16),
    }


def toy(rank: int = 0, tp: int = 1) -> Model:
    """The model of one tensor-parallel rank."""

    def load(model: Model, weights: Weights) -> None:
        for name, weight in weights:
            _load_one(model, name, weight, rank, tp)

    return Model(storage(tp), load)


def _load_one(model: Model, name: str, weight: torch.Tensor, rank: int, tp: int) -> None:
    heads, inner = HEADS // tp, INNER // tp
    match name.split("."):
        case ["embed", _]:
            model.data(name)[:VOCAB].copy_(weight)
            model.data(name)[VOCAB:].fill_(0)
        case ["attn", "o", _]:
            model.data(name).copy_(weight.narrow(1, rank * heads, heads))
        case ["attn", x, kind]:
            start = "qkv".index(x) * heads
            target = model.data(f"attn.qkv.{kind}").narrow(0, start, heads)
            target.copy_(weight.narrow(0, rank * heads, heads))
        case ["mlp", "experts", expert, "down", _]:
            model.data("mlp.w2_weight")[int(expert)].copy_(weight[:, rank * inner :][:, :inner])
        case ["mlp", "experts", expert, x, _]:
            half = model.data("mlp.w13_weight")[int(expert)].chunk(2)[x == "up"]
            half.copy_(weight.chunk(tp)[rank])
        case _:
            model.data(name).copy_(weight)


def checkpoint(seed: int = 0, dtype: torch.dtype = BF16, shapes: Shapes = SHAPES) -> Tensors:
    """Random weights whose blocks differ in size, with a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            tensor *= torch.logspace(-3, 2, shape[0]).unsqueeze(1)
            tensor[:128, :128] *= name != "attn.q.weight"
        tensors[name] = tensor.to(dtype)
    return tensors


def quantized(tensors: Mapping[str, torch.Tensor], names: Collection[str] = FP8_NAMES) -> Tensors:
    """The same weights, of which these are codes and scales, by the oracle."""
    streamed: Tensors = {}
    for name, tensor in tensors.items():
        if name in names:
            codes, scale = oracle.quantize_weight(tensor.float().numpy())
            streamed[name] = torch.from_numpy(codes).view(FP8)
            streamed[f"{name}_scale_inv"] = torch.from_numpy(scale)
        else:
            streamed[name] = tensor
    return streamed


def expected(
    tensors: Mapping[str, torch.Tensor], rank: int = 0, tp: int = 1
) -> dict[str, NDArray[np.uint8]]:
    """The bytes of each parameter of one rank once ``tensors`` are applied."""
    parts: dict[str, NDArray[np.generic]] = {}
    for name, tensor in tensors.items():
        if name in FP8_NAMES:
            rounded = tensor.to(BF16).float().numpy()  # as the engine's model dtype has it
            parts[name], parts[f"{name}_scale_inv"] = oracle.quantize_weight(rounded)
        else:
            parts[name] = tensor.to(BF16).view(torch.int16).numpy()
    parts["mlp.router.weight"] = tensors["mlp.router.weight"].float().numpy()

    def rows(name: str) -> NDArray[np.generic]:
        part: NDArray[np.generic] = np.split(parts[name], tp, 0)[rank]
        return part

    def columns(name: str) -> NDArray[np.generic]:
        part: NDArray[np.generic] = np.split(parts[name], tp, 1)[rank]
        return part

    whole: dict[str, NDArray[np.generic]] = {
        "embed.weight": np.pad(parts["embed.weight"], ((0, PADDED - VOCAB), (0, 0))),
        "attn.qkv.bias": np.concatenate([rows(f"attn.{x}.bias") for x in "qkv"]),
        "mlp.router.weight": parts["mlp.router.weight"],
        "norm.weight": parts["norm.weight"],
    }
    for end in ("", "_scale_inv"):
        w = f"weight{end}"
        whole[f"attn.qkv.{w}"] = np.concatenate([rows(f"attn.{x}.{w}") for x in "qkv"])
        whole[f"attn.o.{w}"] = columns(f"attn.o.{w}")
        experts = [f"mlp.experts.{e}" for e in range(EXPERTS)]
        whole[f"mlp.w13_{w}"] = np.stack(
            [np.concatenate([rows(f"{e}.gate.{w}"), rows(f"{e}.up.{w}")]) for e in experts]
        )
        whole[f"mlp.w2_{w}"] = np.stack([columns(f"{e}.down.{w}") for e in experts])
    return {name: _bytes(array) for name, array in whole.items()}


def _bytes(array: NDArray[np.generic]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def contents(model: nn.Module) -> dict[str, NDArray[np.uint8]]:
    """The bytes of each parameter now."""
    return {
        name: p.data.flatten().view(torch.uint8).cpu().numpy().copy()
        for name, p in model.named_parameters()
    }


def lose(model: nn.Module) -> None:
    """Fill the memory, since what a memory saver took away holds anything."""
    for parameter in model.parameters():
        parameter.data.view(torch.uint8).fill_(0x7F)


def same(a: dict[str, NDArray[np.uint8]], b: dict[str, NDArray[np.uint8]]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


CHUNK_BYTES = 1 << 20
RUN = "a run"


def engine(model: nn.Module, shapes: Shapes) -> EngineWeights:
    """The update state of a model whose routes are recorded; it serves its checkpoint."""
    weights = EngineWeights(model, BF16)
    weights.table = record_routes(model, shapes)
    weights.state, weights.reason = State.SERVING, ""
    return weights


def begin(
    weights: EngineWeights,
    tensors: Tensors,
    version: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
    run: str = RUN,
    slots: int = 2,
    mapped: Collection[str] = (),
) -> Session:
    """A session whose bucket holds the first chunks of these tensors, one in each slot; those that
    are mapped come in no bucket."""
    manifest = describe(tensors.items(), chunk_bytes, mapped, slots=slots)
    weights.check_policy(Policy(run, version))
    if not weights.knows(manifest.fingerprint):
        weights.accept(manifest)
    content = torch.full((manifest.bucket_bytes,), 0xA5, dtype=torch.uint8)
    weights.memory.bucket = Bucket("toy", content)
    session = weights.begin(manifest.fingerprint, Policy(run, version))
    for index in range(min(slots, len(session.writer.chunks))):
        if not session.writer.is_mapped(index):
            fill(session, tensors, index)
    return session


def fill(session: Session, tensors: Tensors, index: int) -> None:
    """Lay the slices of a chunk into the session's bucket."""
    bucket = session.weights.memory.bucket
    assert bucket is not None
    for chunk_slice in session.writer.chunks[index]:
        tensor = tensors[chunk_slice.name]
        target = Slot(bucket.content, 0).tensor(
            chunk_slice, session.writer.manifest.tensors[chunk_slice.name]
        )
        target.copy_(rows_of(tensor, chunk_slice))


def write(session: Session, tensors: Tensors) -> None:
    """Write every chunk."""
    for index in range(len(session.writer.chunks)):
        if not session.writer.is_mapped(index):
            fill(session, tensors, index)
        session.write(index)


def update(
    weights: EngineWeights,
    tensors: Tensors,
    version: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
    run: str = RUN,
) -> None:
    session = begin(weights, tensors, version, chunk_bytes, run)
    write(session, tensors)
    session.finish()
    weights.commit()


BIG: Shapes = {"w": (600, 200), "norm": (300,)}
"""A matrix whose last blocks are ragged, and a vector."""


def ragged(make: Callable[[Model, Shapes], EngineWeights] = engine) -> EngineWeights:
    """[600, 200] in FP8, whose last blocks are ragged, and a vector."""
    storage = {**fp8_storage("w", 600, 200), "norm": torch.zeros(300, dtype=BF16)}
    return make(Model(storage), BIG)
