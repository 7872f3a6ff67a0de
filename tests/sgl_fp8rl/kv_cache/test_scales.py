"""The scales' buffers: what each kernel is given, in place, and the file that holds them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sgl_fp8rl.kv_cache import backends
from sgl_fp8rl.kv_cache.backends import FA3, AttentionBackend
from sgl_fp8rl.kv_cache.kernel_scales import KernelScales, power_of_two_above
from sgl_fp8rl.kv_cache.quantized import Heads, KVScalesError
from sgl_fp8rl.kv_cache.scales import KVScales, ScaledLayer, read_file
from tests.sgl_fp8rl.kv_cache import fakes

CPU = torch.device("cpu")
POSITIVE = st.floats(2.0**-30, 2.0**30, width=32)


def random_scales(layers: int = 3, heads: int = 4, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.exp(3 * torch.randn(layers, 3, heads, generator=generator))


@given(POSITIVE)
def test_power_of_two_above(value: float) -> None:
    mantissa, exponent = math.frexp(value)
    wanted = math.ldexp(1.0, exponent - (mantissa == 0.5))
    assert float(power_of_two_above(torch.tensor([value]))) == wanted


def test_factors_are_those_of_float64() -> None:
    """Products restore k_scale * q and v_scale, of the layer's largest head."""
    scales = KVScales(3, Heads(4, 1, 2), "engine", CPU)
    wanted = random_scales()
    scales.write(wanted)
    assert torch.equal(scales.scales, wanted.amax(-1, keepdim=True).expand_as(wanted))
    kept = scales.scales.double().numpy()[:, :, 1:3]
    buffers = (scales.get_buffer(name) for name in ("store", "q_factor", FA3))
    store, (factor,), (fa3,) = (buffer.double().numpy() for buffer in buffers)
    assert np.array_equal(store[0], kept[:, 0]) and np.array_equal(store[1], kept[:, 1])
    query = np.exp2(np.ceil(np.log2(np.maximum(kept[:, 2].max(-1), 1))))
    assert np.array_equal(fa3 * factor, kept[:, 0]), "q . k"
    assert np.array_equal(factor, np.broadcast_to(1 / query[:, None], factor.shape))


def test_unit_scales_make_unit_factors() -> None:
    scales = KVScales(2, Heads(2, 0, 2), "unit", CPU)
    buffers = dict(scales.named_buffers())
    assert buffers.keys() > {"scales", "store", "q_factor", FA3}
    del buffers["statistics"]
    for buffer in buffers.values():
        assert bool((buffer == 1).all())


def former(scales_L3h: torch.Tensor) -> dict[str, torch.Tensor]:
    """The factors by the formulas that each kernel was measured with, as tensors of all layers."""
    k_Lh, v_Lh, q_Lh = scales_L3h.contiguous().unbind(1)
    query_L = power_of_two_above(q_Lh.amax(-1).clamp_min(1.0))
    largest = torch.finfo(torch.float32).max
    return {
        "k_scale": k_Lh,
        "v_scale": v_Lh,
        "q_factor": (1 / query_L[:, None]).expand_as(k_Lh),
        "fa3_k_descale": (k_Lh * query_L[:, None]).clamp_max(largest),
    }


def held(mine: ScaledLayer) -> dict[str, torch.Tensor]:
    """What the hooks hand to kernels for a layer."""
    (k_descale,) = mine.factors[FA3]
    return {
        "k_scale": mine.k_scale_h,
        "v_scale": mine.v_scale_h,
        "q_factor": mine.q_factor_h,
        "fa3_k_descale": k_descale,
    }


@pytest.mark.parametrize("heads", [Heads(4, 0, 4), Heads(4, 1, 2), Heads(4, 3, 1)], ids=str)
@pytest.mark.parametrize("size", [2.0**-20, 1.0, 2.0**20, 2.0**110])
def test_kernels_are_given_the_former_values_to_the_bit(heads: Heads, size: float) -> None:
    """Also where one layer alone is written, and where a product would leave FP32."""
    scales = KVScales(3, heads, "engine", CPU)
    layers = [ScaledLayer(scales, index) for index in range(3)]
    wanted = size * random_scales()
    wanted[1, 2] = 8.0  # a power of two stays what it is
    scales.write(wanted)
    wanted[2] = size * random_scales(1, seed=1)[0]
    scales.write(wanted[2:], first=2)
    kept = wanted.amax(-1, keepdim=True).expand_as(wanted)[..., heads.mine]
    expected = former(kept)
    for index, mine in enumerate(layers):
        for name, tensor in held(mine).items():
            assert tensor.stride() == (1,) and torch.equal(tensor, expected[name][index]), name
    if size == 1:  # the control: K and V swapped; larger ones end at the largest FP32
        swapped = former(kept[:, [1, 0, 2]])
        del swapped["q_factor"]
        for name, tensors in swapped.items():
            assert not torch.equal(held(layers[0])[name], tensors[0]), name


def test_a_row_of_the_table_is_all_that_a_kernel_needs_to_get_factors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def halves(given: KernelScales) -> torch.Tensor:
        return (given.scales_L3h[:, 0] / 2).unsqueeze(0)

    monkeypatch.setitem(backends.BACKENDS, "other", AttentionBackend("a test", derive=halves))
    scales, (first, second) = fakes.scaled(layers=2)
    ((mine_h,), (other_h,)) = (la.fp8rl_layer.factors["other"] for la in (first, second))
    address = mine_h.data_ptr()
    scales.write(torch.full((1, 3, 2), 8.0))
    assert mine_h.tolist() == [4.0, 4.0] and mine_h.data_ptr() == address
    assert other_h.tolist() == [0.5, 0.5]
    assert second.fp8rl_layer.factors.keys() == {FA3, "other"}


