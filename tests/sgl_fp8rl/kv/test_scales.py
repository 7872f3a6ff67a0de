"""The scales' buffers: what each kernel is given, in place, and the file that holds them."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from sgl_fp8rl.receiver.kv.quantized import Heads, KVScalesError
from sgl_fp8rl.receiver.kv.scales import KVScales, ScaledLayer, read_file
from tests.sgl_fp8rl.kv import fakes

CPU = torch.device("cpu")


def random_scales(layers: int = 3, heads: int = 4, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.exp(3 * torch.randn(layers, 2, heads, generator=generator))


@pytest.mark.parametrize("heads", [Heads(4, 0, 4), Heads(4, 1, 2), Heads(4, 3, 1)], ids=str)
def test_a_layer_has_the_largest_scale_of_its_heads(heads: Heads) -> None:
    """Also where one layer alone is written."""
    scales = KVScales(3, heads, "engine", CPU)
    layers = [ScaledLayer(scales, index) for index in range(3)]
    wanted = random_scales()
    scales.write(wanted)
    wanted[2] = random_scales(1, seed=1)[0]
    scales.write(wanted[2:], first=2)
    kept = wanted.amax(-1, keepdim=True).expand_as(wanted)
    assert torch.equal(scales.scales, kept)
    for index, mine in enumerate(layers):
        for row, found in enumerate((mine.k_scale_h, mine.v_scale_h)):
            assert found.stride() == (1,) and torch.equal(found, kept[index, row, heads.mine])


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
    scales.write(torch.tensor([[[8.0, 2.0], [1.0, 4.0]]]), first=1)
    assert addresses == {name: buffer.data_ptr() for name, buffer in scales.named_buffers()}
    mine, other = second.fp8rl_layer, first.fp8rl_layer
    assert mine.k_scale_h.tolist() == [8.0, 8.0] and mine.v_scale_h.tolist() == [4.0, 4.0]
    assert other.k_scale_h.tolist() == [1.0, 1.0]
    assert mine.statistics.tolist() == [0] * 5 and other.statistics.tolist() == [1] * 5
    assert scales.pending == {0}


def test_buffers_belong_to_the_model_and_layers_of_one_id_share_a_row() -> None:
    from sgl_fp8rl.engine.startup.kv_setup import attach

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
    scales.after_update(torch.full((2, 2, 2), 3.0))
    assert not scales.pending
    assert bool((scales.scales == 3.0).all()), "what an update brings is used under each scheme"
    scales.after_update(None)
    assert bool((scales.store == scales_after).all())
    assert scales.pending == pending


def test_what_is_no_scale_is_refused() -> None:
    scales = KVScales(2, Heads(2, 0, 2), "engine", CPU)
    scales.check(torch.ones(2, 2, 2))
    for bad in (0.0, -1.0, math.nan, math.inf, 2.0**49, 2.0**-49):
        wrong = torch.ones(2, 2, 2)
        wrong[1, 1, 0] = bad
        with pytest.raises(KVScalesError, match=f"V .*layer 1, KV head 0 .*{bad}"):
            scales.check(wrong)
    for shape in ((1, 2, 2), (2, 3, 2), (2, 2, 1), (2, 2, 4), (8,)):
        with pytest.raises(KVScalesError, match=r"\(2, 2, 2\): layers, K and V \(no longer Q\)"):
            scales.check(torch.ones(shape))


def test_a_file_round_trips(tmp_path: Path) -> None:
    one, other = (KVScales(3, Heads(4, 0, 4), "engine", CPU) for _ in "ab")
    one.write(random_scales())
    in_force, _ = one.read()
    path = tmp_path / "scales.json"
    path.write_text(json.dumps({"scheme": "engine", "scales": in_force.tolist()}))
    other.recalibrate()
    other.load(path)
    assert not other.pending
    for name, buffer in one.named_buffers():
        assert torch.equal(other.get_buffer(name), buffer), name


@pytest.mark.parametrize(
    "content", [None, "", "[]", '{"scale": 1}', '{"scales": [[1], [1, 2]]}', '{"scales": 3}', "{}"]
)
def test_files_without_scales(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(KVScalesError, match=path.name):
        read_file(path)
