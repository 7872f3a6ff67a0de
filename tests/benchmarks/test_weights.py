"""Shapes of the benchmarked models, the bytes that an update moves, and the trainer's weights."""

from dataclasses import replace

import pytest
import torch

from benchmarks.engines import models, traffic, weights
from sgl_fp8rl.ops.reference import FP8_DTYPE, quantize_weight

TINY_DENSE = models.Shape(hidden=256, intermediate=384, layers=2, heads=2, kv_heads=1, vocab=512)
TINY_MOE = replace(TINY_DENSE, intermediate=128, experts=4, experts_per_token=2)
TINY = pytest.mark.parametrize("shape", [TINY_DENSE, TINY_MOE], ids=["dense", "moe"])


@pytest.mark.parametrize(
    ("model", "count", "hf_tensors"),
    [
        ("qwen3-8b", 8_190_735_360, 36 * 11 + 3),
        ("qwen3-30b-a3b", 30_532_122_624, 48 * (3 * 128 + 9) + 3),
    ],
)
def test_the_shapes_are_those_of_the_published_models(
    model: str, count: int, hf_tensors: int
) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    shape = models.MODELS[model]
    assert sum(p.numel for p in models.parameters(shape)) == count
    assert len(weights.hf_named(weights.bf16_module(shape, "meta"))) == hf_tensors
    few = replace(shape, layers=2)
    config = transformers.AutoConfig.for_model(**models.config(few))
    with torch.device("meta"):
        real = transformers.AutoModelForCausalLM.from_config(config)
    ours = weights.bf16_module(few, "meta")
    assert {n: p.shape for n, p in ours.named_parameters()} == {
        n: p.shape for n, p in real.named_parameters()
    }


DENSE = list(models.parameters(models.MODELS["qwen3-8b"]))
# q and o, k and v, three of the MLP, in 36 layers; the rest stays BF16
CODES = 36 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 12288 * 4096)
SCALES, REST = 4 * CODES // (128 * 128), 8_190_735_360 - CODES


@pytest.mark.parametrize(
    ("source", "target", "bucket", "moved", "ms"),
    [
        ("bf16", "fp8", None, 3 * CODES + SCALES + 4 * REST, 6.0044),
        ("bf16", "fp8", "bf16", 7 * CODES + SCALES + 8 * REST, 13.6237),
        ("bf16", "fp8", "fp8", 5 * CODES + 3 * SCALES + 8 * REST, 10.3939),
        ("fp8", "fp8", None, 2 * (CODES + SCALES) + 4 * REST, 4.3895),
        ("bf16", "bf16", "bf16", 8 * (CODES + REST), 15.2386),
    ],
)
def test_floors_by_hand(
    source: str, target: str, bucket: str | None, moved: int, ms: float
) -> None:
    assert traffic.update_traffic(DENSE, source, target, bucket) == moved
    assert traffic.floor_ms(moved, 4.3) == pytest.approx(ms, abs=1e-4)


def test_what_is_counted_as_fp8_is_what_the_reference_makes() -> None:
    made = sum(tensor.nbytes for _, tensor in weights.fp8_named(TINY_MOE, "cpu"))
    assert made == traffic.payload_bytes(models.parameters(TINY_MOE), "fp8")
    ragged = models.Parameter("w", (3, 129, 300), fp8=True)
    codes, scales = quantize_weight(torch.ones(ragged.shape, dtype=torch.bfloat16))
    assert codes.nbytes + scales.nbytes == traffic.payload_bytes([ragged], "fp8")


@TINY
def test_stock_and_ours_get_the_same_weights(shape: models.Shape) -> None:
    bf16, fp8 = (dict(weights.shared(shape, "cpu", form)) for form in ("bf16", "fp8"))
    wanted = weights.hf_named(weights.bf16_module(shape, "meta"))
    assert {n: t.shape for n, t in bf16.items()} == {n: t.shape for n, t in wanted}
    assert set(fp8) - set(bf16) == {name for name in fp8 if name.endswith("_scale_inv")}
    assert sum(t.dtype == FP8_DTYPE for t in fp8.values()) == 2 * (4 + 3 * (shape.experts or 1))
    for name, weight in bf16.items():
        if fp8[name].dtype != FP8_DTYPE:
            assert torch.equal(fp8[name], weight)
            continue
        codes, scales = quantize_weight(weight)
        assert torch.equal(fp8[name].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(fp8[f"{name}_scale_inv"], scales)
    # a layer more takes no memory
    pointers = {t.untyped_storage().data_ptr() for t in bf16.values()}
    more = weights.shared(replace(shape, layers=9), "cpu")
    assert len({t.untyped_storage().data_ptr() for _, t in more}) == len(pointers)
