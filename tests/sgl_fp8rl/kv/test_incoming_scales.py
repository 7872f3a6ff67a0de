"""Names of KV scales in a stream, and what is made of them."""

import math

import pytest
import torch

from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import Manifest, ManifestError, describe
from sgl_fp8rl.receiver.kv import incoming_scales

LAYERS, HEADS = 2, 4
SPELLINGS = ("self_attn.{0}_scale", "self_attn.attn.{0}_scale", "self_attn.{0}_proj.{0}_scale")


OF_LAYER = "model.layers.{}.self_attn.k_scale"


def manifest(*tensors: tuple[str, torch.Tensor]) -> Manifest:
    return describe([("w", torch.zeros(2, 2, dtype=torch.bfloat16)), *tensors])


def single(spelling: str, rows: str = "kv", shape: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{layer}.{spelling.format(row)}": torch.full(shape, 10.0 * layer + i + 1)
        for layer in range(LAYERS)
        for i, row in enumerate(rows)
    }


def assembled(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """After a check that finds them all."""
    names = incoming_scales.check(manifest(*tensors.items()), LAYERS, HEADS)
    assert names == set(tensors)
    scales = incoming_scales.assemble(tensors, LAYERS, HEADS)
    assert scales.shape == (LAYERS, 2, HEADS) and scales.dtype == torch.float32
    return scales


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # a checkpoint's
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_each_spelling_is_known(spelling: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    scales = assembled({n: t.to(dtype) for n, t in single(spelling, "kv", shape).items()})
    assert scales.tolist() == [[[10.0 * n + 1] * HEADS, [10.0 * n + 2] * HEADS] for n in (0, 1)]


def test_one_scale_a_head() -> None:
    tensors = single(SPELLINGS[1], "kv", (HEADS,))
    tensors[next(iter(tensors))] = torch.arange(1.0, HEADS + 1)
    scales = assembled(tensors)
    assert scales[0, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert scales[1, 1].tolist() == [12.0] * HEADS


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.k_proj.weight_scale_inv",
        "model.layers.0.self_attn.k_proj.v_scale",
        "model.layers.0.self_attn.k_norm.weight",
        "model.layers.0.mlp.k_scale",
        "model.layers.0.self_attn.k_scale.weight",
        "k_scale",
        "model.layers.0.self_attn.q_scale",
    ],
)
def test_other_names_are_weights(name: str) -> None:
    assert incoming_scales.names_in([name]) == frozenset()


def test_the_whole_tensor() -> None:
    whole = torch.rand(LAYERS, 2, HEADS)
    assert torch.equal(assembled({KV_SCALES: whole}), whole)
    assert incoming_scales.check(manifest(), LAYERS, HEADS) == frozenset()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({KV_SCALES: torch.ones(LAYERS, 2, HEADS + 1)}, rf"{KV_SCALES}.*FP32.*\(2, 2, 4\)"),
        ({KV_SCALES: torch.ones(LAYERS, 3, HEADS)}, r"\(2, 2, 4\).*no longer Q"),
        ({KV_SCALES: torch.ones(LAYERS, 2, HEADS).bfloat16()}, rf"{KV_SCALES}.*bfloat16.*FP32"),
        (single(SPELLINGS[0]) | {KV_SCALES: torch.ones(LAYERS, 2, HEADS)}, r"self_attn\.k_scale"),
        (single(SPELLINGS[0]) | single(SPELLINGS[1]), r"attn\.k_scale.*attn\.k_scale"),
        (single(SPELLINGS[0], shape=(HEADS + 1,)), r"self_attn.*4 KV heads"),
        (single(SPELLINGS[0], shape=(1, 1)), r"self_attn.*4 KV heads"),
        (single(SPELLINGS[0], "k"), r"\ball 2\b"),
        ({OF_LAYER.format(1): torch.ones(())}, r"\b1 layers.*\b2\b"),
        (single(SPELLINGS[0]) | {OF_LAYER.format(2): torch.ones(())}, r"\b3 layers.*\b2\b"),
    ],
)
def test_refusals(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        incoming_scales.check(manifest(*tensors.items()), LAYERS, HEADS)


def test_nan_passes_on_to_the_check_of_values() -> None:
    tensors = single(SPELLINGS[0]) | {OF_LAYER.format(0): torch.tensor(math.nan)}
    assert bool(incoming_scales.assemble(tensors, LAYERS, HEADS)[0, 0].isnan().all())
