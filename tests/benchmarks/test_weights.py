"""Shapes of the benchmarked models, the bytes that an update moves, and the trainer's weights."""

from dataclasses import replace

import pytest
import torch

from benchmarks.engines import models, stock_push, traffic, weights
from sgl_fp8rl.ops.reference import FP8_DTYPE, dequantize_weight, quantize_weight

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
    shape = models.MODELS[model]
    assert sum(p.numel for p in models.parameters(shape)) == count
    with torch.device("meta"):
        assert len(weights.hf_named(weights.bf16_module(shape, "meta"))) == hf_tensors


@pytest.mark.parametrize("model", models.MODELS)
def test_the_module_has_the_parameters_of_transformers(model: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    shape = replace(models.MODELS[model], layers=2)
    config = transformers.AutoConfig.for_model(**models.config(shape))
    with torch.device("meta"):
        real = transformers.AutoModelForCausalLM.from_config(config)
    ours = weights.bf16_module(shape, "meta")
    assert {n: p.shape for n, p in ours.named_parameters()} == {
        n: p.shape for n, p in real.named_parameters()
    }


def test_floors_by_hand() -> None:
    dense = list(models.parameters(models.MODELS["qwen3-8b"]))
    # q and o, k and v, three of the MLP, in 36 layers; the rest stays BF16
    fp8 = 36 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 12288 * 4096)
    rest = 8_190_735_360 - fp8
    scales = 4 * fp8 // (128 * 128)
    mapped = traffic.update_traffic(dense, "bf16", "fp8", bucket=None)
    assert mapped == 2 * fp8 + fp8 + scales + 4 * rest == 25_818_869_760
    assert traffic.payload_bytes(dense, "bf16") == 16_381_470_720
    assert traffic.floor_ms(mapped, 4.3) == pytest.approx(6.0044, abs=1e-4)
    bucket = traffic.update_traffic(dense, "bf16", "fp8", bucket="bf16")
    assert traffic.floor_ms(bucket, 4.3) == pytest.approx(13.6237, abs=1e-4)
    bucket = traffic.update_traffic(dense, "bf16", "fp8", bucket="fp8")
    assert bucket == 2 * fp8 + 3 * (fp8 + scales) + 8 * rest
    assert traffic.floor_ms(bucket, 4.3) == pytest.approx(10.3939, abs=1e-4)

    assert traffic.payload_bytes(dense, "fp8") == fp8 + scales + 2 * rest
    from_fp8 = traffic.update_traffic(dense, "fp8", "fp8", bucket=None)
    assert from_fp8 == 2 * (fp8 + scales) + 4 * rest == 18_874_798_080
    stock = traffic.update_traffic(dense, "bf16", "bf16", bucket="bf16")
    assert traffic.floor_ms(stock, 4.3) == pytest.approx(15.2386, abs=1e-4)

    moe = list(models.parameters(models.MODELS["qwen3-30b-a3b"]))
    mapped = traffic.update_traffic(moe, "bf16", "fp8", bucket=None)
    assert traffic.floor_ms(mapped, 4.3) == pytest.approx(21.4509, abs=1e-4)


def test_what_is_counted_as_fp8_is_what_the_reference_makes() -> None:
    named = weights.fp8_named(TINY_MOE, "cpu")
    assert stock_push.sum_bytes(named) == traffic.payload_bytes(models.parameters(TINY_MOE), "fp8")
    ragged = models.Parameter("w", (3, 129, 300), fp8=True)
    codes, scales = quantize_weight(torch.ones(ragged.shape, dtype=torch.bfloat16))
    assert codes.nbytes + scales.nbytes == traffic.payload_bytes([ragged], "fp8")


@TINY
def test_hf_names_share_the_module_s_memory(shape: models.Shape) -> None:
    module = weights.bf16_module(shape, "cpu")
    named = dict(weights.hf_named(module))
    assert sum(t.numel() for t in named.values()) == sum(p.numel() for p in module.parameters())
    last = f"model.layers.1.mlp.{'experts.3.' if shape.experts else ''}up_proj.weight"
    before = {name: tensor.clone() for name, tensor in named.items()}
    weights.renew(module.parameters())
    assert all(not torch.equal(before[name], tensor) for name, tensor in named.items())
    if shape.experts:
        fused = module.get_parameter("model.layers.1.mlp.experts.gate_up_proj")
        assert torch.equal(named[last], fused[3, shape.intermediate :])
    assert named[last].float().std().item() == pytest.approx(weights.STD, rel=0.1)


@TINY
def test_codes_and_scales_belong_together_and_are_renewed(shape: models.Shape) -> None:
    torch.manual_seed(0)
    named = dict(weights.fp8_named(shape, "cpu"))
    codes = {name: t for name, t in named.items() if t.dtype == FP8_DTYPE}
    expected = 2 * (4 + 3 * (shape.experts or 1))
    assert len(codes) == expected
    torch.manual_seed(0)  # the parameters are drawn in the same order
    original = dict(weights.hf_named(weights.bf16_module(shape, "cpu")))
    assert original.keys() == {name for name in named if not name.endswith("_scale_inv")}
    for name, tensor in codes.items():
        scales = named[f"{name}_scale_inv"]
        want_codes, want_scales = quantize_weight(original[name])
        assert torch.equal(tensor.view(torch.uint8), want_codes.view(torch.uint8))
        assert torch.equal(scales, want_scales)
    before = {name: dequantize_weight(t, named[f"{name}_scale_inv"]) for name, t in codes.items()}
    addresses = {name: t.data_ptr() for name, t in named.items()}
    weights.renew(named.values())
    assert addresses == {name: t.data_ptr() for name, t in named.items()}
    for name, tensor in codes.items():
        after = dequantize_weight(tensor, named[f"{name}_scale_inv"])
        assert after.isfinite().all() and after.abs().max() < 0.2
        changed = after != before[name]
        assert changed[before[name] != 0].all()
