"""FSDP2 gathers the codes of two gloo ranks: the forward, the gradients, and what an update reads
are those of one rank."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from sgl_fp8rl.ops.reference import quantize_weight
from sgl_fp8rl.protocol.manifest import ManifestError
from tests.trainer_bridge import moe_models
from tests.trainer_bridge.test_fp8_forward import (
    INT8_CACHE,
    FakeEngine,
    check_same_bytes,
    fp8_names,
    hf_tensors,
    sums_of,
    tiny,
)
from tests.trainer_bridge.test_fsdp import WORLD, run, sharded, whole
from trainer_bridge import fp8_forward
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.fp8.fp8_forward import convert_layers
from trainer_bridge.fp8.fp8_layers import convert
from trainer_bridge.fp8.fp8_weights import GatheredCodes

Tensor = torch.Tensor
BF16 = torch.bfloat16
UNEVEN = 192
"""Rows of each rank's part: not a multiple of 128."""
GRADIENT_ERROR = 2.0**-5
"""Of a gradient that two ranks average, as a part of its largest element. Healthy: 0.0096."""


def tokens() -> Tensor:
    return torch.randint(moe_models.VOCAB, (4, 9), generator=torch.Generator().manual_seed(0))


def loss_of(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids).logits
    return logits.float().log_softmax(-1)[..., 3].mean()


def weights_seen(model: Any) -> Iterator[type]:
    """What the weights of computing layers are in a forward."""
    seen: list[type] = []
    for module in model.modules():
        if hasattr(module, "fp8_parameters"):
            name = next(iter(module.fp8_parameters))
            module.register_forward_pre_hook(
                lambda m, _, name=name: seen.append(type(getattr(m, name)))
            )
    with torch.no_grad():
        model(tokens())
    yield from seen


def check_gradients(model: Any, alone: Any) -> None:
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        error = (whole(p.grad) - q.grad).abs().max() / q.grad.abs().max()
        assert error < GRADIENT_ERROR, (name, error)


def steps(rank: int, folder: Path) -> None:
    """Three optimizer steps of an MoE model, beside a model that is not sharded."""
    alone, model = tiny(), tiny()
    names = fp8_names(model)
    engine = FakeEngine(alone) if rank == 0 else None
    fp8 = fp8_forward(model, engine)
    convert_layers(alone, names, BF16)
    sharded(model)
    assert fp8.gathered_whole == [  # of 128 rows each
        f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "kv"
    ]
    seen = list(weights_seen(model))
    assert (seen.count(GatheredCodes), seen.count(nn.Parameter)) == (2 * 3, 2 * 2)
    for step in range(3):
        mine = tokens().chunk(WORLD)[rank]
        with torch.no_grad():
            assert torch.equal(model(mine).logits, alone(mine).logits)
        loss_of(model, mine).backward()
        loss_of(alone, tokens()).backward()
        if step == 0:
            check_gradients(model, alone)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # gradients differ by a rounding; what follows is exact
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                q.copy_(whole(p))
                q.grad = None
    found, wanted = dict(hf_tensors(model)), dict(hf_tensors(alone))
    for name in fp8.gathered_whole:  # an engine quantizes it, or the packer
        found[name], found[f"{name}_scale_inv"] = quantize_weight(found[name])
    check_same_bytes(found, wanted)

    fresh = tiny()
    fresh.load_state_dict({name: whole(p) for name, p in model.state_dict().items()})
    if engine is not None:
        engine.sums = sums_of(fresh)
    fp8.check(engine)
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "v_proj" in n).mul_(2)
    with pytest.raises(EngineError, match=r"1 of .*layers\.0\.self_attn\.v_proj"):  # on both ranks
        fp8.check(engine)


def precisions(rank: int, folder: Path) -> None:
    """FP32 shards under a policy of BF16, activation checkpointing, and no resharding."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    for options in ({}, {"reshard_after_forward": False}):
        alone, model = tiny("qwen3"), tiny("qwen3").float()
        convert_layers(model, fp8_names(model), BF16)
        convert_layers(alone, fp8_names(alone), BF16)
        sharded(model, mp_policy=policy, **options)
        model.gradient_checkpointing_enable()
        model.train()
        mine = tokens().chunk(WORLD)[rank]
        with torch.no_grad():
            assert torch.equal(model(mine).logits, alone(mine).logits)
        for _ in range(2):  # micro-batches
            loss_of(model, mine).backward()
            loss_of(alone, tokens()).backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        check_gradients(model, alone)


class Uneven(nn.Module):
    """One layer whose ranks hold whole blocks, and one whose ranks do not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.even = nn.Linear(256, 256, dtype=BF16)
        self.uneven = nn.Linear(256, WORLD * UNEVEN, bias=False, dtype=BF16)
        for name in ("even", "uneven"):
            convert(getattr(self, name), name, BF16)

    def forward(self, x: Tensor) -> Tensor:
        return self.uneven(torch.tanh(self.even(x)))  # type: ignore[no-any-return]


