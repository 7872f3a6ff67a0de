"""The FP8 linear: what it refuses of backends, and how it computes with padding.

Backends that move or repack weights are refused: an update would not reach what they read.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.layers.linear import (
    FP8RLLinearMethod,
    check_activations,
    keep_storage,
    shards,
)
from sgl_fp8rl.formats import BLOCK_FP8, BLOCK_FP8_UE8M0
from sgl_fp8rl.formats.padding import Shard, fit
from sgl_fp8rl.ops.reference import fp8_linear, quantize_weight


def layer() -> nn.Module:
    """On no CPU, where SGLang's post-processing is left out."""
    return nn.Linear(4, 4, device="meta")


def transposes(layer: Any) -> None:
    layer.weight.data = layer.weight.data.t()


CHANGES: dict[str, Callable[[Any], object]] = {
    "copies scales": lambda layer: setattr(layer, "padded_scale", torch.ones(2)),
    "repacks": lambda layer: setattr(
        layer, "weight", nn.Parameter(torch.empty(2, 8, device="meta"))
    ),
    "transposes": transposes,
    "rounds scales": lambda layer: setattr(layer.weight, "format_ue8m0", True),
    "drops": lambda layer: delattr(layer, "weight"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_backend_with_a_layout_of_its_own_is_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"mlp\.down.*--fp8-gemm-backend"):
        keep_storage(CHANGES[name], layer(), "mlp.down")
    done: list[nn.Module] = []  # other post-processing is run
    keep_storage(done.append, made := layer(), "mlp.down")
    assert done == [made]


def test_activations_that_no_kernel_rounds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_activations(BLOCK_FP8_UE8M0, torch.float16)  # a CPU's reference does
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_activations(BLOCK_FP8_UE8M0, torch.bfloat16)
    check_activations(BLOCK_FP8, torch.float16)
    with pytest.raises(ValueError, match=r"FP16 .* block-fp8-ue8m0 .* --dtype bfloat16"):
        check_activations(BLOCK_FP8_UE8M0, torch.float16)


@pytest.mark.parametrize("rank", range(4))
def test_ranks_keep_their_heads(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    group = SimpleNamespace(rank_in_group=rank, world_size=4)
    monkeypatch.setattr(compat, "get_tp_group", lambda: group)
    plain, qkv = SimpleNamespace(), SimpleNamespace(num_kv_head_replicas=2)
    mine = Shard(448, rank, 4)
    assert shards(plain, 896, [448], 896, 1792) == ([mine], Shard(896))
    assert shards(plain, 448, [896], 1792, 896) == ([Shard(896)], mine)
    # two KV heads of 64, each on two ranks
    rows, _ = shards(qkv, 896, [448, 64, 64], 896, 4 * 576) or ([], None)
    assert rows == [mine, Shard(64, rank // 2, 2), Shard(64, rank // 2, 2)]
    # a group of two of the four ranks: which of its halves this rank has is not known
    assert shards(plain, 896, [448], 896, 896) is None


@pytest.mark.parametrize("biased", [False, True])
def test_a_padded_layer_takes_and_gives_no_padding(biased: bool) -> None:
    parts = [192, 64, 64]
    padding, _ = fit(BLOCK_FP8, [Shard(size, 1, 2) for size in parts], Shard(320))
    assert padding is not None and padding.shape == (512, 384)
    random = torch.Generator().manual_seed(0)
    codes, scales = quantize_weight(torch.randn(padding.shape, generator=random))
    layer = SimpleNamespace(weight=codes, weight_scale_inv=scales)
    method: Any = object.__new__(FP8RLLinearMethod)
    method.padding = padding
    x = torch.randn(2, 3, 320, generator=random).bfloat16()
    bias = torch.randn(320, generator=random).bfloat16() if biased else None
    y = method.apply(layer, x, bias)
    stored = fp8_linear(torch.nn.functional.pad(x, (0, 64)), codes, scales)
    # q begins behind 64 rows of the other rank, k and v behind as many in blocks of their own
    wanted = torch.cat([stored[..., 64:256], stored[..., 320:384], stored[..., 448:512]], -1)
    assert torch.equal(y, wanted if bias is None else wanted + bias)
    assert y.is_contiguous()