def test_buffers_are_fp32_under_sglangs_default_dtype() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        scales = KVScales(1, Heads(2, 0, 2), "engine", CPU)
    finally:
        torch.set_default_dtype(torch.float32)
    dtypes = {name: buffer.dtype for name, buffer in scales.named_buffers()}
    assert dtypes.pop("statistics") == torch.int64
    assert set(dtypes.values()) == {torch.float32}


def test_everything_is_written_in_place() -> None:
    """The views that graphs read see new scales, and no buffer moves."""
    scales, (first, second) = fakes.scaled(layers=2)
    addresses = {name: buffer.data_ptr() for name, buffer in scales.named_buffers()}
    scales.statistics += 1
    scales.pending = {0, 1}
    scales.write(torch.tensor([[[8.0, 2.0], [1.0, 4.0], [2.0, 1.0]]]), first=1)
    assert addresses == {name: buffer.data_ptr() for name, buffer in scales.named_buffers()}
    mine, other = second.fp8rl_layer, first.fp8rl_layer
    assert mine.k_scale_h.tolist() == [8.0, 8.0] and mine.v_scale_h.tolist() == [4.0, 4.0]
    assert mine.q_factor_h.tolist() == [0.5, 0.5]
    assert [factor.tolist() for factor in mine.factors[FA3]] == [[16.0, 16.0]]
    assert other.k_scale_h.tolist() == [1.0, 1.0]
    assert mine.statistics.tolist() == [0] * 5 and other.statistics.tolist() == [1] * 5
    assert scales.pending == {0}


def test_buffers_belong_to_the_model_and_layers_of_one_id_share_a_row() -> None:
    from sgl_fp8rl.engine.kv_setup import attach

    model, layers = nn.Module(), [fakes.layer(i) for i in (7, 3, 7)]
    scales = KVScales(2, Heads(2, 0, 2), "engine", CPU)
    attach(scales, model, layers)
    assert {name.split(".")[0] for name, _ in model.named_buffers()} == {"fp8rl_kv"}
    assert [layer.fp8rl_layer.layer_index for layer in layers] == [1, 0, 1]  # type: ignore[union-attr]
    assert not list(layers[0].named_buffers())


@pytest.mark.parametrize(
    ("total", "tp_size", "kept"),
    [
        (8, 1, [range(8)]),
        (8, 4, [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]),
        (2, 4, [range(0, 1), range(0, 1), range(1, 2), range(1, 2)]),  # replicated
        (1, 2, [range(0, 1), range(0, 1)]),
    ],
)
def test_heads_of_each_rank(total: int, tp_size: int, kept: list[range]) -> None:
    for rank, wanted in enumerate(kept):
        assert list(range(total))[Heads.of(total, rank, tp_size).mine] == list(wanted)


@pytest.mark.parametrize(
    ("scheme", "scales_after", "pending"),
    [("engine", 3.0, {0, 1}), ("trainer", 3.0, set()), ("unit", 1.0, set())],
)
def test_an_update_without_scales(scheme: str, scales_after: float, pending: set[int]) -> None:
    scales = KVScales(2, Heads(2, 0, 2), scheme, CPU)
    scales.after_update(torch.full((2, 3, 2), 3.0))
    assert not scales.pending
    assert bool((scales.scales == 3.0).all()), "what an update brings is used under each scheme"
    scales.after_update(None)
    assert bool((scales.store == scales_after).all())
    assert scales.pending == pending


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, 2.0**49, 2.0**-49])
def test_what_is_no_scale_is_refused(bad: float) -> None:
    scales = KVScales(2, Heads(2, 0, 2), "engine", CPU)
    wrong = torch.ones(2, 3, 2)
    scales.check(wrong)
    wrong[1, 2, 0] = bad
    with pytest.raises(KVScalesError, match=f"Q .*layer 1, KV head 0 .*{bad}"):
        scales.check(wrong)


@pytest.mark.parametrize("shape", [(1, 3, 2), (2, 2, 2), (2, 3, 1), (2, 3, 4), (12,)])
def test_wrong_shapes_are_refused(shape: tuple[int, ...]) -> None:
    scales = KVScales(2, Heads(2, 0, 2), "engine", CPU)
    with pytest.raises(KVScalesError, match=r"\(2, 3, 2\)"):
        scales.check(torch.ones(shape))


def test_a_file_round_trips(tmp_path: Path) -> None:
    one, other = (KVScales(3, Heads(4, 0, 4), "engine", CPU) for _ in "ab")
    one.write(random_scales())
    in_force, _ = one.snapshot()
    path = tmp_path / "scales.json"
    path.write_text(json.dumps({"scheme": "engine", "scales": in_force.tolist()}))
    other.recalibrate()
    other.load(path)
    assert not other.pending
    for name, buffer in one.named_buffers():
        assert torch.equal(other.get_buffer(name), buffer), name


@pytest.mark.parametrize(
    "content", ["", "[]", '{"scale": 1}', '{"scales": [[1], [1, 2]]}', '{"scales": 3}', "{}"]
)
def test_files_without_scales(content: str, tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    path.write_text(content)
    for file in (path, tmp_path / "absent.json"):
        with pytest.raises(KVScalesError, match=file.name):
            read_file(file)