def inputs() -> Tensor:
    return torch.randn(6, 256, generator=torch.Generator().manual_seed(0)).to(BF16)


def uneven(rank: int, folder: Path) -> None:
    """What cannot be gathered as codes is gathered as it is, and follows every change."""
    alone, model, x = Uneven(), fully_shard(Uneven()), inputs()
    seen: list[Any] = []
    for layer in (model.even, model.uneven):
        layer.register_forward_pre_hook(lambda m, _: seen.append(type(m.weight)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for change in ("none", "step", "copy", "shards", "moved", "load"):
        if change == "step":
            optimizer.step()
        elif change in ("copy", "shards"):
            with torch.no_grad():
                for p in model.parameters():
                    (p if change == "copy" else p.to_local()).mul_(2)
        elif change == "moved":
            model.to("cpu")  # FSDP2 has other shards then, also where nothing moves
        elif change == "load":
            model.load_state_dict({n: p.detach() * 0.5 for n, p in model.state_dict().items()})
        with torch.no_grad():
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                q.copy_(whole(p))
        optimizer.zero_grad()
        y = model(x)
        assert torch.equal(y, alone(x)), change
        for tensor in model.state_dict().values():  # what a checkpoint pickles
            assert not hasattr(tensor._local_tensor, "fsdp_pre_all_gather")
        y.float().square().mean().backward()
    assert set(seen[::2]) == {GatheredCodes} and set(seen[1::2]) == {nn.Parameter}
    for name in ("even", "uneven"):  # whose hooks of FSDP2 are the model's
        with pytest.raises(ValueError, match=rf"{name}\.weight is sharded.*unshard"):
            getattr(model, name)(x)
    model.unshard()
    assert torch.equal(model.even(x), alone.even(x))


def one_rank_a_shard(rank: int, folder: Path) -> None:
    """HSDP whose shards are whole: FSDP2 gathers nothing, and codes are made of what it has."""
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))
    alone, model, x = Uneven(), fully_shard(Uneven(), mesh=mesh), inputs()
    for _ in range(2):
        y = model(x)
        assert torch.equal(y, alone(x))
        y.float().square().mean().backward()


def a_shard_of_nan(rank: int, folder: Path) -> None:
    """A check fails on both ranks where one cannot quantize, and the next one is in step."""
    model = tiny("qwen3")
    engine = FakeEngine(model) if rank == 0 else None
    if engine is not None:
        engine.sums = sums_of(model)
    fp8 = fp8_forward(model, engine)
    sharded(model)
    shard = model.model.layers[0].mlp.down_proj.weight.to_local()
    kept = shard[0, 0].item()
    for value in (torch.nan, kept):
        if rank == 1:
            with torch.no_grad():
                shard[0, 0] = value
        with nullcontext() if value == kept else pytest.raises(ManifestError, match="NaN"):
            fp8.check(engine)


def not_resharded(rank: int, folder: Path) -> None:
    """After a forward that leaves every parameter whole, as between a rollout and its update."""
    model = tiny("qwen3")
    engine = FakeEngine(model, kv_cache={"layers": 2, "kv_heads": 2}) if rank == 0 else None
    other = FakeEngine(model, kv_cache=INT8_CACHE) if rank == 0 else None
    if engine is not None:
        engine.sums = sums_of(model)
        engine.kv = {"pending": False, "scales": [[[0.3, 0.3], [0.2, 0.2]]] * 2}
    fp8 = fp8_forward(model, engine)
    sharded(model, reshard_after_forward=False)
    with torch.no_grad():
        plain = model(tokens()).logits
        assert not isinstance(model.model.layers[0].mlp.down_proj.weight, DTensor)
        fp8.sync_kv_scales(engine)
        in_e4m3 = model(tokens()).logits
        assert not torch.equal(in_e4m3, plain)
        fp8.sync_kv_scales(other)
        in_int8 = model(tokens()).logits
        assert not torch.equal(in_int8, plain) and not torch.equal(in_int8, in_e4m3)
    fp8.check(engine)


def refusals(rank: int, folder: Path) -> None:
    """After ``fully_shard``, and where the first rank's engine cannot be asked."""
    model = sharded(tiny("qwen3"))
    with pytest.raises(ValueError, match="before fully_shard"):
        convert_layers(model, fp8_names(model), BF16)
    model = tiny("qwen3")
    with pytest.raises(EngineError, match="update it first"):  # on both ranks
        fp8_forward(model, FakeEngine(model, formats={}) if rank == 0 else None)
    dist.barrier()


@pytest.mark.parametrize(
    "worker", [steps, precisions, uneven, one_rank_a_shard, a_shard_of_nan, not_resharded, refusals]
)
def test_two_ranks(worker: Any, tmp_path: Path) -> None:
    run(worker, tmp_path)
