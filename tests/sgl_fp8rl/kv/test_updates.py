"""KV scales in an update: checked before the first write, in force with the commit or never."""

import math

import pytest
import torch

from sgl_fp8rl.engine.startup.kv_setup import attach
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from sgl_fp8rl.receiver.kv import kv_stats
from sgl_fp8rl.receiver.kv.quantized import Heads, KVScalesError
from sgl_fp8rl.receiver.kv.scales import KVScales
from tests.sgl_fp8rl.kv import fakes
from tests.sgl_fp8rl.receiver import toy

LAYERS, HEADS = 2, 4
SCALES = torch.arange(1.0, 1 + LAYERS * 2 * HEADS).view(LAYERS, 2, HEADS)


def engine(scheme: str = "engine", device: str = "cpu") -> EngineWeights:
    """A toy model with an FP8 KV cache, whose routes are recorded."""
    weights = toy.engine(toy.toy().to(device), toy.SHAPES)
    scales = KVScales(LAYERS, Heads(HEADS, 2, 2), scheme, torch.device(device))
    attach(scales, weights.model, [fakes.layer(i) for i in range(LAYERS)])
    weights.kv = scales
    return weights


def tensors(scales: torch.Tensor | None = None, seed: int = 0) -> toy.Tensors:
    return toy.checkpoint(seed) | ({} if scales is None else {KV_SCALES: scales})


def kv_of(weights: EngineWeights) -> KVScales:
    assert weights.kv is not None
    return weights.kv


@pytest.mark.parametrize("chunk_bytes", [toy.CHUNK_BYTES, 1 << 17])
def test_scales_come_with_the_weights(chunk_bytes: int) -> None:
    """They are in force from the commit on, and not before."""
    weights, sent = engine(), tensors(SCALES)
    kv = kv_of(weights)
    before = kv.scales.clone()
    session = toy.begin(weights, sent, chunk_bytes=chunk_bytes)
    toy.write(session, sent)
    session.finish()
    assert torch.equal(kv.scales, before)
    weights.commit()
    assert torch.equal(kv.scales.amax(-1), SCALES.amax(-1))
    assert torch.equal(kv.store, kv.scales[..., 2:].transpose(0, 1)), "this rank's heads"
    assert not kv.pending
    assert toy.same(toy.contents(weights.model), toy.expected(toy.checkpoint()))


def test_single_names_are_honoured() -> None:
    weights = engine("trainer")
    named = {
        f"model.layers.{layer}.self_attn.attn.{row}_scale": torch.tensor(2.0 + layer)
        for layer in range(LAYERS)
        for row in "kv"
    }
    toy.update(weights, toy.checkpoint() | named)
    assert kv_of(weights).store[0].tolist() == [[2.0, 2.0], [3.0, 3.0]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -2.0, "a weight"])
def test_an_update_that_fails_puts_no_scales_in_force(bad: float | str) -> None:
    weights = engine()
    toy.update(weights, tensors(SCALES))
    before = {name: b.clone() for name, b in kv_of(weights).named_buffers()}
    sent = tensors(SCALES.flip(0), seed=1)
    if isinstance(bad, str):
        sent["attn.v.weight"] = torch.full_like(sent["attn.v.weight"], torch.nan)
    else:
        sent[KV_SCALES][1, 0, 3] = bad
    session = toy.begin(weights, sent, version=1)
    said = "NaN" if isinstance(bad, str) else r"K .*layer 1, KV head 3"
    with pytest.raises(ValueError if isinstance(bad, str) else KVScalesError, match=said):
        toy.write(session, sent)
        session.finish()
    assert not session.finished and session.dirty
    weights.quarantine("a failed update")
    assert not kv_of(weights).pending
    for name, buffer in kv_of(weights).named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_wrong_shapes_are_refused_before_anything_is_written() -> None:
    weights = engine()
    with pytest.raises(ManifestError, match=r"\(2, 2, 4\)"):
        toy.begin(weights, tensors(torch.ones(LAYERS, 2, 3)))
    assert weights.state is State.SERVING and weights.session is None


def test_a_cache_that_is_not_fp8_refuses_scales() -> None:
    weights = toy.engine(toy.toy(), toy.SHAPES)
    with pytest.raises(ManifestError, match="KV cache"):
        toy.begin(weights, tensors(SCALES))


def test_a_first_update_records_routes_without_the_scales() -> None:
    weights = engine()
    weights.table = None
    toy.update(weights, tensors(SCALES))
    assert weights.table is not None
    assert KV_SCALES not in weights.table.sources
    toy.update(weights, tensors(), version=1)  # and the next one may come without


# -- what an engine tells


def test_the_layout() -> None:
    assert kv_stats.layout(None) is None
    assert kv_stats.layout(engine().kv) == {
        "format": "e4m3",
        "layers": LAYERS,
        "kv_heads": HEADS,
    }


def test_what_a_report_says() -> None:
    weights = engine()
    toy.update(weights, tensors(SCALES))
    kv = kv_of(weights)
    kv.statistics[1] = torch.tensor([10, 3, 4, 0x3FC00000, 0x40000000])
    told = kv_stats.report(kv, [kv_stats.of_rank(kv)])
    assert told["scales"] == kv.scales.tolist()
    assert not told["pending"]
    zero = {"tokens": 0, "clipped_k": 0, "clipped_v": 0, "amax_k": 0.0, "amax_v": 0.0}
    some = {"tokens": 10, "clipped_k": 3, "clipped_v": 4, "amax_k": 1.5, "amax_v": 2.0}
    assert told["statistics"] == [zero, some]


def test_statistics_of_all_ranks_together() -> None:
    """The same tokens on each rank, with other heads."""
    ranks = torch.tensor([[[10, 3, 0, 0x3F800000, 0]], [[10, 4, 1, 0, 0x40000000]]])
    assert kv_stats.statistics(ranks) == [
        {"tokens": 10, "clipped_k": 7, "clipped_v": 1, "amax_k": 1.0, "amax_v": 2.0}
    ]
